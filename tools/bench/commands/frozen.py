"""A training step over frozen linear layers, as under adapters: weights in bf16 and as codes, over bf16.

Only the norms train, so each linear layer runs fprop and dgrad. Adapters would add the same work to every row.
"""

import argparse
import copy
from collections.abc import Iterator
from typing import Any

import torch

from megatron_lowprec.finetuning import quantize_frozen_weights
from megatron_lowprec.linear.convert import convert
from megatron_lowprec.text_tables import Column, Row, named
from tools.bench.commands.hugging_face import CASES, ModelStep
from tools.bench.measure import Bench, errors, one_line
from tools.bench.report import Report, spread_columns

RECIPES = ("fp8_current", "fp8_rowwise", "fp8_blockwise", "mxfp8_2d", "nvfp4_all", "quartet2")
COLUMNS = (
    *named("model", "tokens", "variant"),
    *spread_columns(2),
    Column("over_bf16", "/bf16", ".3f"),
    Column("weights_mib", "weights MiB", ".1f"),
    Column("peak_mib", "peak MiB", ".1f"),
)


class Step(ModelStep):
    """One variant, with AdamW of the norms.

    Args:
        recipe: of the linear layers but the head; None for bf16.
        codes: hold the frozen weights as codes.
    """

    def __init__(self, pristine: Any, tokens: torch.Tensor, recipe: str | None, codes: bool) -> None:
        self._model, self._tokens = copy.deepcopy(pristine), tokens
        for path, parameter in self._model.named_parameters():
            parameter.requires_grad_("norm" in path or "ln_" in path)
        if recipe is not None:
            convert(self._model, recipe, skip_slower=False)
        if codes:
            quantize_frozen_weights(self._model)
        self._optimizer = torch.optim.AdamW((p for p in self._model.parameters() if p.requires_grad), lr=1e-4)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters and buffers."""
        return sum(tensor.nbytes for tensor in (*self._model.parameters(), *self._model.buffers()))


def run(args: argparse.Namespace, bench: Bench, report: Report) -> None:
    """Every chosen model under every recipe, with weights in bf16 and as codes."""
    rows: list[Row] = []
    for name in args.shapes or ("llama",):
        with torch.autograd.set_multithreading_enabled(True):
            rows += _rows(name, args, bench, report)
    report.note(
        "ms: forward pass, backward pass and AdamW of the norms, including the host where it is slower",
        "all linear layers but the head are frozen and converted (skip_slower=False)",
        "weights: parameters and buffers; peak: allocated in a step, over what was allocated without the model",
        f"{args.rounds} rounds in turn; 'rounds': the largest difference between their medians",
    )
    report.table(f"Frozen weights, training step: {args.device}", rows, COLUMNS)


def _rows(name: str, args: argparse.Namespace, bench: Bench, report: Report) -> Iterator[Row]:
    case = CASES[name]
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.randint(case.vocabulary, (case.sequences, case.length), generator=generator).to(bench.device)
    pristine = case.build(bench.device)
    recipes = [recipe for recipe in args.recipes or RECIPES if recipe != "bf16"]
    variants: dict[str, tuple[str | None, bool]] = {"bf16": (None, False)}
    for recipe in recipes:
        variants |= {recipe: (recipe, False), f"{recipe}, codes": (recipe, True)}
    steps: dict[str, Step] = {}
    found: dict[str, dict[str, Any]] = {}
    for variant, options in variants.items():
        row: dict[str, Any] = {"model": name, "tokens": f"{case.sequences}x{case.length}", "variant": variant}
        try:
            before = _allocated(bench)
            step = Step(pristine, tokens, *options)
            row["loss"] = float(step())
            peak = torch.cuda.max_memory_allocated() - before if bench.on_gpu else None
            row |= {"weights_mib": step.weight_bytes / 2**20, "peak_mib": None if peak is None else peak / 2**20}
            steps[variant] = step
        except errors() as error:
            row["failed"] = one_line(error)
        found[variant] = row
        report.progress(f"{name} {variant}: {'ready' if variant in steps else 'failed'}")
    timings = bench.compare(steps, args.rounds)
    for variant, row in found.items():
        if variant in timings:
            plain = timings.get("bf16")
            row |= {**timings[variant].row(), "over_bf16": timings[variant].ms / plain.ms if plain else None}
        yield row


def _allocated(bench: Bench) -> int:
    """Bytes allocated now, from which a peak begins."""
    if not bench.on_gpu:
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()
