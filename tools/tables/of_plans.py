"""Tables of the memory plan:

    default_peaks                  planned peaks of large models over those of bf16, by recipe, with default options

A row is one of ``LAYOUTS`` with one or 16 microbatches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.graph_options import resolve_cuda_graphs
from megatron_lowprec.training.config.memory_options import memory_notes
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_model, resolve_recipe, resolve_run
from megatron_lowprec.training.memory.plan import GIB, plan
from tools.tables.pages import Row


@dataclass(frozen=True)
class Layout:
    """A shipped config on GPUs, and its vocabulary, padded."""

    config: str
    gpus: int
    tensor: int
    micro_batch: int
    vocabulary: int


LAYOUTS = {
    "gpt_1.3b": Layout("gpt_1.3b", 1, 1, 8, 50304),
    "gpt_6.7b": Layout("gpt_6.7b", 2, 2, 1, 50432),
    "gpt_8b_mxfp8": Layout("gpt_8b_mxfp8", 4, 2, 1, 50432),
    "llama3_8b": Layout("llama3_8b", 4, 1, 1, 128256),
    "llama3_8b, TP2": Layout("llama3_8b", 4, 2, 1, 128256),
}
NATIVE = ("fp8_delayed", "fp8_current", "fp8_blockwise", "fp8_rowwise")
EMULATED = ("mxfp8", "mxfp4_rht_sr")
_UNCACHED = "--no-cache-weights"


def resolved(layout: Layout, recipe: str, microbatches: int = 1, *flags: str) -> tuple[Config, list[str]]:
    """``as_given`` on the layout's GPUs, with so many microbatches a step."""
    words = ["--micro-batch-size", str(layout.micro_batch), "--tensor-model-parallel-size", str(layout.tensor)]
    samples = layout.micro_batch * microbatches * layout.gpus // layout.tensor
    given = ["--mock-data", *flags, "--global-batch-size", str(samples)]
    return as_given(layout.config, recipe, layout.gpus, *words, *given)


def as_given(config: str, recipe: str, gpus: int, *flags: str) -> tuple[Config, list[str]]:
    """A shipped config as a run on GPUs resolves it, and its notes."""
    asked, given, _ = parse(["--config", str(SHIPPED / f"configs/models/{config}.yaml"), "--recipe", recipe, *flags])
    found, _ = resolve_recipe(resolve_model(asked), load_recipe(recipe), given)
    notes = memory_notes(found, load_recipe(recipe), given)
    found = resolve_run(replace(found, train_data_path=None, valid_data_path=None), gpus, gpus=True)
    return resolve_cuda_graphs(found, load_recipe(recipe), gpus, gpus=True)[0], notes


def peak(layout: Layout, recipe: str, microbatches: int, *flags: str) -> float:
    """Planned bytes."""
    config, _ = resolved(layout, recipe, microbatches, *flags)
    return plan(config, load_recipe(recipe), layout.vocabulary, layout.gpus).peak


def _default_peaks(page: Path) -> Iterator[Row]:
    yield (
        *("model", "microbatch, samples x tokens", "GPUs", "tensor-parallel", "microbatches", "bf16, GiB"),
        *(f"{recipe}, over bf16" for recipe in (*NATIVE, *EMULATED)),
        f"fp8_current {_UNCACHED}, over bf16",
    )
    for layout in LAYOUTS.values():
        size = f"{layout.micro_batch}x{resolved(layout, 'bf16')[0].seq_length}"
        for count in (1, 16):
            bf16 = peak(layout, "bf16", count)
            shares = [peak(layout, recipe, count) / bf16 for recipe in (*NATIVE, *EMULATED)]
            shares.append(peak(layout, "fp8_current", count, _UNCACHED) / bf16)
            numbers = layout.gpus, layout.tensor, count
            yield layout.config, size, *map(str, numbers), f"{bf16 / GIB:.1f}", *(f"{each:.3f}" for each in shares)


TABLES: dict[str, Callable[..., Iterator[Row]]] = {"default_peaks": _default_peaks}
