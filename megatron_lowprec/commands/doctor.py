"""What is installed here and what is missing, the GPUs, and which recipes run natively on them.

    megatron-lowprec doctor

An extra is a group of optional packages: pip install 'megatron-lowprec[train]'.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from megatron_lowprec import __version__
from megatron_lowprec.errors import Parser, run_tool
from megatron_lowprec.linear.backends.table import ARCHS, native_gemms, resolve, unverified
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.registry import get_recipe, recipes
from megatron_lowprec.text_tables import plain_table

_NAME = "megatron-lowprec"
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)(?:;.*extra == ['\"]([\w-]+)['\"])?")
_HIDDEN = ("dev", "lm-eval")  # extras of developers, and of the tools of the repository
_WIDE = 8192  # sizes that every native GEMM supports


def main(arguments: Sequence[str] | None = None, program: str = "megatron-lowprec doctor") -> int:
    """Exit code 0: a missing package is no error."""
    Parser(prog=program, description=__doc__).parse_args(arguments)
    return run_tool(program, lambda: print(*lines(), sep="\n"))


def lines() -> Iterator[str]:
    """The packages, the devices and the recipes, a table each."""
    yield f"{_NAME} {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield ""
    rows, missing = packages()
    yield from plain_table(["package", "installed", "wanted", "for"], rows)
    yield ""
    for extra, names in missing.items():
        yield f"without {', '.join(names)}: {_FOR.get(extra, extra)}; pip install '{_NAME}[{extra}]'"
    yield from _index_builder()
    yield ""
    here, devices = _devices()
    yield from devices
    yield ""
    archs = list(dict.fromkeys((here, *ARCHS)))
    heads = ["recipe", *(f"{arch} (here)" if arch == here else arch for arch in archs)]
    yield from plain_table(heads, [[name, *(runs(get_recipe(name), arch) for arch in archs)] for name in recipes()])
    yield ""
    yield "native: the quantized GEMMs run on low-precision units. emulated: the same numerics, slower than bf16."
    yield "native*: on hardware that the project has not run. MX and NVFP4 are checked there at the start of a run, and"
    yield "emulated where that fails."
    yield "sm89 Ada, sm90 Hopper, sm100 to sm120 Blackwell; sizes of layers decide too: megatron-lowprec recipes NAME"


# What a missing extra costs.
_FOR = {
    "train": "no training, evaluation, conversion and sweeps; recipes and convert work",
    "lab": "no reports, figures and experiments",
    "te": "no --transformer-impl transformer_engine",
    "wandb": "no --wandb-project",
    "datasets": "no streams of Hugging Face's hub",
    "zstd": "no .jsonl.zst files",
    "sentencepiece": "no SentencePieceTokenizer",
    "peft": "no LoRA by peft, no Trainer of Hugging Face",
    "torchtitan": "no converter for torchtitan",
}


def requirements() -> list[tuple[str, str, str]]:
    """(package, range of versions, extra or "") of this distribution's metadata; empty if it is not installed."""
    try:
        found = [_REQUIREMENT.match(line) for line in metadata.requires(_NAME) or ()]
    except metadata.PackageNotFoundError:
        return []
    return [(match[1], match[2].strip(), match[3] or "") for match in found if match]


def packages() -> tuple[list[list[str]], dict[str, list[str]]]:
    """Rows of the table, and extra -> its packages that are missing."""
    rows, missing = [], dict[str, list[str]]()
    for name, wanted, extra in requirements():
        if extra in _HIDDEN or name == _NAME:
            continue
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = "missing"
            missing.setdefault(extra, []).append(name)
        rows.append([name, version, wanted, f"[{extra}]" if extra else "all"])
    return rows, missing


def runs(recipe: Recipe, arch: str) -> str:
    """How a recipe's GEMMs run on "cpu" or a compute capability such as "sm90"; names the native ones if some are."""
    quantized, target = [name for name, gemm in recipe.gemms.items() if gemm.quantized], Target(arch, _WIDE, _WIDE)
    native = native_gemms(recipe, target)
    if not quantized:
        return "compute dtype"
    mark = "*" if unverified(resolve(recipe, target).values(), arch) else ""
    if len(native) in (0, len(quantized)):
        return f"native{mark}" if native else "emulated"
    return f"native{mark}: {' '.join(name for name in quantized if name in native)}"


def _devices() -> tuple[str, list[str]]:
    """ "cpu" or the first GPU's compute capability, and a line for each device."""
    import torch

    from megatron_lowprec.kernels.dispatch import arch_here, have_triton

    cores = len(os.sched_getaffinity(0))
    found = [f"CPU: {cores} cores"]
    for at in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(at)
        found.append(f"GPU {at}: {gpu.name}, sm{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB")
    if len(found) == 1:
        found.append("no GPU that torch sees: all GEMMs are emulated here")
    elif not have_triton():
        found.append("no Triton: kernels are plain torch, which is slow; install the one that this torch was made with")
    return arch_here(), found


def _index_builder() -> list[str]:
    """A line if Megatron-core is there without its compiled part, which reads prepared corpora."""
    try:
        places = find_spec("megatron.core").submodule_search_locations  # type: ignore[union-attr]
    except (ModuleNotFoundError, AttributeError):
        return []
    if any(any(Path(place, "datasets").glob("helpers_cpp.*.so")) for place in places or ()):
        return []
    return ["megatron-core lacks its compiled datasets.helpers_cpp: training needs a wheel of this Python version"]
