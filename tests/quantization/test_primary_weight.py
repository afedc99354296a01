"""FP8 primary weights: the reference's codes, what the tensor lets autograd see, and the GEMMs that read it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_lowprec import LowPrecLinear, QuantSpec, get_recipe
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.multi_tensor_cast.reference import fp8_codes
from megatron_lowprec.kernels.quantize.reference import block_amax, decode, encode, quantize_operand
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.primary_weight import Fp8Weight, set_codes, weight_encode_scale
from megatron_lowprec.quantization.quantizer import quantize_by_reference
from megatron_lowprec.quantization.tensor import QuantizedTensor, block_sizes

RECIPES = ["fp8_current", "fp8_delayed", "fp8_blockwise"]
T, IN, OUT = 40, 256, 384


def spec_of(name: str = "fp8_current") -> QuantSpec:
    spec = get_recipe(name).fprop.weight
    assert spec is not None
    return spec


def values(dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    return (torch.randn(OUT, IN, generator=torch.Generator().manual_seed(3)) * 0.02).to(dtype).to(device)


# ---- codes
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [1.0, 3.7, 2.0**-9, math.nan])
def test_codes_are_the_reference_s(name: str, scale: float) -> None:
    fmt = FORMATS[name]
    grid = decode(torch.arange(256, dtype=torch.uint8), fmt)
    grid = grid[grid.isfinite()].sort().values
    middles = (grid[1:] + grid[:-1]) / 2
    beside = [torch.nextafter(middles, torch.full_like(middles, to)) for to in (-math.inf, math.inf)]
    bits = torch.randint(-(2**31), 2**31, (20000,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e30, -1e30, 1e-30, fmt.max, fmt.max * 1.07])
    x = torch.cat((grid, middles, *beside, bits.view(torch.float32), special)).view(1, -1)
    encode_scale = torch.tensor([scale])
    codes = fp8_codes(x, encode_scale, fmt)
    elements, _ = quantize_operand(
        x, fmt, (1, x.shape[1]), scale_format="fp32", scale_rule="amax", encode_scale=encode_scale.view(1, 1)
    )
    number = ~elements.isnan()
    assert torch.equal(codes[number], encode(elements, fmt)[number])
    assert decode(codes[~number], fmt).isnan().all()  # NaN has two codes
    assert number.any() == math.isfinite(scale)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_blockwise"])
@pytest.mark.parametrize("changes", [{}, {"scale_rule": "amax_pow2"}, {"amax_floor": 1e-4}])
def test_taken_values_are_quantized_as_an_operand_is(recipe: str, changes: dict[str, object]) -> None:
    spec = replace(spec_of(recipe), **changes)  # type: ignore[arg-type]
    weight = Fp8Weight.of(values(), spec)
    assert weight.source is not None
    assert torch.equal(weight.source, values())
    assert weight.main_amax.shape == ((1,) if recipe == "fp8_current" else (OUT // 128, IN // 128))
    assert torch.equal(weight.main_amax, amaxes_of(weight, values()))
    for transposed in (False, True):
        matrix = values().t() if transposed else values()
        # scales that are powers of two are in the data
        elements, scale, _ = quantize_by_reference(matrix.float(), spec, dequantize=spec.power_of_two_scale)
        quantized = weight.quantized(columnwise=transposed, codes=False)
        data, found = quantized.columnwise() if transposed else quantized.rowwise()
        assert torch.equal(data.float(), elements)
        if spec.power_of_two_scale:
            assert found is None
        else:
            assert torch.equal(found, scale)  # type: ignore[arg-type]


def amaxes_of(weight: Fp8Weight, main: torch.Tensor) -> torch.Tensor:
    return block_amax(main.float(), block_sizes(weight.spec, main)).view_as(weight.main_amax)


def test_margin_is_of_delayed_scaling() -> None:
    amax = torch.tensor([3.0])
    delayed, current = spec_of("fp8_delayed"), spec_of()
    assert weight_encode_scale(amax, replace(delayed, margin=2)) == weight_encode_scale(amax, delayed) / 4
    assert weight_encode_scale(amax, delayed) == weight_encode_scale(amax, current)
    assert weight_encode_scale(torch.zeros(1), delayed) == 1.0


@pytest.mark.parametrize("shape", [(384, 256), (300, 200)])
def test_block_scales_of_a_native_product_are_padded_to_columns_of_four(shape: tuple[int, int]) -> None:
    weight = Fp8Weight.of(torch.randn(shape).bfloat16(), spec_of("fp8_blockwise"))
    scale = weight.decode_scale
    assert scale.shape == (3, 2)
    for columnwise in (False, True):
        quantized = weight.quantized(columnwise=columnwise, codes=True)
        data, padded = quantized.columnwise() if columnwise else quantized.rowwise()
        wanted = scale.t() if columnwise else scale
        assert padded is not None
        assert padded.is_contiguous()
        assert padded.shape == (wanted.shape[0], 4)
        assert torch.equal(padded[:, : wanted.shape[1]], wanted)
        assert not padded[:, wanted.shape[1] :].any()
        codes = weight.codes.t() if columnwise else weight.codes
        assert torch.equal(data.view(torch.uint8), codes)
        weight.source = None
        assert torch.equal(quantized.dequantize(torch.bfloat16), weight + 0)


def shards(
    device: str, set_them: Callable[..., None] = set_codes
) -> tuple[list[Fp8Weight], list[torch.Tensor], list[torch.Tensor]]:
    """Weights of two formats whose codes came by parts, each with its main weight and scale; a third has no part."""
    weights, mains, scales, parts, part_scales = [], [], [], [], []
    for number, name in enumerate(("e4m3", "e5m2", "e4m3")):
        spec = replace(spec_of(), format=name)
        weight = Fp8Weight.of(torch.zeros(OUT, IN, device=device).bfloat16(), spec)
        main = (number + 1) * values(torch.float32, device).view(-1)
        scale = weight_encode_scale(main.abs().amax().view(1), spec)
        starts = range(0, main.numel(), 1000) if number < 2 else []
        parts += [(weight, main[start : start + 1000], start) for start in starts] or [(weight, None, 0)]
        part_scales += [scale] * max(1, len(starts))
        weights.append(weight), mains.append(main), scales.append(scale)
    set_them(parts, part_scales)
    return weights, mains, scales


def test_codes_are_set_by_parts() -> None:
    weights, mains, scales = shards("cpu")
    assert all(weight.source is None for weight in weights)
    for weight, main, scale in zip(weights[:2], mains, scales, strict=False):
        assert torch.equal(weight.codes, fp8_codes(main, scale, FORMATS[weight.spec.format]).view(OUT, IN))
    assert not weights[2].codes.any()


# ---- the tensor
def test_to_autograd_it_is_a_bf16_parameter() -> None:
    weight = torch.nn.Parameter(Fp8Weight.of(values(), spec_of()))
    assert isinstance(weight, Fp8Weight)
    assert (weight.dtype, weight.shape, weight.requires_grad) == (torch.bfloat16, (OUT, IN), True)
    assert weight.data.codes is weight.codes  # type: ignore[attr-defined]
    accumulates = weight.expand_as(weight).grad_fn
    assert accumulates is not None
    assert accumulates.next_functions[0][0] is not None
    for plain in (torch.empty_like(weight), torch.zeros_like(weight), weight + 0):
        assert type(plain) is torch.Tensor
        assert (plain.dtype, plain.shape) == (torch.bfloat16, (OUT, IN))
    (weight.float() * 2).sum().backward()
    assert type(weight.grad) is torch.Tensor
    assert (weight.grad == 2).all()


def test_its_value_is_what_it_took_until_codes_are_set() -> None:
    weight = Fp8Weight.of(values(), spec_of())
    assert torch.equal(weight + 0, values())
    weight.source = None
    coarse = (weight.elements().float() * weight.decode_scale).bfloat16()
    assert torch.equal(weight + 0, coarse)
    assert not torch.equal(coarse, values())
    with torch.no_grad():
        weight.copy_(values() * 2)
    assert torch.equal(weight.get_high_precision_init_val(), values() * 2)


def test_a_view_of_other_strides_is_its_value_s() -> None:
    weight = Fp8Weight.of(values()[:IN], spec_of())
    assert isinstance(weight.as_strided((IN, IN), (IN, 1)), Fp8Weight)
    assert torch.equal(weight.as_strided((IN, IN), (1, IN)), weight.value().t())


def test_other_writes_are_refused() -> None:
    weight = Fp8Weight.of(values(), spec_of())
    with pytest.raises(NotImplementedError, match="only by copy_"):
        weight.add_(1.0)
    with pytest.raises(NotImplementedError, match="only by copy_"):
        weight.zero_()


# ---- the GEMMs
def layers(recipe: str, device: str = "cpu") -> tuple[LowPrecLinear, LowPrecLinear]:
    """The ordinary layer and one with FP8 weights, from main weights that bf16 holds exactly."""
    ordinary, primary = (
        LowPrecLinear(IN, OUT, bias=False, dtype=torch.bfloat16, recipe=recipe, device=device) for _ in range(2)
    )
    with torch.no_grad():
        ordinary.weight.copy_(values(device=device))
    primary.weight = torch.nn.Parameter(Fp8Weight.of(values(device=device), spec_of(recipe)))
    return ordinary, primary


def update(ordinary: LowPrecLinear, primary: LowPrecLinear, main: torch.Tensor) -> None:
    """What an optimizer's step does: new weights, codes by the scale that the histories are about to put in effect."""
    with torch.no_grad():
        ordinary.weight.copy_(main)
    weight = primary.weight
    assert isinstance(weight, Fp8Weight)
    follows = weight.main_amax.copy_(amaxes_of(weight, main))
    if weight.spec.scaling == "delayed":
        history, slot = primary.linear_gemms.histories["weight"]
        follows = history.upcoming()[slot : slot + 1]
    encode_scale = weight_encode_scale(follows, weight.spec)
    weight.decode_scale.copy_(torch.ones_like(encode_scale) / encode_scale)
    set_codes([(weight, main.float().view(-1), 0)], [encode_scale])
    for layer in (ordinary, primary):
        layer.end_step()
        layer.linear_gemms.weight_cache.clear()


