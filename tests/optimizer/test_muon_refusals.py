"""What ``Muon`` and ``matrices_of_linears`` refuse, before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lowprec.optimizer.muon import Matrix, Muon, matrices_of_linears
from tests.optimizer.test_muon import LR, steps, weights
from tests.refusal import refused

COMPUTED: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "hooks": lambda layer: nn.utils.weight_norm(layer),
}


def test_a_model_without_a_matrix_is_refused() -> None:
    with refused("no linear layer with a trained weight", "torch.optim.AdamW"):
        matrices_of_linears(nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4)))


@pytest.mark.parametrize("how", list(COMPUTED))
@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*is deprecated")
def test_a_computed_weight_is_no_matrix(how: str) -> None:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    for layer in layers[:2]:
        COMPUTED[how](layer)
    model = nn.Sequential(*layers)
    for each in model[0].parameters():
        each.requires_grad_(False)
    state = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="weights of 1 linear layers are computed from.*'1'"):
        found = matrices_of_linears(model)
    assert [matrix.weight for matrix in found] == [model[2].weight]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with refused("no linear layer with a trained weight of its own"):
        matrices_of_linears(model[:2])


def _flat(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().view(-1))


def _distributed(layer: nn.Linear) -> None:
    layer.weight.device_mesh = None  # type: ignore[attr-defined]


@pytest.mark.parametrize(("change", "words"), [(_flat, "has shape (16,)"), (_distributed, "is a DTensor")])
def test_parts_of_a_matrix_are_refused(change: Callable[[nn.Linear], None], words: str) -> None:
    """As FSDP and FSDP2 hold them."""
    layer = nn.Linear(4, 4)
    change(layer)
    with refused(f"0.weight {words}", "whole matrices", "DistributedDataParallel"):
        matrices_of_linears(nn.Sequential(layer))


def test_what_is_no_matrix_is_refused() -> None:
    mine = weights()
    with refused("a matrix has shape (16,)"):
        Muon(mine, [Matrix(mine[2])])
    with refused("a matrix is computed from other weights"):
        Muon(mine, [Matrix(2 * mine[0])])


def test_a_matrix_that_is_no_weight_of_the_optimizer_is_refused() -> None:
    mine = weights()
    optimizer = Muon(mine[1:], [Matrix(weight) for weight in mine[:2]], LR)
    optimizer.step()  # it has no gradient
    mine[0].grad = torch.ones_like(mine[0])
    with refused("a matrix of shape (24, 16)", "not in Muon's params", "ZeroRedundancyOptimizer"):
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"betas": (0.9, 1.0)},
        {"eps": -1.0},
        {"weight_decay": -1.0},
        {"momentum": -1.0},
        {"lr_ratio": -1.0},
    ],
)
def test_options_that_torch_s_optimizers_refuse_are_refused(options: dict[str, Any]) -> None:
    mine = weights()
    with pytest.raises(ValueError, match=r"nvalid|should be >= 0"):
        Muon(mine, [Matrix(mine[0])], **options)


def test_a_sparse_gradient_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    optimizer = Muon(model.parameters(), matrices_of_linears(model))
    model(torch.arange(2)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    with refused("a weight of shape (8, 4) has a sparse gradient", "without sparse=True"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "step" not in optimizer.param_groups[0]


@pytest.mark.parametrize("other", [lambda mine: Muon(mine, [Matrix(mine[1])]), torch.optim.AdamW])
def test_state_of_other_matrices_is_refused(other: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    mine, theirs = weights(), weights()
    optimizer, saved = Muon(mine, [Matrix(mine[0])], LR), other(theirs)
    steps(optimizer, saved)
    before = copy.deepcopy(optimizer.state_dict())
    with refused("has step, exp_avg, exp_avg_sq of a weight of shape (24, 16)", "needs momentum_buffer"):
        optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["lr"] == LR
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, state in after["state"].items():
        assert all(torch.equal(value, before["state"][number][name]) for name, value in state.items())
    steps(optimizer)
