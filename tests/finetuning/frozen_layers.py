"""What tests of frozen layers share: one layer, with its weight or with codes, and its passes under each recipe."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lowprec import Recipe, convert, get_recipe
from megatron_lowprec.finetuning import quantize_frozen_weights
from megatron_lowprec.linear.lowprec_linear import LowPrecLayer, end_step
from tests.linear.tiny_models import Conv1D
from tests.weekly import also_weekly

T, IN, OUT = 40, 256, 384
ENTRIES = IN * OUT
# recipe -> sets of codes in bytes an entry, and bytes of scales and amaxes of a weight [O, I]
STORED: dict[str, tuple[float, Callable[[int, int], int]]] = {
    "fp8_delayed": (1.0, lambda o, i: 4 + 4),
    "fp8_current": (1.0, lambda o, i: 4),
    "fp8_rowwise": (2.0, lambda o, i: 4 * (o + i)),
    "fp8_rowwise_gw_hp": (2.0, lambda o, i: 4 * o + 4),
    "fp8_blockwise": (1.0, lambda o, i: 4 * o * i // 128**2),
    "mxfp8": (2.0, lambda o, i: 2 * o * i // 32),
    "mxfp8_ocp": (2.0, lambda o, i: 2 * o * i // 32),
    "mxfp8_e5m2_grad": (2.0, lambda o, i: 2 * o * i // 32),
    "mxfp8_e5m2_weight": (2.0, lambda o, i: 2 * o * i // 32),
    "mxfp8_e5m2_act": (2.0, lambda o, i: 2 * o * i // 32),
    "mxfp8_2d": (1.0, lambda o, i: o * i // 32**2),
    "nvfp4": (0.5, lambda o, i: o * i // 16**2 + 4),
    "nvfp4_all": (0.5, lambda o, i: o * i // 16**2 + 4),
    "nvfp4_four_over_six": (1.0, lambda o, i: 2 * (o * i // 16**2 + 4)),
    "quartet2": (0.5, lambda o, i: o * i // 16 + 4),
}
_RARELY = {"mxfp8_ocp", "mxfp8_e5m2_grad", "mxfp8_e5m2_weight", "mxfp8_e5m2_act", "nvfp4", "nvfp4_four_over_six"}
each_recipe = pytest.mark.parametrize("name", also_weekly(STORED, STORED.keys() - _RARELY))


def layer_of(
    recipe: str | Recipe, kind: str = "linear", dtype: torch.dtype = torch.bfloat16, scale: float = 1
) -> LowPrecLayer:
    """A converted layer with a frozen weight, the same in each call except for ``scale``."""
    torch.manual_seed(0)
    plain = nn.Linear(IN, OUT) if kind == "linear" else Conv1D(OUT, IN)
    plain.weight.requires_grad_(False).mul_(scale)
    layer = convert(nn.Sequential(plain.to(dtype)), all_blocks(recipe))[0]
    assert isinstance(layer, LowPrecLayer)
    return layer


def all_blocks(recipe: str | Recipe) -> Recipe:
    """Without the rule that keeps the last blocks in bf16."""
    return replace(get_recipe(recipe) if isinstance(recipe, str) else recipe, rules=())


def held(
    recipe: str | Recipe, kind: str = "linear", dtype: torch.dtype = torch.bfloat16, scale: float = 1, **options: Any
) -> Any:
    return quantize_frozen_weights(layer_of(recipe, kind, dtype, scale), **options)


def passes(layer: LowPrecLayer, number: int = 2) -> list[list[torch.Tensor]]:
    """y, dx and db of passes, each of them a step."""
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(number):
        x, dy = (
            torch.randn(T, width, generator=generator).to(layer.weight.device, layer.weight.dtype)
            for width in (IN, OUT)
        )
        y = layer(x.requires_grad_())
        layer.bias.grad = None  # type: ignore[union-attr]
        y.backward(dy)
        found.append([y.detach(), x.grad, layer.bias.grad])  # type: ignore[union-attr,list-item]
        end_step(layer)
    return found


def equal(got: list[list[torch.Tensor]], want: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for one, other in zip(got, want, strict=True) for a, b in zip(one, other, strict=True))