def train(recipe: str, device: str = "cpu") -> list[list[list[torch.Tensor]]]:
    """[y, dx, dw] of both layers over four steps of two microbatches, an evaluation before each."""
    pair, found = layers(recipe, device), []
    if recipe == "fp8_delayed":  # a run begins with scale 1
        assert isinstance(pair[1].weight, Fp8Weight)
        pair[1].weight.decode_scale.fill_(1.0)
        set_codes([(pair[1].weight, values(device=device).float().view(-1), 0)], [torch.ones(1, device=device)])
    generator = torch.Generator().manual_seed(5)
    for number in range(4):
        for _ in range(2):
            x, dy = (torch.randn(T, size, generator=generator).bfloat16().to(device) for size in (IN, OUT))
            for layer in pair:
                with torch.no_grad():
                    layer(x * 100)
                leaf = x.clone().requires_grad_()
                layer.weight.grad = None
                y = layer(leaf)
                y.backward(dy)
                assert leaf.grad is not None
                assert layer.weight.grad is not None
                found.append([y.detach(), leaf.grad, layer.weight.grad])
        # on the CPU: it adds 0.01 rounded to bf16, a GPU adds it as fp32
        update(*pair, main=(values() * (number + 2) + 0.01).bfloat16().to(device))
    for operand, (history, slot) in pair[0].linear_gemms.histories.items():
        other, at = pair[1].linear_gemms.histories[operand]
        assert torch.equal(history.state(slot), other.state(at)), operand
    return [found[0::2], found[1::2]]


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_the_ordinary_path_s_where_bf16_holds_the_main_weight(recipe: str) -> None:
    ordinary, primary = train(recipe)
    for one, other in zip(ordinary, primary, strict=True):
        for expected, found in zip(one, other, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_native_products_read_the_codes_and_one_copy_a_step(recipe: str) -> None:
    linear_gemms = LinearGemms(get_recipe(recipe), LinearId(1, "alone"), 0, AmaxHistory, cache_weights=True)
    weight = Fp8Weight.of(values(), spec_of(recipe))

    def operand(gemm: str, update_amax: bool = True) -> QuantizedTensor:
        found = linear_gemms._stored_weight(gemm, weight, linear_gemms.backends.built("hopper_fp8"), update_amax)
        assert found is not None
        data, scale = found.rowwise() if gemm == "fprop" else found.columnwise()
        assert data.dtype == torch.float8_e4m3fn
        assert data.is_contiguous()
        assert scale is not None
        if recipe == "fp8_blockwise":
            assert scale.shape[1] == 4
        else:
            assert scale.data_ptr() == weight.decode_scale.data_ptr()
        return found

    by_rows, by_columns = operand("fprop"), operand("dgrad")
    assert by_rows.rowwise()[0].data_ptr() == weight.codes.data_ptr()
    assert torch.equal(by_columns.columnwise()[0].view(torch.uint8), weight.codes.t())
    assert operand("dgrad") is by_columns
    assert operand("dgrad", update_amax=False) is not by_columns
    linear_gemms.weight_cache.clear()
    assert operand("dgrad") is not by_columns


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_native_products_are_the_ordinary_path_s_and_near_the_emulated_ones(recipe: str) -> None:
    ordinary, primary = train(recipe, "cuda")
    emulated = train(recipe)[1]
    for one, other, cpu in zip(ordinary, primary, emulated, strict=True):
        for expected, found, near in zip(one, other, cpu, strict=True):
            assert torch.equal(found, expected)
            # fast accumulation keeps about 14 bits, bf16 rounds to 8
            torch.testing.assert_close(
                found.cpu().float(), near.float(), rtol=2**-7, atol=2**-9 * float(near.abs().max())
            )


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_s_codes_are_the_cpu_s(recipe: str) -> None:
    on_gpu, on_cpu = (Fp8Weight.of(values(device=device), spec_of(recipe)) for device in ("cuda", "cpu"))
    assert torch.equal(on_gpu.codes.cpu(), on_cpu.codes)
    assert torch.equal(on_gpu.decode_scale.cpu(), on_cpu.decode_scale)
    transposed, _ = on_gpu.quantized(columnwise=True, codes=True).columnwise()
    assert torch.equal(transposed.view(torch.uint8).cpu(), on_cpu.codes.t())


@pytest.mark.gpu
def test_a_gpu_s_parts_are_set_by_a_launch_for_each_format() -> None:
    kernels: list[str] = []

    def profiled_set_codes(*arguments: Any) -> None:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            set_codes(*arguments)
        events = profiled.events()
        kernels.extend(event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA)

    shards("cuda")  # compiles the kernel
    on_gpu = shards("cuda", profiled_set_codes)[0]
    assert sum("_multi_tensor_cast_kernel" in name for name in kernels) == 2, kernels
    for one, other in zip(on_gpu, shards("cpu")[0], strict=True):
        assert torch.equal(one.codes.cpu(), other.codes)
