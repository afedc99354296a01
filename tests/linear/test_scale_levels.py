"""Layers whose operands have coded block scales under a tensor scale, on the reference path, and their operands."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from megatron_lowprec import GemmSpec, HadamardSpec, LowPrecLinear, QuantSpec, Recipe, get_recipe, quantize
from megatron_lowprec.linear.backends.emulated.dense import EmulatedGemms
from megatron_lowprec.linear.backends.protocol import CastRequest, GemmBackend
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import SIDES, LinearId
from megatron_lowprec.linear.lowprec_linear import end_step
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.error_stats import QuantizationError
from megatron_lowprec.quantization.quantizer import quantize_by_reference
from megatron_lowprec.quantization.random_stream import RandomStream, RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.quant_spec import ScaleSpec, TensorScaleSpec
from tests.linear.layers import IN, LAYER, NAME, NAMES, OUT, SEED, assert_is, dtypes, oracle, step, tensors

BY_ROW = QuantSpec("e2m1", "1x16", "e4m3", "product", tensor_scale=TensorScaleSpec(2688.0))
BY_SQUARE = replace(BY_ROW, granularity="16x16")
DRAWN = replace(BY_ROW, rounding="stochastic", scale=replace(BY_ROW.scale, rounding="stochastic"))
# TransformerEngine's NVFP4 but for its bf16 rounding after the transform, and with scales rounded stochastically
NVFP4 = Recipe(
    "two_levels",
    "",
    fprop=GemmSpec(input=BY_ROW, weight=BY_SQUARE),
    dgrad=GemmSpec(grad_output=DRAWN, weight=BY_SQUARE),
    wgrad=GemmSpec(grad_output=DRAWN, input=BY_ROW, hadamard=HadamardSpec(16, signs="nvfp4")),
)


def layer_of(recipe: Recipe, dtype: torch.dtype = torch.float32) -> LowPrecLinear:
    torch.manual_seed(0)
    return LowPrecLinear(IN, OUT, bias=False, dtype=dtype, recipe=recipe, seed=SEED, layer=LAYER, name=NAME)


def gemms_of(recipe: Recipe) -> LinearGemms:
    return LinearGemms(recipe, LinearId(LAYER, NAME), SEED, AmaxHistory)


def emulated(gemms: LinearGemms) -> EmulatedGemms:
    return cast(EmulatedGemms, gemms.backends.built("emulated"))


@dtypes
def test_products_are_those_of_the_quantized_operands(dtype: torch.dtype, generator: torch.Generator) -> None:
    layer, (x, dy) = layer_of(NVFP4, dtype), tensors(dtype, generator)
    w, rng_step = layer.weight.detach(), RngStep(0, 0)
    y, dx, dw = step(layer, x, dy)
    assert all(map(torch.equal, (y, dx, dw), oracle(NVFP4, x, w, dy, rng_step)))


def test_an_input_saved_as_data_keeps_its_tensor_scale(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """A backend that quantizes x for both GEMMs at once: the saved data have the bits of those made for wgrad."""
    layer, (x, dy) = layer_of(NVFP4), tensors(torch.float32, generator)
    want = step(layer, x, dy)
    quantize_once, saved = EmulatedGemms.quantize, list[str]()

    def both(backend: EmulatedGemms, tensor: str, matrix: Any, rng_step: RngStep, request: CastRequest, *_: Any) -> Any:
        if not (request.rowwise and request.columnwise):
            return quantize_once(backend, tensor, matrix, rng_step, request)
        saved.append(tensor)
        found = quantize_once(backend, tensor, matrix, rng_step, request._replace(columnwise=False))
        other = quantize_once(backend, tensor, matrix, rng_step, request._replace(rowwise=False))[0]
        for field in ("data", "scale", "tensor_scale", "transform"):
            setattr(found[0], f"columnwise_{field}", getattr(other, f"columnwise_{field}"))
        return found

    monkeypatch.setattr(EmulatedGemms, "one_cast", frozenset({"input"}))
    monkeypatch.setattr(EmulatedGemms, "fuses_directions", lambda *_: True)
    monkeypatch.setattr(EmulatedGemms, "quantize", both)
    assert all(map(torch.equal, step(layer_of(NVFP4), x, dy), want))
    assert saved == ["input"]


def test_a_layer_learns_a_linear_map(generator: torch.Generator) -> None:
    layer = layer_of(NVFP4)
    x, target = torch.randn(256, IN, generator=generator), torch.randn(OUT, IN, generator=generator) / IN**0.5
    optimizer, losses = torch.optim.SGD(layer.parameters(), lr=40.0), []
    for _ in range(12):
        loss = (layer(x) - x @ target.t()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("recipe", [*map(get_recipe, NAMES), NVFP4], ids=[*NAMES, NVFP4.name])
def test_operands_hold_their_transform_and_folded_scale(recipe: Recipe, generator: torch.Generator) -> None:
    gemms, rng_step = gemms_of(recipe), RngStep(0, 0)
    x, dy = tensors(torch.bfloat16, generator)
    matrices = {"input": x, "grad_output": dy, "weight": torch.randn(OUT, IN, generator=generator).bfloat16()}
    for tensor, matrix in matrices.items():
        for columnwise, gemm in enumerate(SIDES[tensor]):
            by_row, spec = not columnwise, getattr(recipe.gemms[gemm], tensor)
            made, _ = emulated(gemms).quantize(tensor, matrix, rng_step, CastRequest(by_row, not by_row))
            made.validate()
            assert made.folded == (spec is not None and spec.folds_scale)
            assert (made.columnwise_transform if columnwise else made.rowwise_transform) == recipe.gemms[gemm].hadamard


def test_contradictions_are_named() -> None:
    data, scale, of_tensor = torch.zeros(4, 32), torch.zeros(4, 2, dtype=torch.uint8), torch.ones(1, 1)
    good = QuantizedTensor(data.shape, data.dtype, BY_ROW, data, scale, rowwise_tensor_scale=of_tensor)
    assert good.validate() is good
    for changes, reason in (
        ({"folded": True}, "block scales are kept beside the data"),
        ({"rowwise_scale": None}, "block scales are lacking, and not folded into the data"),
        ({"rowwise_scale": scale.float()}, "scales of torch.float32 for e4m3"),
        ({"rowwise_scale": scale[:, :1]}, r"scales \(4, 1\), expected at least \(4, 2\)"),
        ({"rowwise_tensor_scale": None}, "tensor scale lacking, with one in the spec"),
        ({"columnwise_tensor_scale": of_tensor}, "columnwise data .* a tensor scale without data"),
        ({"rowwise_data": data[:, :16]}, r"shape \(4, 16\), expected at least \(4, 32\)"),
        ({"rowwise_transform": HadamardSpec(64)}, "32 columns are no whole blocks of a transform of 64"),
        ({"spec": None}, "scales of a tensor that is not quantized"),
        ({"spec": QuantSpec("e4m3", "1x16"), "folded": True, "rowwise_scale": None}, "fp32 scales by amax do not fold"),
    ):
        with pytest.raises(ValueError, match=reason):
            replace(good, **changes).validate()
    with pytest.raises(AssertionError, match="data are transformed"):
        replace(good, rowwise_transform=HadamardSpec(16)).dequantize()


def test_tensors_of_zeros_and_nan() -> None:
    zeros = quantize(torch.zeros(4, 32), BY_ROW)
    assert torch.equal(zeros.dequantize(), torch.zeros(4, 32))
    assert zeros.scale.count_nonzero() == 0
    x = torch.ones(4, 32)
    x[0, 0] = torch.nan
    assert quantize(x, BY_ROW).dequantize().isnan().all()  # the tensor scale is


@pytest.mark.parametrize("rule", ["product", "quotient"])
@pytest.mark.parametrize("scale_format", ["e4m3", "ue4m3", "ue5m3"])
def test_block_scales_fold_exactly(rule: str, scale_format: str, generator: torch.Generator) -> None:
    spec = QuantSpec("e2m1", "1x16", scale_format, rule, tensor_scale=TensorScaleSpec(2688.0))
    x = (torch.randn(64, 64, generator=generator) * torch.logspace(-6, 0, 64).unsqueeze(1)).bfloat16()
    apart, folded = (quantize_by_reference(x, spec, dequantize=dequantize) for dequantize in (False, True))
    product = quantize(x, spec).elements.float().reshape(64, 4, 16) * (
        quantize(x, spec).decode_scale / apart.tensor_scale
    ).unsqueeze(-1)
    assert folded.data.dtype == torch.bfloat16
    torch.testing.assert_close(folded.data.float(), product.flatten(1), rtol=2.0**-22, atol=0)
    assert torch.equal(folded.scale, apart.scale)


def test_ranks_share_the_scale_of_a_tensor_and_not_of_blocks() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    whole = quantize(x, BY_ROW)
    amax = x.abs().amax().view(1, 1)
    half = quantize_by_reference(x[:, :32], BY_ROW, reduce_amax=lambda _: amax)
    assert torch.equal(half.tensor_scale, whole.rowwise_tensor_scale)  # type: ignore[arg-type]
    assert torch.equal(half.data, whole.elements[:, :32])
    shard = LinearId(LAYER, NAME, split="I")
    assert shard.shares_scale("fprop", "input", BY_ROW)
    assert not shard.shares_scale("fprop", "input", replace(BY_ROW, tensor_scale=None))


def test_a_delayed_tensor_scale_is_that_of_the_step_before(generator: torch.Generator) -> None:
    delayed = replace(BY_ROW, scaling="delayed", history=1)
    recipe = Recipe("delayed", "", fprop=GemmSpec(input=delayed, weight=BY_SQUARE))
    layer, (x, dy) = layer_of(recipe), tensors(torch.float32, generator)
    step(layer, x, dy)
    end_step(layer)
    y, _, _ = step(layer, 2 * x, dy)
    late = quantize_by_reference(2 * x, delayed, tensor_amax=x.abs().max())
    a = QuantizedTensor(x.shape, x.dtype, delayed, late.data, late.scale, rowwise_tensor_scale=late.tensor_scale)
    b = quantize(layer.weight.detach(), BY_SQUARE).dequantize().double()
    assert late.tensor_scale == x.abs().max() / 2688.0
    assert_is(y, (a.dequantize().double() @ b.t(), a.dequantize().double().abs() @ b.abs().t()), IN)


@dtypes
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4_sr", "fp8_current", "fp8_blockwise"])
def test_source_fprop_in_plain_torch(name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    """``three_gemms`` has the layers' bits: power-of-two and fp32 scales, stochastic rounding and headroom."""
    base = get_recipe(name)
    of_x, of_w = base.wgrad.input, base.dgrad.weight
    assert of_x is not None
    assert of_w is not None
    recipe = replace(
        base,
        fprop=GemmSpec(input=of_x, weight=of_w),
        dgrad=replace(base.dgrad, weight=replace(of_w, source="fprop")),
        wgrad=replace(base.wgrad, input=replace(of_x, source="fprop")),
    )
    layer, (x, dy) = layer_of(recipe, dtype), tensors(dtype, generator)
    assert all(map(torch.equal, step(layer, x, dy), oracle(recipe, x, layer.weight.detach(), dy)))


