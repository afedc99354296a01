"""A weight's gradient that is fp32 only while it is written: its states, and writes at the wrong time."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig
from torch import nn

from megatron_lowprec.comm.gradient_codes import GradientCodes
from megatron_lowprec.comm.gradients import GradientFactor, GradientSum
from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore.optim.recipe_optimizer import build_optimizer
from megatron_lowprec.mcore.optim.stored_gradient import StoredGradient, has_finite_gradient, writable_main_grad
from megatron_lowprec.recipe.recipe import GradientSpec
from megatron_lowprec.recipe.registry import get_recipe

ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)  # a group of one rank
VALUES = torch.tensor([[1.0, -0.5], [0.25, 448.0]])  # exact in E4M3


class Case:
    """A weight [2, 2] at entry 3 of a buffer, under ``accumulation``."""

    def __init__(self, accumulation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
        self.last = False
        device, spec = torch.device("cpu"), GradientSpec("e4m3", accumulation=accumulation)
        self.codes = GradientCodes(8, [(3, 7)], GradientSum(spec, GradientFactor(device, automatic=False)), device)
        self.weight = nn.Parameter(torch.zeros(2, 2))
        more = None if accumulation == "format" else lambda: not self.last
        self.gradient = StoredGradient(self.weight, self.codes, 0, more)
        self.weight.stored_gradient = self.gradient  # type: ignore[attr-defined]

    @property
    def main_grad(self) -> torch.Tensor:
        found: torch.Tensor = self.weight.main_grad  # type: ignore[attr-defined]
        return found

    def part(self, start: int, end: int) -> torch.Tensor:
        return self.gradient.part(start, end, self.codes.parts())

    def microbatch(self, values: torch.Tensor, last: bool) -> None:
        self.last = last
        into = writable_main_grad(self.weight)
        assert into is not None
        into.add_(values)
        self.gradient.end_write()


@pytest.mark.parametrize("accumulation", ["fp32", "format"])
def test_microbatches_are_added_and_stored_in_a_byte(accumulation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(accumulation, monkeypatch)
    for _ in range(2):  # steps
        case.gradient.reset()
        case.codes.reset()
        case.microbatch(VALUES, last=False)
        assert (case.main_grad.untyped_storage().nbytes() > 4) == (accumulation == "fp32")
        case.microbatch(VALUES, last=True)
        assert case.main_grad.untyped_storage().nbytes() == 4  # the placeholder's one number
        case.codes.reduce(0.5, ALONE)
        assert torch.equal(case.part(0, 4), VALUES.view(-1))
        assert torch.equal(case.part(1, 3), VALUES.view(-1)[1:3])
        case.gradient.expose(1, 3)
        assert torch.equal(case.main_grad, torch.tensor([[0.0, -0.5], [0.25, 0.0]]))
        case.gradient.scale_exposed_(2.0)
        assert case.part(1, 3).tolist() == [-1.0, 0.5]
        assert has_finite_gradient(case.weight)


def test_a_first_gradient_that_is_written_is_not_zeroed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("format", monkeypatch)
    monkeypatch.setattr(torch, "empty", lambda *sizes, **_: torch.full(*sizes, torch.nan))
    for expected in (math.nan, 1.0):  # the second microbatch adds to the first one's sum
        into = writable_main_grad(case.weight, overwrites=True)
        assert into is not None
        assert into[0, 0].tolist() == pytest.approx(expected, nan_ok=True)
        into.copy_(VALUES)
        case.gradient.end_write()


def test_a_weight_without_a_gradient_has_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("fp32", monkeypatch)
    case.microbatch(VALUES, last=True)
    case.gradient.reset()
    case.codes.reset()
    case.codes.reduce(1.0, ALONE)
    assert case.part(0, 4).tolist() == [0.0] * 4


def test_a_gradient_that_is_not_finite_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("format", monkeypatch)
    case.microbatch(VALUES / 0.0, last=True)
    case.codes.reduce(1.0, ALONE)
    assert not has_finite_gradient(case.weight)
    assert case.part(0, 4).isnan().all()


def test_the_placeholder_cannot_be_mistaken_for_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("fp32", monkeypatch)
    assert case.main_grad.isnan().all()
    with pytest.raises(RuntimeError):
        case.main_grad.add_(VALUES)


def test_late_gradients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("fp32", monkeypatch)
    case.microbatch(VALUES, last=True)
    with pytest.raises(RuntimeError, match=r"no_sync\(\), or set gradients.accumulation=format"):
        case.gradient.begin_write()
    case.codes.reduce(1.0, ALONE)
    with pytest.raises(RuntimeError, match="after its gradient was reduced"):
        case.gradient.begin_write()


@pytest.mark.parametrize("recipe", ["fp8_lm", "fp8_lm_o1", "fp8_lm_o3"])
def test_an_optimizer_that_is_not_distributed_is_refused(recipe: str) -> None:
    chunks: Any = [SimpleNamespace(ddp_config=SimpleNamespace(use_distributed_optimizer=True))]
    with pytest.raises(UserError, match="set use_distributed_optimizer in OptimizerConfig"):
        build_optimizer(chunks, get_recipe(recipe), OptimizerConfig(lr=1e-3), seed=1)


class Chunk(nn.Module):
    """What ``build_optimizer`` checks of a wrapped chunk."""

    def __init__(self, fusion: bool = False, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.config = SimpleNamespace(gradient_accumulation_fusion=fusion)
        shared = {"average_in_collective": False, "num_distributed_optimizer_instances": 1}
        self.ddp_config = SimpleNamespace(**{"use_distributed_optimizer": True, **shared, **options})


@pytest.mark.parametrize(
    ("recipe", "chunk", "words"),
    [
        ("fp8_lm_o3", Chunk(), r"these chunks have none: call use_primary_weights\(chunks\)"),
        ("fp8_lm", Chunk(average_in_collective=True), "set average_in_collective=False"),
        ("fp8_lm_o1", Chunk(num_distributed_optimizer_instances=2), "set num_distributed_optimizer_instances=1"),
        ("fp8_lm_o2", Chunk(fusion=True), "set gradient_accumulation_fusion=False"),
        (
            "fp8_lm",
            Chunk(param_name_patterns_for_fp32_local_accumulation=("all",)),
            r"set param_name_patterns_for_fp32_local_accumulation=\(\)",
        ),
    ],
)
def test_options_of_the_replaced_reduction_are_refused(recipe: str, chunk: Any, words: str) -> None:
    options = OptimizerConfig(lr=1e-3, use_distributed_optimizer=True)
    with pytest.raises(UserError, match=words):
        build_optimizer([chunk], get_recipe(recipe), options, seed=1)
