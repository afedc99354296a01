"""A residual's gradient goes through its norm, wherever both are of one pass; else by autograd's own way."""

import gc
import weakref
from unittest.mock import patch

import pytest
import torch

from megatron_lowprec.kernels.layernorm import reference
from megatron_lowprec.mcore.norm import _normalized
from megatron_lowprec.mcore.residual import residual_of


@pytest.fixture
def norm():
    """A LayerNorm by the reference's functions."""
    module = torch.nn.LayerNorm(8)
    with patch("megatron_lowprec.kernels.layernorm.triton.norm_backward", reference.norm_backward):
        yield lambda x: _normalized(
            module, x, module.bias, lambda rows: reference.norm(rows, module.weight, module.bias, module.eps)
        )


def test_gradients_of_norm_and_residual_are_added(norm) -> None:
    pytest.importorskip("triton")
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (norm(x).square().sum() + (2 * residual_of(x)).sum()).backward()
    joined, x.grad = x.grad, None
    (norm(x).square().sum() + (2 * x).sum()).backward()
    assert x.grad is not None
    assert torch.equal(joined, x.grad)
    x.grad = None
    norm(x)
    (2 * residual_of(x)).sum().backward()  # a norm whose output nobody reads
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_another_pass_or_value_has_no_residual(norm) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with torch.no_grad():
        norm(x)
    assert residual_of(x) is x
    norm(x)
    assert residual_of(x) is not x
    assert residual_of(x).data_ptr() == x.data_ptr()
    assert residual_of(x.view(3, 8)).requires_grad
    with torch.no_grad():
        x += 1
    assert residual_of(x) is x


def test_a_residual_keeps_nothing_alive(norm) -> None:
    x = torch.randn(3, 8, requires_grad=True) * 1.0
    y = norm(x)
    gone = weakref.ref(x.untyped_storage())
    gc.disable()
    try:
        del x, y
        assert gone() is None
    finally:
        gc.enable()