def test_source_fprop_quantizes_what_fprop_multiplied(generator: torch.Generator) -> None:
    again = replace(BY_ROW, source="fprop")
    recipe = Recipe(
        "again",
        "",
        fprop=GemmSpec(input=DRAWN, weight=BY_ROW),
        dgrad=GemmSpec(grad_output=BY_ROW, weight=again),
        wgrad=GemmSpec(grad_output=BY_ROW, input=again, hadamard=HadamardSpec(32)),
    )
    original = replace(
        recipe,
        dgrad=GemmSpec(grad_output=BY_ROW, weight=BY_ROW),
        wgrad=GemmSpec(grad_output=BY_ROW, input=BY_ROW, hadamard=HadamardSpec(32)),
    )
    layer, (x, dy) = layer_of(recipe), tensors(torch.float32, generator)
    w, rng_step = layer.weight.detach(), RngStep(0, 0)
    _, dx, dw = step(layer, x, dy)
    stream = emulated(gemms_of(recipe)).rounding["fprop", "input"].at(rng_step)
    x_again, w_again = quantize(x, DRAWN, random=stream).dequantize(), quantize(w, BY_ROW).dequantize()
    _, dx_again, dw_again = oracle(original, x_again, w_again, dy, rng_step)
    assert torch.equal(dx, dx_again)
    assert torch.equal(dw, dw_again)
    assert all(map(torch.equal, (dx, dw), oracle(recipe, x, w, dy, rng_step)[1:]))
    _, dx_of_original, dw_of_original = step(layer_of(original), x, dy)
    assert not torch.equal(dx, dx_of_original)
    assert not torch.equal(dw, dw_of_original)


