"""The ways in which a converted model is trained, combined; ``convert_worker.py`` runs them on two processes.

Each cell has the losses of plain training in one process, by their bits, or is refused with its reason. Both ranks see
the same data, so the mean of their gradients is exact. Under tensor parallelism sums over ranks are in another order:
all cells compute in fp64.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from megatron_lowprec import UserError
from tests.linear.tensor_parallel_checks import PLAN, assert_close, in_fp64, total
from tests.linear.tiny_models import TinyModel, tokens_of
from tests.linear.wrapping import all_ranks, check_in, own_group, wrapped

CHECKS: dict[str, Callable[[], None]] = {}
STEPS = 2
KINDS = ("ddp", "fsdp", "fsdp, FP8 all-gather", "tp")
RECOMPUTE = ("", "reentrant", "not reentrant")


class Cell(NamedTuple):
    """One way to train.

    Attributes:
        kind: of the wrapper, or "tp".
        recompute: of activations, or "".
        accumulates: two microbatches a step.
        freezes: weights of some converted layers are frozen.
        evaluates: a pass in evaluation follows each step.
        compiles: blocks are compiled, by dynamo only.
    """

    kind: str
    recompute: str = ""
    accumulates: bool = False
    freezes: bool = False
    evaluates: bool = False
    compiles: bool = False

    def __str__(self) -> str:
        on = [name for name in ("accumulates", "freezes", "evaluates", "compiles") if getattr(self, name)]
        return ", ".join(filter(None, (self.kind, self.recompute, *on)))


def freeze(model: TinyModel) -> None:
    for layer in (model.layers[0].q_proj, model.layers[0].mlp["down_proj"], model.layers[1].o_proj):
        layer.weight.requires_grad_(False)


def losses_of(model: nn.Module, cell: Cell) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=3e-3), []
    microbatches = 1 + cell.accumulates
    for step in range(STEPS):
        for index in range(microbatches):
            last = index == microbatches - 1
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            waits = model.no_sync() if hasattr(model, "no_sync") and not last else nullcontext()
            with waits, loss_parallel():
                loss = model(tokens_of(microbatches * step + index))
                (loss / microbatches).backward()
            losses.append(total(loss))
        optimizer.step()
        optimizer.zero_grad()
        if cell.evaluates:
            model.eval()
            with torch.no_grad(), loss_parallel():
                model(tokens_of(50))
            model.train()
    return losses


@cache
def expected(recipe: str, accumulates: bool, freezes: bool) -> list[float]:
    """Losses of one process without recomputation, evaluation and compiler."""
    model = in_fp64(recipe, data_parallel_rank=0, group=own_group())
    if freezes:
        freeze(model)
    return losses_of(model, Cell("", accumulates=accumulates, freezes=freezes))


def run(recipe: str, cell: Cell) -> None:
    model = in_fp64(recipe, cell.recompute, data_parallel_rank=0)
    if cell.freezes:
        freeze(model)
    if cell.compiles:
        for layer in model.layers:
            layer.compile(backend="eager")
    module: Any = parallelize_module(model, all_ranks(), PLAN) if cell.kind == "tp" else wrapped(cell.kind, model)
    losses, want = losses_of(module, cell), expected(recipe, cell.accumulates, cell.freezes)
    if cell.kind == "tp":
        assert_close(losses, want)
    else:
        assert losses == want


def cells() -> Iterator[Cell]:
    """All cells without the compiler, and with it those with everything else or nothing."""
    for kind, recompute, *rest in product(KINDS, RECOMPUTE, *[(False, True)] * 3):
        yield Cell(kind, recompute, *rest)
        if len(set(rest)) == 1:
            yield Cell(kind, recompute, *rest, compiles=True)


def codes_of_drawn_weights_are_refused() -> None:
    """Ranks would draw differently."""
    with pytest.raises(UserError, match="can send no weight as codes under recipe mxfp4_sr: fprop takes the weight in"):
        wrapped("fsdp, FP8 all-gather", in_fp64("mxfp4_sr"))


for cell in cells():
    # histories and draws; a weight that is drawn is not sent as codes
    recipe = "fp8_delayed" if "FP8" in cell.kind else "fp8_mxfp4_rht_sr"
    CHECKS[str(cell)] = lambda recipe=recipe, cell=cell: run(recipe, cell)
check_in(CHECKS, codes_of_drawn_weights_are_refused)

WEEKLY = CHECKS.keys() - {
    "ddp, not reentrant, accumulates, freezes, evaluates",
    "fsdp, reentrant, accumulates, freezes, evaluates",
    "fsdp, FP8 all-gather, reentrant, accumulates, freezes, evaluates",
    "tp, not reentrant, accumulates, freezes, evaluates",
    "fsdp, FP8 all-gather, compiles",
    "codes_of_drawn_weights_are_refused",
}
