"""Operands that travel in a tensor's place: taken once, by the layer they are for, and NaN to everyone else."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lowprec import get_recipe
from megatron_lowprec.kernels import dispatch
from megatron_lowprec.linear.backends import resolved
from megatron_lowprec.linear.layer_tensors import GradOutput
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.mcore.fusion import GradOutputChannel, attach_metadata, attached_input, placeholder_like
from megatron_lowprec.mcore.layers.self_attention import LowPrecSelfAttention
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.layer_match import Layer


def linear_gemms_of(recipe: str, *plain: str) -> LinearGemms:
    used = get_recipe(recipe).in_bf16([f"layers.1.x.{gemm}" for gemm in plain]).at(Layer(1, "x", 1))
    return LinearGemms(used, LinearId(1, "x"), 0, AmaxHistory)


def channel() -> GradOutputChannel:
    return GradOutputChannel(linear_gemms_of("fp8_delayed"), RngStep(0, 0), "source")


class _Layer(torch.autograd.Function):
    """Times 3, and backwards what it is handed, times 3."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, through: GradOutputChannel) -> torch.Tensor:
        ctx.through = through
        return 3 * x

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        made = ctx.through.get(dy)
        return 3 * (dy if made is None else made.matrix.view(dy.shape)), None


class _Behind(torch.autograd.Function):
    """Times 5; backwards it hands over."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, through: GradOutputChannel) -> torch.Tensor:
        ctx.through = through
        return 5 * y

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.through.put(GradOutput(5 * dout.reshape(-1, dout.shape[-1]), {})).view(dout.shape), None


def test_gradient_goes_past_autograd_through_views_and_again() -> None:
    x, through = torch.ones(6, 4, requires_grad=True), channel()
    out = _Behind.apply(_Layer.apply(x, through).view(3, 2, 4), through)
    for _ in range(2):
        (dx,) = torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)
        assert torch.equal(dx, torch.full_like(x, 15.0))


def test_several_calls_in_flight_do_not_mix() -> None:
    xs = [torch.full((2, 4), float(n), requires_grad=True) for n in range(3)]
    ways = [channel() for _ in xs]
    outs = [_Behind.apply(_Layer.apply(x, way), way) for x, way in zip(xs, ways, strict=True)]
    for factor, out in reversed(list(enumerate(outs))):
        out.backward(torch.full_like(out, float(factor)))
    assert [x.grad.unique().tolist() for x in xs if x.grad is not None] == [[0.0], [15.0], [30.0]]


def test_reads_of_the_placeholder_are_nan() -> None:
    x, through = torch.ones(2, 4, requires_grad=True), channel()
    y = _Layer.apply(x, through)
    (_Behind.apply(y, through).sum() + y.sum()).backward()  # y has a second reader: autograd adds its gradient
    assert x.grad is not None
    assert x.grad.isnan().all()
    placeholder = placeholder_like(torch.ones(5, 3, dtype=torch.bfloat16))
    assert placeholder.isnan().all()
    assert placeholder.untyped_storage().nbytes() == 2
    assert (placeholder.shape, placeholder.dtype) == ((5, 3), torch.bfloat16)


def test_an_unread_operand_is_not_matched_to_another_gradient() -> None:
    x, through = torch.ones(2, 4, requires_grad=True), channel()
    y = _Layer.apply(x, through)
    torch.autograd.grad(_Behind.apply(y, through), y, torch.ones_like(y))  # the layer is not reached
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_a_changed_output_carries_nothing() -> None:
    y, through = torch.ones(2, 4), channel()
    assert GradOutputChannel.of(y) is None
    through.attach(y)
    assert GradOutputChannel.of(y) is through
    assert GradOutputChannel.of(y.view(8)) is None
    y += 1
    assert GradOutputChannel.of(y) is None


def test_an_input_is_for_one_layer_and_as_it_was() -> None:
    first, second = linear_gemms_of("fp8_delayed"), linear_gemms_of("fp8_delayed")
    x = torch.ones(4, 16)
    made = QuantizedTensor(x.shape, x.dtype, None)
    assert attached_input(x, first) is None
    attach_metadata(x, quantized_input=(first, made))
    assert attached_input(x, first) is made
    assert attached_input(x, second) is None
    assert attached_input(x.view(2, 2, 16), first) is None
    x += 1
    assert attached_input(x, first) is None


@pytest.mark.parametrize(
    ("recipe", "plain", "supported_fusion"),
    [
        ("fp8_delayed", (), "source"),
        ("fp8_current", (), "amax"),
        ("fp8_delayed", ("dgrad",), None),  # --rerun-in-bf16: one of both GEMMs still reads the tensor
        ("fp8_delayed", ("wgrad",), None),
        ("fp8_blockwise", (), None),
        ("bf16", (), None),
    ],
)
def test_fusion_is_supported_where_both_gemms_read_operands_only(
    monkeypatch: pytest.MonkeyPatch, recipe: str, plain: tuple[str, ...], supported_fusion: str | None
) -> None:
    monkeypatch.setattr(resolved, "arch_of", lambda _: "sm90")
    linear_gemms = linear_gemms_of(recipe, *plain)
    weight = torch.zeros(128, 128, dtype=torch.bfloat16)
    linear_gemms.backends.resolve(weight)
    assert linear_gemms.supported_fusion("grad_output", weight) == supported_fusion
    assert linear_gemms.accepts_split_input(weight) == (recipe != "bf16" and not plain)
    of_x = {("dgrad",): "source"}.get(plain, supported_fusion)  # whose GEMMs are fprop and wgrad
    assert linear_gemms.supported_fusion("input", weight) == of_x


def test_amax_of_rows_are_found_in_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolved, "arch_of", lambda _: "sm90")
    linear_gemms, weight = linear_gemms_of("fp8_rowwise"), torch.zeros(128, 128, dtype=torch.bfloat16)
    linear_gemms.backends.resolve(weight)
    assert not linear_gemms.accepts_split_input(weight)


@pytest.mark.parametrize(
    ("config", "options", "fused"),
    [
        ({}, {}, True),
        ({"rotary_interleaved": True}, {}, False),
        ({"no_rope_freq": [0, 1]}, {}, False),
        ({"yarn_rotary_scaling_factor": 4.0}, {}, False),
        ({}, {"packed_seq_params": object()}, False),
        ({}, {"inference_context": object()}, False),
        ({}, {"rotary_pos_emb": (torch.zeros(4, 1, 1, 8), torch.zeros(4, 1, 1, 8))}, False),
        ({}, {"rotary_pos_emb": torch.zeros(4, 2, 1, 8)}, False),
        ({}, {"rotary_pos_emb": None}, False),
    ],
)
def test_the_kernel_rotates_only_as_megatron_core_would(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], options: dict[str, Any], fused: bool
) -> None:
    monkeypatch.setattr(dispatch, "fuses", lambda _: True)
    layer: Any = SimpleNamespace(config=SimpleNamespace(**config))
    given = {"rotary_pos_emb": torch.zeros(4, 1, 1, 8)} | options
    found = LowPrecSelfAttention._fused_angles(layer, torch.zeros(4, 1, 8), given)
    assert (found is not None) == fused
