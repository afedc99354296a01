"""The public ``quantize``: what it returns hangs together, whatever the spec, axis, shape and dtype."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lowprec import (
    GemmSpec,
    QuantizedTensor,
    QuantSpec,
    RandomStream,
    UserError,
    get_recipe,
    quantize,
    recipes,
)
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.quantize.reference import decode
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import as_numbers
from megatron_lowprec.recipe.registry import (
    FP8_1X128,
    FP8_128X128,
    FP8_CURRENT,
    FP8_ROW,
    MXFP4,
    MXFP4_SR,
    MXFP8,
    MXFP8_OCP,
    NVFP4,
)
from megatron_lowprec.scaling import CODED_SCALE_FORMATS
from tests.refusal import refused


def specs_of_recipes() -> list[QuantSpec]:
    found: dict[QuantSpec, None] = {}
    for name in recipes():
        for gemm in get_recipe(name).gemms.values():
            for operand in ("input", "weight", "grad_output"):
                spec = getattr(gemm, operand)
                if spec is not None and spec.correction is None:  # which needs a transform's groups
                    found[spec] = None
    return list(found)


def spec_id(spec: QuantSpec) -> str:
    return f"{spec.format}-{spec.granularity}-{spec.scale_format}-{spec.scale_rule}-{spec.rounding}-{spec.scaling}"


all_specs = pytest.mark.parametrize("spec", specs_of_recipes(), ids=spec_id)
STREAM = RandomStream((3, 4), RngStep(5, 6))


def test_specs_are_found() -> None:
    # 2 delayed, 2 current, row, tensor of powers of two, 4 blockwise, 4 mxfp8, 2 mxfp4, 3 nvfp4, 3 of four over six,
    # fprop's of quartet2
    assert len(specs_of_recipes()) == 23
    assert GemmSpec().quantized is False


def tiles(spec: QuantSpec, matrix: torch.Tensor) -> tuple[int, int]:
    rows, columns = matrix.shape
    return {"tensor": (rows, columns), "row": (1, columns)}.get(spec.granularity) or spec.block  # type: ignore[return-value]


@all_specs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (130, 288)])
def test_codes_and_scales_are_what_dequantize_says(
    spec: QuantSpec, dtype: torch.dtype, shape: tuple[int, int], generator: torch.Generator
) -> None:
    x = torch.randn(shape, generator=generator).to(dtype)
    q = quantize(x, spec, random=STREAM)
    assert q.codes.shape == x.shape
    assert q.codes.dtype == torch.uint8
    assert q.elements.dtype == dtype
    values = decode(q.codes, FORMATS[spec.format])
    assert torch.equal(values, q.elements.float())
    assert (q.scale.dtype == torch.uint8) == (spec.scale_format != "fp32")
    scale = as_numbers(q.scale, spec.scale_format)
    if spec.tensor_scale is not None:
        assert q.rowwise_tensor_scale is not None
        scale = scale * q.rowwise_tensor_scale
    tile = tiles(spec, x)
    rows, columns = torch.arange(shape[0]) // tile[0], torch.arange(shape[1]) // tile[1]
    want = (values * scale[rows][:, columns]) / spec.headroom
    assert torch.equal(q.dequantize(), want)
    assert torch.equal(q.dequantize(torch.bfloat16), want.bfloat16())
    # half a step of the widest binade, a whole one when stochastic, relative to the tile's amax in units of M; the
    # floor rule may clip up to 1 - M / 2^(emax + 1) of the amax
    fmt = FORMATS[spec.format]
    step = 2.0 ** (fmt.max_exponent - fmt.mantissa_bits) / 2.0**fmt.max_exponent
    clipped = 1 - fmt.max / 2.0 ** (fmt.max_exponent + 1) if spec.scale_rule == "floor" else 0.0
    amax = x.float().abs().max()
    factor = 1.0 if spec.rounding == "stochastic" else 0.5
    factor *= 1.0 + 2.0**-4 * (spec.scale_format in CODED_SCALE_FORMATS)  # scales of three mantissa bits
    assert float((q.dequantize() - x.float()).abs().max()) <= float(amax) * max(factor * step / spec.headroom, clipped)


@all_specs
@pytest.mark.parametrize("axis", [0, 1, 2, -2])
def test_axis_is_the_one_that_tiles_run_along(spec: QuantSpec, axis: int, generator: torch.Generator) -> None:
    x = torch.randn(6, 64, 40, generator=generator)
    q = quantize(x, spec, axis=axis, random=STREAM)
    last = x.movedim(axis, -1)
    matrix = quantize(last.reshape(-1, last.shape[-1]), spec, random=STREAM)
    assert q.codes.shape == x.shape
    assert torch.equal(q.codes.movedim(axis, -1).reshape(matrix.codes.shape), matrix.codes)
    assert torch.equal(q.dequantize().movedim(axis, -1).reshape(matrix.codes.shape), matrix.dequantize())
    if spec.block is not None and spec.block[0] == 1:
        blocks = -(-x.shape[axis] // spec.block[1])
        assert q.scale.shape[axis] == blocks
        assert torch.equal(q.scale.movedim(axis, -1).reshape(-1, blocks), matrix.scale)


def test_a_transposed_view_is_quantized_as_its_copy(generator: torch.Generator) -> None:
    x = torch.randn(96, 160, generator=generator)
    for spec in (MXFP8, FP8_CURRENT, FP8_ROW, FP8_1X128, FP8_128X128):
        view, copy = quantize(x.t(), spec), quantize(x.t().contiguous(), spec)
        assert torch.equal(view.codes, copy.codes)
        assert torch.equal(view.scale, copy.scale)
        assert torch.equal(quantize(x, spec, axis=0).dequantize(), copy.dequantize().t())


def test_one_dimension(generator: torch.Generator) -> None:
    x = torch.randn(70, generator=generator)
    q = quantize(x, MXFP8)
    assert q.codes.shape == (70,)
    assert q.scale.shape == (3,)
    assert torch.equal(q.dequantize(), quantize(x.unsqueeze(0), MXFP8).dequantize()[0])


def test_source_is_not_changed(generator: torch.Generator) -> None:
    x = torch.randn(33, 64, generator=generator)
    before = x.clone()
    for spec in specs_of_recipes():
        quantize(x, spec, random=STREAM)
    assert torch.equal(x, before)


def test_packed_codes_hold_two_a_byte(generator: torch.Generator) -> None:
    x = torch.randn(5, 64, generator=generator)
    q = quantize(x, MXFP4)
    assert q.packed_codes.shape == (5, 32)
    assert torch.equal(q.packed_codes & 15, q.codes[:, ::2])
    assert torch.equal(q.packed_codes >> 4, q.codes[:, 1::2])


def test_packing_is_refused_for_wide_codes_and_odd_rows() -> None:
    with pytest.raises(ValueError, match="got e4m3, 64"):
        _ = quantize(torch.ones(2, 64), MXFP8).packed_codes
    with pytest.raises(ValueError, match="got e2m1, 33"):
        _ = quantize(torch.ones(2, 33), MXFP4).packed_codes


@pytest.mark.parametrize("spec", [MXFP4, MXFP4_SR, MXFP8_OCP, FP8_1X128, FP8_CURRENT], ids=spec_id)
def test_from_codes_gives_the_tensor_back(spec: QuantSpec, generator: torch.Generator) -> None:
    q = quantize(torch.randn(6, 160, generator=generator), spec, random=STREAM)
    again = QuantizedTensor.from_codes(q.codes, q.scale, spec)
    assert torch.equal(again.dequantize(), q.dequantize())
    assert torch.equal(again.codes, q.codes)


# ---- randomness
def test_stochastic_rounding_without_randomness_is_refused() -> None:
    with pytest.raises(UserError, match=r"pass random=RandomStream\(key=\(7, 0\)\)"):
        quantize(torch.ones(1, 32), MXFP4_SR)
    quantize(torch.ones(1, 32), MXFP4_SR, random=RandomStream(key=(7, 0)))


@pytest.mark.parametrize("key", [7, (7,), (7, -1), (7, 1 << 32), (7.0, 0), None])
def test_a_key_is_two_words(key: Any) -> None:
    with pytest.raises(UserError, match="such as key="):
        RandomStream(key=key)


@pytest.mark.parametrize("shape", [(4, 0), (0,), (0, 0)])
def test_an_axis_without_entries_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="which has no entries along axis -1"):
        quantize(torch.ones(shape), MXFP8)


@pytest.mark.parametrize("spec", [None, "mxfp8", get_recipe("mxfp8").fprop], ids=["None", "name", "GEMM"])
def test_another_type_of_spec_is_refused(spec: Any) -> None:
    with pytest.raises(UserError, match="as spec: give a QuantSpec"):
        quantize(torch.ones(1, 32), spec)


def test_nearest_rounding_ignores_randomness(generator: torch.Generator) -> None:
    x = torch.randn(4, 64, generator=generator)
    assert torch.equal(quantize(x, MXFP4, random=STREAM).codes, quantize(x, MXFP4).codes)


def test_a_stream_is_its_draws(generator: torch.Generator) -> None:
    x = torch.randn(40, 64, generator=generator)
    u = STREAM.uniform(64, 16, x.device)(slice(0, 40))
    assert torch.equal(quantize(x, MXFP4_SR, random=STREAM).codes, quantize(x, MXFP4_SR, random=u).codes)
    turned = quantize(x.t(), MXFP4_SR, axis=0, random=u.t())
    assert torch.equal(turned.codes.t(), quantize(x, MXFP4_SR, random=u).codes)


def test_same_moment_same_bits_other_moment_other_bits(generator: torch.Generator) -> None:
    x = torch.randn(40, 64, generator=generator)

    def codes(rng_step: RngStep) -> torch.Tensor:
        return quantize(x, MXFP4_SR, random=STREAM.at(rng_step)).codes

    assert torch.equal(codes(RngStep(1, 0)), codes(RngStep(1, 0)))
    assert not torch.equal(codes(RngStep(1, 0)), codes(RngStep(2, 0)))
    assert not torch.equal(codes(RngStep(1, 0)), codes(RngStep(1, 1)))


def test_random_bits_are_obeyed(generator: torch.Generator) -> None:
    x = torch.randn(40, 64, generator=generator)
    u = (STREAM.uniform(64, 16, x.device)(slice(0, 40)) * 2).floor() / 2 + 0.25  # one bit: 1/4 or 3/4
    one_bit = replace(MXFP4_SR, random_bits=1)
    assert torch.equal(quantize(x, one_bit, random=STREAM).codes, quantize(x, MXFP4_SR, random=u).codes)
    assert not torch.equal(quantize(x, one_bit, random=STREAM).codes, quantize(x, MXFP4_SR, random=STREAM).codes)


# ---- specs that a recipe may ask for and none of ours does
@pytest.mark.parametrize("rule", ["floor", "round_up", "ceil", "even"])
@pytest.mark.parametrize("tile", ["tensor", "row"])
def test_power_of_two_scales_of_whole_rows_and_tensors(tile: str, rule: str, generator: torch.Generator) -> None:
    """Either refused by the schema, or E8M0 bytes: never fp32 scales under the name of E8M0."""
    try:
        spec = QuantSpec("e4m3", granularity=tile, scale_format="e8m0", scale_rule=rule)  # type: ignore[arg-type]
    except UserError:
        return
    x = torch.randn(4, 64, generator=generator)
    q = quantize(x, spec)
    assert q.scale.dtype == torch.uint8
    blocks = quantize(x, replace(spec, granularity="4x64" if tile == "tensor" else "1x64"))
    assert torch.equal(q.dequantize(), blocks.dequantize())


@pytest.mark.parametrize("current", [FP8_CURRENT, NVFP4])
@pytest.mark.parametrize("margin", [0, 2])
def test_delayed_is_current_for_a_tensor_by_itself(current: QuantSpec, margin: int, generator: torch.Generator) -> None:
    x = torch.randn(4, 64, generator=generator)
    got, want = quantize(x, replace(current, scaling="delayed", margin=margin)), quantize(x, current)
    assert torch.equal(got.scale, want.scale)
    assert torch.equal(got.dequantize(), want.dequantize())


@all_specs
def test_no_rows(spec: QuantSpec) -> None:
    q = quantize(torch.zeros(0, 64), spec, random=STREAM)
    assert q.codes.shape == (0, 64)
    assert q.dequantize().shape == (0, 64)


@all_specs
def test_zeros_stay_zeros_with_their_sign(spec: QuantSpec) -> None:
    x = torch.zeros(2, 64)
    x[:, ::2] = -0.0
    got = quantize(x, spec, random=STREAM).dequantize()
    assert torch.equal(got, x)
    assert torch.equal(got.signbit(), x.signbit())


def test_a_parameter_is_quantized_outside_of_autograd(generator: torch.Generator) -> None:
    """Rounding has no gradient of use: a graph here would keep the source alive and flow zeros into it."""
    q = quantize(torch.nn.Parameter(torch.randn(4, 64, generator=generator)), MXFP8)
    assert not q.elements.requires_grad
    assert not q.dequantize().requires_grad


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.ones(4, 64), {"axis": 3}, "quantize got axis 3, but the tensor has 2 dimensions, numbered from 0"),
        (torch.ones(4, 64), {"axis": -3}, "quantize got axis -3"),
        (torch.ones(4, 64), {"axis": None}, "quantize got axis None"),
        (
            torch.ones(4, 64).to(torch.float8_e4m3fn),
            {},
            "of 16 bits or more, got torch.float8_e4m3fn: convert it first",
        ),
        (torch.ones(4, 64), {"random": torch.zeros(64)}, "draws of shape (64,) for a tensor of (4, 64)"),
        (torch.ones(4, 64), {"random": torch.zeros(64, 4)}, "draws of shape (64, 4) for a tensor of (4, 64)"),
        (torch.ones(4, 64), {"random": torch.Generator()}, "quantize got a Generator as random: give a RandomStream"),
    ],
)
def test_what_quantize_does_not_take_is_refused(x: torch.Tensor, options: dict[str, Any], message: str) -> None:
    with refused(message):
        quantize(x, MXFP4_SR, **{"random": STREAM, **options})


@pytest.mark.parametrize("group", [None, 0, 8, 17, 24, -128, 32.0])
def test_groups_of_a_correction_are_whole_blocks(group: Any) -> None:
    spec = get_recipe("quartet2").dgrad.grad_output
    assert spec is not None
    with refused(f"correction eden was asked with group {group}, but "):
        quantize(torch.ones(4, 64), spec, random=STREAM, group=group)
    quantize(torch.ones(4, 64), spec, random=STREAM, group=48)
