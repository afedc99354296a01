"""Instructions an entry of the MX quantizers, counted in their compiled code. Needs no GPU.

``python -m tools.bench.instructions`` compiles each quantizer in every tiling that tuning
may choose. The kernels have no loops, so each instruction counts once; the rare branch of an IEEE
division is counted as well.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from megatron_lowprec.errors import Parser, run_tool
from megatron_lowprec.text_tables import Column, Row, named, render
from megatron_lowprec.training.config.paths import output_file
from tools.bench.commands.quantize import DIRECTIONS, FORMAT_NAMES, KINDS, Variant, run_kernel, variants

# Of 128 instructions a cycle, a multiprocessor of Hopper executes at most 64 integer and logic ones (comparisons,
# selections and conversions of fp32 included) and 64 integer multiplications. IMAD.MOV and the like set registers.
CLASSES = {
    "integer": "LOP3 SHF IADD3 VIADD ISETP SEL FSEL FMNMX FSETP VIMNMX PRMT LEA MOV F2FP PLOP3 CS2R P2R R2P",
    "multiply": "IMAD",
    "fp32": "FADD FMUL FFMA HADD2 HMUL2 HFMA2",
    "memory": "LDG STG LDS STS LDSM STSM LDL STL",
}
COLUMNS = (
    *named("format", "kind", "direction", "tiling"),
    Column("total", "all", ".1f"),
    *(Column(name, name, ".1f") for name in CLASSES),
    Column("spilled", "spills", "d"),
)
_CHOICES = {"formats": FORMAT_NAMES, "kinds": KINDS, "directions": DIRECTIONS}
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)


class CompilingDriver:
    """Answers Triton's questions to its driver while it compiles."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(arch: int, done: Callable[[Any, Any], None]) -> Iterator[None]:
    """Context in which kernels are compiled for a GPU architecture, 90 or 100, and not launched.

    Args:
        done: called with each kernel's ``JITFunction`` and its compiled kernel.
    """
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def stops(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        done(self, run(self, *args, grid=grid, warmup=True, **kwargs))

    users = ("cast_fp8.rule", "quantize.triton", "grouped_quantize.triton")
    driver.set_active(CompilingDriver(arch))
    with ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", stops))
        stack.enter_context(patch("torch.cuda.is_available", lambda: True))
        stack.enter_context(patch("torch.cuda.get_device_capability", lambda *_: divmod(arch, 10)))
        for user in users:  # the tensors are on the CPU
            stack.enter_context(patch(f"megatron_lowprec.kernels.{user}.converts_fp8", lambda _: True))
        yield


def count(variant: Variant, arch: int) -> list[Row]:
    """One row for each tiling of a variant: instructions an entry, in all and by class."""
    label = {"format": variant.format, "kind": variant.kind, "direction": variant.direction}
    code: list[str] = []
    rows: list[Row] = []

    def done(function: Any, kernel: Any) -> None:
        if function.__name__ == "_mx_kernel":
            code.append(disassembled(kernel.asm["cubin"]))

    def every_tiling(name: str, tilings: Sequence[Any], run: Callable[[Any], None], device: torch.device) -> Any:
        writes = [f"'ALONG_{way.upper()}': True" in name for way in variant.directions]
        for tiling in tilings:
            run(tiling)
            if not all(writes):  # both directions by two kernels, which have their own rows
                code.clear()
                continue
            entries = tiling.rows * tiling.columns / (32 * tiling.warps)
            rows.append({**label, "tiling": _tiling_text(tiling), **_counted(code.pop(), entries)})
        return tilings[0]

    x = torch.zeros(1024, 2048, dtype=torch.bfloat16)
    transforms = {way: variant.transform(way) for way in variant.directions}
    signs = {way: torch.ones(transform.block) for way, transform in transforms.items() if transform is not None}
    with (
        compiling(arch, done),
        patch.multiple("megatron_lowprec.kernels.tuning", LARGE_ENOUGH=0, fastest=every_tiling),
    ):
        run_kernel(x, variant, signs)
    return rows


def _tiling_text(tiling: Any) -> str:
    limit = f", {tiling.registers} registers" if tiling.registers else ""
    return f"{tiling.rows}x{tiling.columns}, {tiling.warps} warps{limit}"


def disassembled(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "--print-code", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _counted(sass: str, entries: float) -> dict[str, float]:
    found = Counter(_INSTRUCTION.findall(sass))
    del found["NOP"]
    classes = {name: sum(found[mnemonic] for mnemonic in text.split()) / entries for name, text in CLASSES.items()}
    return {"total": found.total() / entries, **classes, "spilled": found["LDL"] + found["STL"]}


def main(argv: Sequence[str]) -> int:
    """Exit code."""
    parser = Parser(prog="python -m tools.bench.instructions", description=__doc__)
    parser.add_argument("--arch", type=int, default=90, choices=(90, 100), help="architecture (default: %(default)s)")
    for name, known in _CHOICES.items():
        parser.add_argument(f"--{name}", nargs="+", choices=known, default=known, help="default: all")
    parser.add_argument("--out", type=output_file, metavar="FILE.json", help="write all numbers to this file")
    args = parser.parse_args(argv)
    return run_tool(parser.prog, lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    chosen = variants(args.formats, args.kinds, args.directions)
    rows = [row for variant in chosen for row in count(variant, args.arch)]
    print(render(rows, COLUMNS))
    if args.out is not None:
        import triton

        found = {"arch": args.arch, "triton": triton.__version__, "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
