"""Compiled layers whose number of tokens only data decide, also none of them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from megatron_lowprec.linear.backends.planned_cast import _hint
from tests.linear.compiled_layers import One, converted, equal


def passes(model: nn.Module, shape: tuple[int, ...], some: int, backend: str | None = None) -> list[torch.Tensor]:
    """Outputs and gradients of passes on the entries whose first number is positive: of some, then of none."""

    def run(x: torch.Tensor) -> Any:
        x = x[x.flatten(1)[:, 0] > 0]
        torch._check(x.shape[0] >= some)
        return model(x)

    found, masked = [], run if backend is None else torch.compile(run, backend=backend, fullgraph=True)
    draw = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    for x in (draw,) if some else (draw, -draw.abs()):
        x = x.clone().requires_grad_()
        model.zero_grad()
        y = masked(x)
        y.square().sum().backward()
        found += [y.detach(), x.grad, *(each.grad.clone() for each in model.parameters())]
    return found


@pytest.mark.parametrize(
    ("name", "shape"), [("fp8_current", (9, 128)), ("fp8_blockwise", (5, 3, 128)), ("mxfp8", (9, 128))]
)
def test_one_graph_takes_any_number(name: str, shape: tuple[int, ...]) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, error_on_recompile=True):
        found = passes(converted(name, One), shape, 0, "aot_eager")
    assert equal(found, passes(converted(name, One), shape, 0))


@pytest.mark.parametrize("name", ["fp8_delayed", "mxfp4_rht_sr"])
def test_a_layer_with_state_wants_a_promise_of_tokens(name: str) -> None:
    """It says so in a line, and runs outside of the graph without ``fullgraph``."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"promise them by torch\._check\(x\.shape\[0\] > 1\)"):
            passes(converted(name, One), (9, 128), 0, "aot_eager")
        found = passes(converted(name, One), (9, 128), 2, "aot_eager")
    assert equal(found, passes(converted(name, One), (9, 128), 2))


def test_a_tiling_is_chosen_without_a_number_of_tokens() -> None:
    assert _hint(ShapeEnv().create_unbacked_symint()) == 1
    assert _hint(7) == 7
