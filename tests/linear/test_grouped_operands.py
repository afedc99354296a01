"""Operands of all experts at once are those of each expert: values, scales, amaxes, codes and rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lowprec.kernels.matrices import Matrices
from megatron_lowprec.linear.backends.grouped_protocol import grouped_backend
from megatron_lowprec.linear.backends.hopper_fp8 import grouped as grouped_hopper_fp8
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.grouped_gemms import GroupedLinearGemms
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import SIDES, LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.quantizer import quantize
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.token_rows import pack_rows, unpack_rows
from megatron_lowprec.recipe.coverage import primary_weight_spec
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.registry import get_recipe
from tests.linear.grouped_experts import IN, OUT, SHARD, STEP, TETRAJET, TOKENS, UE5M3, grouped_ops


def operand_differences(name: str, device: str) -> list[str]:
    """The operands of all experts whose bits are not those of each expert's own; another rank has larger amaxes."""
    recipe = load_recipe(name)
    experts = [
        LinearGemms(recipe, LinearId(3, "fc1", i, spans=SHARD, split="O"), 1, AmaxHistory, lambda own: own.clamp(min=9))
        for i in range(4)
    ]
    weights = [2.0**i * torch.randn(OUT, IN).bfloat16().to(device) for i in range(4)]
    matrices = {"weight": weights, "input": _rows(IN, device), "grad_output": _rows(OUT, device)}
    for gemms in experts:
        gemms.backends.resolve(weights[0])
        for history, slot in gemms.histories.values():
            history.in_effect[slot] = 3.0 + gemms.linear_id.expert  # not the amax of any matrix
            history.to(torch.device(device))
    grouped, found = grouped_backend("emulated", [gemms.backends for gemms in experts]), list[str]()
    assert grouped is not None
    for (gemm, tensor), columnwise in {
        (gemm, tensor): columnwise for tensor, sides in SIDES.items() for columnwise, gemm in enumerate(sides)
    }.items():
        assert grouped.why_not(gemm, weights[0]) is None
        sources, request = matrices[tensor], CastRequest(not columnwise, bool(columnwise))
        if tensor == "weight":
            operand = grouped.weights(gemm, Matrices(sources), STEP, True)
            data = list(operand.data) if gemm == "fprop" else [one.t() for one in operand.data]
        else:
            rows = [len(source) for source in sources]
            operand = grouped.quantize(tensor, torch.cat(sources), rows, STEP, request)[columnwise]
            assert operand is not None
            assert isinstance(operand.data, torch.Tensor)
            padding = experts[0].transforms.of(gemm)
            whole = padding[0].block if columnwise and padding is not None else 1
            data = list(operand.data.split([-(-count // whole) * whole for count in rows]))
        recorded = [_amaxes(gemms) for gemms in experts]
        for i, (gemms, source) in enumerate(zip(experts, sources, strict=True)):
            for history, _ in gemms.histories.values():
                history.newest.zero_()
            own, _ = gemms.backends.resolved.gemms[gemm].quantize(tensor, source, STEP, request)
            want, scale = own.rowwise_data, own.rowwise_tensor_scale
            if columnwise:
                want, scale = own.columnwise()[0].t(), own.columnwise_tensor_scale
            same = want is not None and torch.equal(data[i], want) and data[i].dtype == want.dtype
            same &= scale is None or torch.equal(scale.view(()), operand.scale[i])
            if not same or _amaxes(gemms) != recorded[i]:
                found.append(f"{tensor} of {gemm}, expert {i}")
            for history, _ in gemms.histories.values():
                history.newest.zero_()
    return found


def _rows(columns: int, device: str) -> list[torch.Tensor]:
    return [2.0**i * torch.randn(count, columns).bfloat16().to(device) for i, count in enumerate(TOKENS)]


def _amaxes(gemms: LinearGemms) -> list[float]:
    return [float(history.newest[slot]) for history, slot in gemms.histories.values()]


@pytest.mark.parametrize("name", ["quartet2", "nvfp4_all", TETRAJET, UE5M3, "mxfp4_rht_sr"])
def test_operands_of_all_experts_have_the_bits_of_each(name: str) -> None:
    """Values, scales of tensors and recorded amaxes, also of operands that are quantized again from fprop's."""
    with grouped_ops():
        assert operand_differences(name, "cpu") == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["quartet2", "nvfp4_all", TETRAJET, UE5M3, "mxfp4_rht_sr"])
def test_compiled_operands_of_all_experts_have_the_bits_of_each(name: str) -> None:
    assert operand_differences(name, "cuda") == []


@pytest.mark.parametrize("name", ["fp8_blockwise", "fp8_current", "fp8_delayed"])
def test_codes_of_fp8_primary_weights_are_those_of_each_linear_layer(name: str) -> None:
    """The stored codes without a copy for fprop, one transposed copy a step for dgrad."""
    spec = primary_weight_spec(get_recipe(name))
    assert spec is not None
    experts = [
        LinearGemms(get_recipe(name), LinearId(3, "fc1", i), 1, AmaxHistory, cache_weights=True, save_memory=True)
        for i in (0, 1)
    ]
    group = GroupedLinearGemms(experts)
    backend = grouped_backend("hopper_fp8", [gemms.backends for gemms in experts])
    assert backend is not None
    weights = Matrices([Fp8Weight.of(2.0**i * torch.randn(OUT, IN).bfloat16(), spec) for i in range(2)])
    for gemm, columnwise in (("fprop", False), ("dgrad", True)):
        data, scale = group._weights(gemm, backend, weights, STEP, True)
        assert group._weights(gemm, backend, weights, STEP, True).data is data
        assert scale is not None
        for i, weight in enumerate(weights):
            quantized = weight.quantized(columnwise=columnwise, codes=True)
            want_data, want_scale = quantized.columnwise() if columnwise else quantized.rowwise()
            assert (data[i].dtype, data[i].is_contiguous()) == (want_data.dtype, True)
            assert torch.equal(data[i].view(torch.uint8), want_data.view(torch.uint8))
            assert want_scale is not None
            assert torch.equal(scale[i].view(-1), want_scale[..., : scale.shape[-1] if spec.block else 1].reshape(-1))
            assert (data[i].data_ptr() == weight.codes.data_ptr()) is not columnwise


@pytest.mark.parametrize("arch", ["cpu", "sm90"])
@pytest.mark.parametrize("name", ["fp8_blockwise", "fp8_rowwise", "mxfp8"])
def test_codes_of_all_experts_are_the_operand(name: str, arch: str) -> None:
    """Products and input gradients of x and dy; the weight gradient is that of the dequantized codes."""
    recipe, rng_step = get_recipe(name), RngStep(7, 0)
    spec = recipe.fprop.input
    assert spec is not None
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(OUT, IN, generator=generator).bfloat16() for _ in TOKENS]
    x, dy = (torch.randn(sum(TOKENS), size, generator=generator).bfloat16() for size in (IN, OUT))
    dy_spec = recipe.dgrad.grad_output
    assert dy_spec is not None
    tensors, rounded, sent = [x, dy], [], []
    for tensor, of_tensor in ((x, spec), (dy, dy_spec)):
        codes = quantize(tensor, of_tensor)
        rounded.append(codes.dequantize(torch.bfloat16))
        sent.append(unpack_rows(pack_rows(codes), tensor.shape[1], of_tensor, torch.bfloat16))
    found = []
    with grouped_ops(arch) as taken:
        for given, gradient in (tensors, rounded, sent):
            group = GroupedLinearGemms([LinearGemms(recipe, LinearId(3, "fc1", i), 1, AmaxHistory) for i in range(4)])
            y, saved = group.forward(given, TOKENS, weights, rng_step)
            saved = saved.without_tensors().with_tensors(saved.tensors())
            found.append((y, *group.backward(gradient, TOKENS, saved, rng_step, [None] * 4)))
    assert bool(taken) == (name == "mxfp8" or arch == "sm90")
    (want_y, want_dx, _), (_, _, want_dw), (y, dx, dw) = found
    assert torch.equal(y, want_y)
    assert torch.equal(dx, want_dx)
    assert all(map(torch.equal, dw, want_dw))


def test_kernels_get_rows_from_a_multiple_of_16_bytes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor descriptors begin there; a view of tokens may not."""
    found: list[int] = []
    quantize = grouped_hopper_fp8.GroupedHopperFp8Gemms.quantize

    def spy(self: Any, tensor: str, matrix: torch.Tensor, *args: Any) -> Any:
        found.append(matrix.data_ptr() % 16)
        return quantize(self, tensor, matrix, *args)

    monkeypatch.setattr(grouped_hopper_fp8.GroupedHopperFp8Gemms, "quantize", spy)
    group = GroupedLinearGemms([LinearGemms(load_recipe("fp8_current"), LinearId(0, "fc1"), 0, AmaxHistory)] * 2)
    weight, tokens = torch.ones(2, OUT, IN).bfloat16(), [3, 2]
    x, dy = (torch.ones(5 * size + 1).bfloat16()[1:].view(5, size) for size in (IN, OUT))
    assert x.data_ptr() % 16
    with grouped_ops("sm90"):
        _, saved = group.forward(x, tokens, weight, STEP, save_input=True)
        group.backward(dy, tokens, saved, STEP, [None] * 2, out=torch.empty_like(weight))
    assert found == [0, 0]
