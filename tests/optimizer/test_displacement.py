"""How far weights move under narrow optimizer state: 500 steps against torch's fp32 AdamW.

``python -m tests.optimizer.test_displacement`` prints the figures that docs/recipes/fp8_lm.md quotes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from megatron_lowprec.kernels.scaled_adam.reference import Stream
from megatron_lowprec.optimizer.adamw import Place, ScaledAdamW
from megatron_lowprec.recipe.recipe import OptimizerSpec
from megatron_lowprec.recipe.registry import get_recipe

STEPS = 500
LEARNING_RATES = (1e-5, 1e-4, 1e-3)
GRADIENTS = ("one sign", "noisy")
NEAREST = OptimizerSpec("e4m3", "fp16", "fp16", rounding="nearest_even")
TOLERANCE = 0.02


class Displacement(NamedTuple):
    """Of one tensor's entries, over all steps."""

    mean: float
    spread: float


def initial_weights() -> dict[str, torch.Tensor]:
    """Tensors of a GPT by their usual initialization: std 0.02, output projections 0.02 / sqrt(2 x 24 layers)."""
    generator = torch.Generator().manual_seed(0)
    return {
        "gain": torch.ones(1024),
        "bias": torch.zeros(1024),
        "embedding": torch.randn(64, 512, generator=generator) * 0.02,
        "weight": torch.randn(64, 512, generator=generator) * 0.02 / 48**0.5,
    }


def displacements(spec: OptimizerSpec | None, lr: float, kind: str) -> dict[str, Displacement]:
    """Of each tensor under ``spec``, or under torch's AdamW, with one sequence of gradients."""
    start = initial_weights()
    options: dict[str, Any] = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    optimizer: torch.optim.Optimizer
    weights = [weight.clone() for weight in start.values()]
    if spec is None:
        weights = [torch.nn.Parameter(weight) for weight in weights]
        optimizer = torch.optim.AdamW(weights, **options)
    else:
        # as mcore.optim.scaled_adam places the weights of a model on one rank
        stochastic = spec.rounding == "stochastic"
        places = {
            weight: Place(
                row,
                keeps_fp32=stochastic and weight.dim() == 1,
                stream=Stream((row, 5), columns=weight.numel()) if stochastic else None,
            )
            for row, weight in enumerate(weights)
        }
        rows = torch.zeros(len(weights), 3)
        optimizer = ScaledAdamW([{**options, "params": weights}], options, spec, places, rows, lambda amax: amax)
    generator = torch.Generator().manual_seed(1)
    sizes = [torch.exp(torch.randn(weight.shape, generator=generator)) * -1e-3 for weight in weights]
    for _ in range(STEPS):
        for weight, size in zip(weights, sizes, strict=True):
            gradient = size if kind == "one sign" else size * (0.5 + torch.randn(size.shape, generator=generator))
            setattr(weight, "grad" if spec is None else "decoupled_grad", gradient)
        optimizer.step()
    moved = [weight.detach() - before for weight, before in zip(weights, start.values(), strict=True)]
    return {name: Displacement(float(m.mean()), float(m.std())) for name, m in zip(start, moved, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lr", "kind"),
    [
        (1e-5, "noisy"),
        (1e-4, "one sign"),
        pytest.param(1e-5, "one sign", marks=pytest.mark.weekly),
        pytest.param(1e-3, "noisy", marks=pytest.mark.weekly),
    ],
)
def test_every_kind_of_weight_moves_as_under_fp32_adamw(lr: float, kind: str) -> None:
    expected, found = displacements(None, lr, kind), displacements(get_recipe("fp8_lm").optimizer, lr, kind)
    for name, reference in expected.items():
        assert found[name].mean == pytest.approx(reference.mean, rel=TOLERANCE), name


def test_rounding_to_nearest_loses_updates() -> None:
    """Why it is not the default: gains at 1 do not move, and E4M3 moments stop short of a steady gradient."""
    expected, found = (displacements(spec, 1e-4, "one sign") for spec in (None, NEAREST))
    assert found["gain"].mean == 0.0
    assert 0.7 < found["weight"].mean / expected["weight"].mean < 0.8


if __name__ == "__main__":
    torch.set_num_threads(1)
    for gradients in GRADIENTS:
        for rate in LEARNING_RATES:
            fp32 = displacements(None, rate, gradients)
            for label, state in (("fp8_lm", get_recipe("fp8_lm").optimizer), ("nearest_even, no fp32", NEAREST)):
                narrow = displacements(state, rate, gradients)
                ratios = [
                    f"{name} {narrow[name].mean / fp32[name].mean:.4f}"
                    f" (spread {narrow[name].spread / fp32[name].mean:.3f},"
                    f" fp32 {fp32[name].spread / fp32[name].mean:.3f})"
                    for name in fp32
                ]
                print(f"{gradients}, lr {rate:g}, {label}: {', '.join(ratios)}")
