"""Bias, activations, dropout and rope: the references."""

import pytest
import torch

from megatron_lowprec.kernels.dropout import reference as dropout
from megatron_lowprec.kernels.gelu import reference
from megatron_lowprec.kernels.rope import reference as rope
from tests.kernels.bias_cases import differences


def test_references() -> None:
    assert differences("cpu", reference=True)[1] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "turned"), [(16, 16), (24, 12)])
def test_rope_is_megatron_cores_bit_for_bit(dtype: torch.dtype, width: int, turned: int) -> None:
    """Its gradient as well, which torch's operations give."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    x = torch.randn(5, 2, 3, 4, width).to(dtype).requires_grad_()
    angles, dout = 100 * torch.randn(5, 1, 1, turned), torch.randn(5, 2, 12, width).to(dtype)
    want = _apply_rotary_pos_emb_bshd(x.flatten(2, 3), angles)
    turn = rope.cos_and_sin(angles, dtype)
    assert torch.equal(rope.rope(x, *turn), want)
    want.backward(dout)
    assert x.grad is not None
    assert torch.equal(rope.rope_backward(dout, *turn), x.grad.flatten(2, 3))


@pytest.mark.parametrize("name", ["SLOPE", "CUBIC"])
def test_a_wrong_constant_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(reference, name, getattr(reference, name) * (1 + 1e-4))
    assert differences("cpu", reference=True)[1]


def test_dropping_changes_no_mean() -> None:
    for p in (0.0, 1e-6, 0.1, 0.5, 0.99, 1.0):
        kept = 1 - dropout.threshold(p) / dropout.DRAWS
        assert kept > 0
        assert kept * dropout.keep_scale(p) == pytest.approx(1.0, abs=1e-12)
        assert dropout.threshold(p) / dropout.DRAWS == pytest.approx(p, abs=1.6e-5)


@pytest.mark.gpu
def test_gradients_have_the_same_bits_each_time() -> None:
    from megatron_lowprec.kernels.dropout.triton import bias_dropout_add_backward
    from megatron_lowprec.kernels.gelu.triton import bias_gelu_backward

    generator = torch.Generator("cuda").manual_seed(0)
    y, dout = torch.randn(2, 5000, 4096, generator=generator, device="cuda").bfloat16()
    bias = torch.randn(4096, generator=generator, device="cuda").bfloat16()
    key = torch.tensor([5, -6], dtype=torch.int32, device="cuda")

    def gradients(stages: int) -> list[torch.Tensor | None]:
        gelu = bias_gelu_backward(dout, y, bias, stages=stages)
        return [*gelu, *bias_dropout_add_backward(dout, 0.1, key, torch.bfloat16, stages=stages)]

    first = gradients(1)
    for stages in (1, 2, 3):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(stages), strict=True) if a is not None)
