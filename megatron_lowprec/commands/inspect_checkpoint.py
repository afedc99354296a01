"""Print a checkpoint's recipe, step, layout and sizes, and check that it is complete.

    megatron-lowprec inspect runs/gpt_345m/checkpoints
    megatron-lowprec inspect runs/gpt_345m/checkpoints --iteration 2000

No tensor is loaded and no code of the checkpoint is run: ``.metadata`` is read, and the bytes of all files are compared
with their checksums. The exit code is 1 if the checkpoint is damaged. Others in the folder are listed, and marked if
their metadata or the sizes of their files show damage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.recipe.explain import describe_operand, describe_transform, phase_starts
from megatron_lowprec.recipe.parsing import recipe_from_dict
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from megatron_lowprec.training.checkpoint import checksums, safe_load, storage
from megatron_lowprec.training.checkpoint.resume import CONFIG, Saved, read
from megatron_lowprec.training.config.resolve import describe_layout
from megatron_lowprec.training.config.run_config import read_run_config


def describe(folder: Path) -> Iterator[str]:
    """Lines about one checkpoint.

    Raises:
        Damaged: it is incomplete.
        UserError: it holds an unexpected pickle.
    """
    try:
        content = read_run_config(folder / CONFIG)
        saved = Saved(folder, content)
        progress, layout, options = saved.progress, saved.layout, dict(content["options"])
        recipe = recipe_from_dict(content["recipe"])
    except (KeyError, TypeError, UserError) as error:
        raise safe_load.Damaged(f"{CONFIG} is missing or not this driver's: {error}") from None
    yield _row("checkpoint", str(folder))
    yield _row("step", f"{progress['iteration']:,}, {progress['consumed_samples']:,} samples consumed")
    if progress.get("skipped_iterations"):
        yield _row("skipped", f"{progress['skipped_iterations']:,} iterations")
    yield from _recipe(recipe)
    yield _row("seed", f"{options.get('seed')}, the base of data order, dropout and all random streams")
    yield _row(
        "model",
        f"{options.get('num_layers')} layers, hidden {options.get('hidden_size')}, "
        f"{options.get('num_attention_heads')} heads, sequence {options.get('seq_length')}, "
        f"vocabulary {content.get('padded_vocab_size')} (padded)",
    )
    yield _row("layout", describe_layout(layout))
    if "versions" in content:
        yield _row("written by", ", ".join(f"{name} {version}" for name, version in content["versions"].items()))
    metadata = safe_load.examine(folder)
    safe_load.check_bytes(folder)
    yield from _sizes(metadata)
    compared = "of every file, as it was saved" if checksums.exist(folder) else "none, as older versions saved"
    yield _row("checksums", compared)
    files = [path for path in folder.iterdir() if path.is_file()]
    yield _row("on disk", f"{len(files)} files, {_bytes(sum(path.stat().st_size for path in files))}; whole")


def _recipe(recipe: Recipe) -> Iterator[str]:
    yield _row("recipe", f"{recipe.name}: {recipe.summary}")
    for name, gemm in recipe.gemms.items():
        if gemm.quantized:
            parts = [f"{operand} {describe_operand(getattr(gemm, operand))}" for operand in GEMM_OPERANDS[name]]
            parts += [] if gemm.hadamard is None else [describe_transform(gemm.hadamard)]
            yield _row("", f"{name}: {'; '.join(parts)}")
    if recipe.all_rules or recipe.phases:
        starts = ", ".join(start for _, start in phase_starts(recipe)) or "none"
        yield _row("", f"{len(recipe.all_rules)} rules by layer; phases: {starts} (--explain-recipe prints both)")


def _sizes(metadata: Metadata) -> Iterator[str]:
    tensors, values, sizes = Counter[str](), Counter[str](), Counter[str]()
    for key, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            continue
        part = f"{_part(key)}, {str(stored.properties.dtype).removeprefix('torch.')}"
        count = math.prod(stored.size)
        tensors[part] += 1
        values[part] += count
        sizes[part] += count * stored.properties.dtype.itemsize
    for part, size in sizes.items():
        yield _row("holds", f"{part}: {tensors[part]} tensors, {values[part]:,} values, {_bytes(size)}")
    objects = [key for key in metadata.state_dict_metadata if key.startswith("random_state")]
    yield _row("holds", f"random state of {len(objects)} rank{'s' * (len(objects) != 1)}")


def _part(key: str) -> str:
    if ".amax." in key:
        return "amax histories"
    if not key.startswith("optimizer."):
        return "weights"
    state = key.split(".")[2]
    return {"param": "main weights", "fp32_param": "main weights"}.get(state, f"optimizer's {state}")


def _row(what: str, text: str) -> str:
    return f"{what + ':' if what else '':<13}{text}"


def _bytes(size: int) -> str:
    power = min(int(math.log(max(size, 1), 1000)), 4)
    return f"{size / 1000**power:.1f} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}" if power else f"{size} bytes"


def _choose(folder: Path, iteration: int | None) -> tuple[Path, list[str]]:
    """The chosen checkpoint, and lines about the others in the folder."""
    if (folder / CONFIG).exists() and (folder / ".metadata").exists():
        return folder if iteration is None else storage.at_iteration(str(folder.parent), iteration), []
    folder = storage.checkpoints_of(folder)
    present, latest = storage.whole(str(folder)), storage.tracked(str(folder))
    if not present:
        raise UserError(
            f"{folder}: no checkpoint there; name a run's folder, a --save folder or one of its iter_ folders"
        )
    notes = []
    if latest not in present:
        notes.append(_row("latest", f"{storage.TRACKER} names {latest}, which has no checkpoint"))
    chosen = iteration if iteration is not None else latest if latest in present else max(present)
    listed = []
    for number, path in present.items():
        marks = ["latest"] * (number == latest) + _faults(path)
        listed.append(f"{number} ({', '.join(marks)})" if marks else str(number))
    return storage.at_iteration(str(folder), chosen), [*notes, _row("there are", ", ".join(listed))]


def _faults(folder: Path) -> list[str]:
    """A word about a checkpoint that cannot be loaded, as far as the sizes of its files tell."""
    try:
        read(folder, sizes_only=True)
    except safe_load.Damaged:
        return ["damaged"]
    except UserError:
        return ["refused"]
    return []


def main(argv: Sequence[str] | None = None, program: str = "inspect_checkpoint.py") -> int:
    """Exit code: 0, 1 for a damaged checkpoint, 2 for a UserError."""
    parser = Parser(prog=program, description=__doc__)
    parser.add_argument("folder", type=Path, help="a run's folder, a --save folder, or an iter_… folder")
    parser.add_argument("--iteration", type=int, help="which checkpoint (default: the latest)")
    arguments = parser.parse_args(argv)

    def inspect() -> int:
        folder, notes = _choose(arguments.folder, arguments.iteration)
        print(*notes, sep="\n", end="\n" * bool(notes))
        try:
            print(*describe(folder), sep="\n")
        except safe_load.Damaged as error:
            print(_row("damaged", f"{folder}: {error}"))
            return 1
        return 0

    return run_tool(program, inspect)
