"""A residual's gradient goes through its norm, wherever both are of one pass; else by autograd's own way."""

import gc
import weakref

import pytest
import torch

from megatron_lowprec.kernels.layernorm import reference
from megatron_lowprec.mcore.fusion import cached_residual
from megatron_lowprec.mcore.layers.norm import _normalized


@pytest.fixture
def norm():
    """A LayerNorm by the reference's functions."""
    module = torch.nn.LayerNorm(8)
    return lambda x: _normalized(
        module, x, module.bias, lambda rows: reference.norm(rows, module.weight, module.bias, module.eps)
    )


def test_gradients_of_norm_and_residual_are_added(norm) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = norm(x)
    (y.square().sum() + (2 * cached_residual(x)).sum()).backward()
    joined, x.grad = x.grad, None
    (norm(x).square().sum() + (2 * x).sum()).backward()
    assert x.grad is not None
    assert torch.equal(joined, x.grad)
    x.grad = None
    y = norm(x)
    (2 * cached_residual(x)).sum().backward()  # the output of the norm is never read
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_another_pass_or_value_has_no_residual(norm) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with torch.no_grad():
        y = norm(x)
    assert cached_residual(x) is x
    y = norm(x)
    assert cached_residual(x) is not x
    assert cached_residual(x).data_ptr() == x.data_ptr()
    view = x.view(3, 8)
    assert cached_residual(view) is view
    with torch.no_grad():
        norm(x)
    assert cached_residual(x) is x
    y = norm(x)
    with torch.no_grad():
        x += 1
    assert cached_residual(x) is x
    y = norm(x)
    assert cached_residual(x) is not x
    del y
    assert cached_residual(x) is x


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_a_residual_keeps_nothing_alive(norm, leaf: bool, backward: bool) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    x = x if leaf else x * 1.0
    y = norm(x)
    gone = weakref.ref(x.untyped_storage())
    gc.disable()
    try:
        if backward:
            (y.sum() + cached_residual(x).sum()).backward()
        del x, y
        assert gone() is None
    finally:
        gc.enable()