def test_errors_of_operands_under_two_levels(generator: torch.Generator) -> None:
    """NVFP4 of normal numbers has about 20 dB, rounded stochastically 3 dB less."""
    recipe = replace(NVFP4, dgrad=replace(NVFP4.dgrad, weight=replace(BY_ROW, source="fprop")))
    gemms, w = gemms_of(recipe), torch.randn(OUT, IN, generator=generator)
    _, dy = tensors(torch.float32, generator)
    for gemm, tensor, matrix in (("fprop", "weight", w), ("dgrad", "weight", w), ("wgrad", "grad_output", dy)):
        sums = emulated(gemms).error_stats(gemm, tensor, matrix, RngStep(0, 0))
        assert 15.0 < (QuantizationError.of(sums.tolist()).snr or 0.0) < 25.0, (gemm, tensor)


@pytest.mark.parametrize("name", ["fp8_current", "mxfp8", "two_levels"])
def test_an_operand_quantized_again_is_compared_with_the_tensor_itself(name: str, generator: torch.Generator) -> None:
    """Whether or not its scales are kept: fp32 scales as ``GemmBackend`` compares them, others from codes."""
    base = NVFP4 if name == NVFP4.name else get_recipe(name)
    spec, of_fprop = base.dgrad.weight, base.fprop.weight
    assert spec is not None
    assert of_fprop is not None
    backend = emulated(gemms_of(replace(base, dgrad=replace(base.dgrad, weight=replace(spec, source="fprop")))))
    w, rng_step = torch.randn(OUT, IN, generator=generator), RngStep(0, 0)
    found = backend.error_stats("dgrad", "weight", w, rng_step)
    if name == "fp8_current":
        assert torch.equal(found, GemmBackend.error_stats(backend, "dgrad", "weight", w, rng_step))
    again = quantize(quantize(w, of_fprop).dequantize().t(), spec).dequantize()
    assert QuantizationError.of(found.tolist()).mse == pytest.approx((again - w.t()).double().square().mean().item())


def test_drawn_scales_are_right_on_average() -> None:
    """A scale between two codes is drawn 4096 times: its mean is off by at most 5 standard errors."""
    x = torch.full((4096, 16), 1.0)
    x[:, 1:] = 0.0
    spec = QuantSpec("e2m1", scale=ScaleSpec("1x16", "e4m3", "product", rounding="stochastic"))
    scale = quantize(x, spec, random=RandomStream((7, 0))).decode_scale.flatten().double()
    exact, step_of_code = 1.0 / 6.0, 2.0**-6  # E4M3's step from 1/8 on
    low = exact // step_of_code * step_of_code
    assert set(scale.tolist()) == {low, low + step_of_code}
    fraction = (exact - low) / step_of_code
    error = (fraction * (1 - fraction) / len(scale)) ** 0.5 * step_of_code
    assert abs(float(scale.mean()) - exact) < 5 * error
