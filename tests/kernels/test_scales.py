"""Scales against exact rational arithmetic, and operands of every layout, shape and dtype tile by tile."""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from megatron_lowprec.formats import E8M0_NAN, ELEMENT_FORMATS, FORMATS, Format
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.quantize.coded_scale import CodedOptions
from megatron_lowprec.kernels.quantize.reference import (
    block_amax,
    coded_scale,
    e8m0_decode_scale,
    e8m0_encode_scale,
    e8m0_scale,
    fp32_encode_scale,
    quantize_operand,
    round_to_format,
    tensor_scale,
)
from megatron_lowprec.scaling import CODED_SCALE_FORMATS, scale_rules
from tests.kernels.exact import ceil_log2, floor_log2, nearest, to_fp32

all_formats = pytest.mark.parametrize("fmt", ELEMENT_FORMATS.values(), ids=ELEMENT_FORMATS)
FLT_MAX = 3.4028234663852886e38
TILES = [(1, 32), (1, 128), (128, 128), (32, 32), (2, 3)]


def with_neighbours(values: torch.Tensor, ulps: int) -> torch.Tensor:
    """Positive fp32 numbers and those up to ``ulps`` beside them, positive and finite ones only."""
    bits = values.view(torch.int32).unsqueeze(1) + torch.arange(-ulps, ulps + 1, dtype=torch.int32)
    near = bits.view(torch.float32).flatten()
    return near[(near > 0) & near.isfinite()].unique()


def amaxes(fmt: Format) -> torch.Tensor:
    """Powers of two over all of fp32 and M times them, with neighbours: where every rule changes its mind."""
    powers = torch.ldexp(torch.ones(277), torch.arange(-149, 128)).double()
    edges = torch.cat((powers, powers * fmt.max, powers * (2 - 2.0 ** -(fmt.mantissa_bits + 1)))).float()
    return with_neighbours(edges[edges.isfinite()], 3)


def exact_byte(amax: Fraction, fmt: Format, rule: str) -> int:
    if rule == "floor":
        exponent = floor_log2(amax) - fmt.max_exponent
    elif rule == "ceil":
        exponent = ceil_log2(amax) - fmt.max_exponent
    elif rule == "even":  # half up to the element's mantissa
        half = Fraction(2) ** (floor_log2(amax) - fmt.mantissa_bits - 1)
        exponent = floor_log2(amax + half) - fmt.max_exponent
    elif rule == "round_up":
        # the quotient is an fp32 number: that matters only where it is subnormal, and is what all peers compute
        quotient = amax / Fraction(fmt.max)
        if quotient < Fraction(2) ** -126:
            quotient = to_fp32(quotient)
        exponent = ceil_log2(quotient) if quotient else -127
    else:
        pytest.fail(f"no exact definition of {rule}: add it here")
    return max(-127, min(127, exponent)) + 127


# ---- scales of tiles
@all_formats
@pytest.mark.parametrize("rule", scale_rules("e8m0"))
def test_e8m0_scale_is_exact(fmt: Format, rule: str) -> None:
    amax = amaxes(fmt)
    got = e8m0_scale(amax, fmt, rule)
    assert got.dtype == torch.uint8
    want = torch.tensor([exact_byte(Fraction(a), fmt, rule) for a in amax.tolist()], dtype=torch.uint8)
    assert amax[got != want].tolist() == []
    assert len(amax) > 1500  # 277 powers, three families, neighbours: the list above was not emptied by accident


@all_formats
@pytest.mark.parametrize("rule", scale_rules("e8m0"))
def test_e8m0_scale_of_zero_and_nonfinite(fmt: Format, rule: str) -> None:
    got = e8m0_scale(torch.tensor([0.0, torch.nan, torch.inf, -torch.nan]), fmt, rule)
    assert got.tolist() == [0, E8M0_NAN, E8M0_NAN, E8M0_NAN]


@all_formats
def test_round_up_never_saturates_and_is_tight(fmt: Format) -> None:
    amax = amaxes(fmt)
    amax = amax[(amax / fmt.max >= 2.0**-126) & (amax <= 2.0**127)]
    byte = e8m0_scale(amax, fmt, "round_up")
    scaled = amax.double() * torch.ldexp(torch.ones_like(amax, dtype=torch.float64), 127 - byte.int())
    assert bool((scaled <= fmt.max).all())
    assert bool((scaled > fmt.max / 2).all())


@all_formats
def test_floor_puts_amax_in_the_top_binade(fmt: Format) -> None:
    amax = amaxes(fmt)
    amax = amax[amax >= 2.0**-100]
    byte = e8m0_scale(amax, fmt, "floor")
    scaled = amax.double() * torch.ldexp(torch.ones_like(amax, dtype=torch.float64), 127 - byte.int())
    assert bool(((scaled >= 2.0**fmt.max_exponent) & (scaled < 2.0 ** (fmt.max_exponent + 1))).all())


@all_formats
@pytest.mark.parametrize("margin", [0, 1, 3])
@pytest.mark.parametrize("rule", scale_rules("fp32"))
def test_fp32_encode_scale_is_the_correctly_rounded_quotient(
    fmt: Format, rule: str, margin: int, generator: torch.Generator
) -> None:
    random = torch.exp2(torch.empty(500).uniform_(-60, 60, generator=generator))
    amax = torch.cat((amaxes(fmt)[::7], random))
    got = fp32_encode_scale(amax, fmt, rule, margin=margin)
    for a, scale in zip(amax.tolist(), got.tolist(), strict=True):
        want = to_fp32(Fraction(fmt.max) / 2**margin / Fraction(a))
        if rule == "amax_pow2":
            want = Fraction(2) ** floor_log2(want)
        elif rule != "amax":
            pytest.fail(f"no exact definition of {rule}: add it here")
        assert Fraction(scale) == max(want, Fraction(2) ** -127), a  # the least power with a reciprocal in fp32


@all_formats
def test_fp32_encode_scale_edges(fmt: Format) -> None:
    got = fp32_encode_scale(torch.tensor([0.0, 1e-45, torch.nan, torch.inf]), fmt, "amax")
    assert got[:2].tolist() == [1.0, FLT_MAX]  # no entry to scale; a quotient beyond fp32
    assert got[2:].isnan().all()


@all_formats
def test_a_margin_is_taken_off_before_the_quotient_saturates(fmt: Format) -> None:
    """As TransformerEngine's update: scaled_max = M / 2^margin, scale = scaled_max / amax, Inf becomes FLT_MAX."""
    amax = torch.tensor([fmt.max * 2.0**-129, fmt.max * 2.0**-131])
    assert fp32_encode_scale(amax, fmt, "amax", margin=2).tolist() == [2.0**127, FLT_MAX]


def test_reciprocal_times_maximum_would_be_wrong() -> None:
    """The trap of NUMERICS.md: 448 / amax as torch computes number / tensor. The test above must be able to see it."""
    amax = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.5
    wrong = torch.reciprocal(amax) * 448.0
    differs = wrong != fp32_encode_scale(amax, FORMATS["e4m3"], "amax")
    assert 0.1 < differs.float().mean() < 0.5  # about a quarter


@pytest.mark.parametrize("floor", [1e-12, 1e-4])
def test_amax_floor_applies_before_the_division(floor: float) -> None:
    fmt = FORMATS["e4m3"]
    got = fp32_encode_scale(torch.tensor([0.0, floor / 2, 1.0, torch.nan]), fmt, "amax", amax_floor=floor)
    want = float(to_fp32(Fraction(448) / Fraction(floor)))
    assert got[:3].tolist() == [want, want, 448.0]
    assert got[3].isnan()


@pytest.mark.parametrize("rule", scale_rules("e4m3"))
@pytest.mark.parametrize("scale_fmt", CODED_SCALE_FORMATS)
def test_coded_scale_is_exact(rule: str, scale_fmt: str, generator: torch.Generator) -> None:
    """Each operation is rounded to fp32, in the order of the rule's peer, and the value to its format."""
    fmt, codes, maps_to = FORMATS["e2m1"], FORMATS[scale_fmt], 6 / 1.0625
    amax = torch.cat((torch.rand(200, generator=generator).exp2(), torch.logspace(-9, 0, 100), torch.zeros(1)))
    whole, target = amax.max().view(1, 1), 448 * maps_to
    of_tensor = tensor_scale(whole, target, rule, largest=maps_to)
    options = CodedOptions(block_target=maps_to)
    value, encoder = coded_scale(amax.view(-1, 1), fmt, codes, rule, of_tensor, options=options)
    largest, peak, one = to_fp32(Fraction(maps_to)), to_fp32(Fraction(target)), Fraction(1)
    exact_whole, exact = Fraction(whole.item()), list(map(Fraction, amax.tolist()))
    if rule in ("product", "base"):
        grow = to_fp32(peak / exact_whole)
        shrink, inverse = to_fp32(one / grow), to_fp32(grow * to_fp32(one / largest))
        scaled = [to_fp32(a * inverse) if rule == "product" else to_fp32(to_fp32(a / largest) * grow) for a in exact]
    else:
        shrink = to_fp32(exact_whole / peak)
        if rule == "divided":
            shrink = to_fp32(to_fp32(exact_whole / 448) / largest)
        grow = to_fp32(one / shrink)
        scaled = [to_fp32(to_fp32(a / largest) / shrink) for a in exact]
    assert (Fraction(of_tensor.encode.item()), Fraction(of_tensor.decode.item())) == (grow, shrink)
    want = nearest(torch.tensor([float(each) for each in scaled]), codes, "nearest_even")
    assert torch.equal(value.flatten().double(), want)
    for exact_value, got in zip(map(Fraction, want.tolist()), map(Fraction, encoder.flatten().tolist()), strict=True):
        if exact_value == 0:
            assert got == Fraction(torch.finfo(torch.float32).max)
        elif rule == "quotient":
            assert got == to_fp32(grow / exact_value)
        else:
            assert got == to_fp32(one / to_fp32(exact_value * shrink))


# ---- amax
@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (130, 257), (2, 32), (5, 128)])
@pytest.mark.parametrize("tile", TILES)
def test_block_amax_of_partial_tiles(shape: tuple[int, int], tile: tuple[int, int], generator: torch.Generator) -> None:
    x = torch.randn(shape, generator=generator)
    got = block_amax(x, tile)
    rows, columns = -(-shape[0] // tile[0]), -(-shape[1] // tile[1])
    assert got.shape == (rows, columns)
    for r in range(rows):
        for c in range(columns):
            part = x[r * tile[0] : (r + 1) * tile[0], c * tile[1] : (c + 1) * tile[1]]
            assert got[r, c].item() == max(abs(v) for v in part.flatten().tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_reaches_its_own_tile_alone(dtype: torch.dtype) -> None:
    x = torch.ones(4, 70, dtype=dtype)
    x[1, 40] = torch.nan
    x[3, 69] = torch.inf
    got = block_amax(x, (1, 32))
    assert got.dtype == torch.float32
    assert got.isnan().nonzero().tolist() == [[1, 1]]
    assert got.isinf().nonzero().tolist() == [[3, 2]]
    assert int((got == 1.0).sum()) == 10


# ---- operands
def quantize_by_tiles(
    x: torch.Tensor, fmt: Format, tile: tuple[int, int], scale_of: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Elements of the operand, each tile by itself, rounded by search in the table."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for r in range(0, x.shape[0], tile[0]):
        for c in range(0, x.shape[1], tile[1]):
            part = x[r : r + tile[0], c : c + tile[1]].float()
            out[r : r + tile[0], c : c + tile[1]] = nearest(part * scale_of(part.abs().max()), fmt, "nearest_even")
    return out


@all_formats
@pytest.mark.parametrize(
    ("shape", "tile"),
    # 130 x 257 is more than a chunk of 2^15 entries
    [(shape, tile) for shape in ((1, 1), (3, 33)) for tile in TILES] + [((130, 257), tile) for tile in TILES[1:4]],
)
@pytest.mark.parametrize("scales", [("e8m0", "floor"), ("e8m0", "round_up"), ("fp32", "amax"), ("fp32", "amax_pow2")])
def test_operand_tile_by_tile(
    fmt: Format, shape: tuple[int, int], tile: tuple[int, int], scales: tuple[str, str], generator: torch.Generator
) -> None:
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-20, 20, (shape[0], 1), generator=generator))
    elements, scale = quantize_operand(x, fmt, tile, scale_format=scales[0], scale_rule=scales[1])

    def scale_of(amax: torch.Tensor) -> torch.Tensor:
        if scales[0] == "e8m0":
            return e8m0_encode_scale(e8m0_scale(amax, fmt, scales[1]))
        return fp32_encode_scale(amax, fmt, scales[1])

    assert scale.shape == (-(-shape[0] // tile[0]), -(-shape[1] // tile[1]))
    assert scale.dtype == (torch.uint8 if scales[0] == "e8m0" else torch.float32)
    assert torch.equal(elements.double(), quantize_by_tiles(x, fmt, tile, scale_of))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", [(1, 32), (128, 128)])
@pytest.mark.parametrize("scales", [("e8m0", "floor"), ("fp32", "amax")])
def test_narrow_inputs_are_computed_in_fp32(
    dtype: torch.dtype, tile: tuple[int, int], scales: tuple[str, str], generator: torch.Generator
) -> None:
    x = torch.randn(140, 96, generator=generator).to(dtype)
    narrow, scale = quantize_operand(x, FORMATS["e4m3"], tile, scale_format=scales[0], scale_rule=scales[1])
    wide, wide_scale = quantize_operand(x.float(), FORMATS["e4m3"], tile, scale_format=scales[0], scale_rule=scales[1])
    assert narrow.dtype == dtype
    assert torch.equal(narrow.float(), wide)
    assert torch.equal(scale, wide_scale)


@pytest.mark.parametrize("signs", [None, torch.ones(32)])
def test_strides_do_not_matter(signs: torch.Tensor | None, generator: torch.Generator) -> None:
    x = torch.randn(320, 224, generator=generator)
    options = {"scale_format": "e8m0", "scale_rule": "round_up", "signs": signs}
    want = quantize_operand(x, FORMATS["e4m3"], (1, 32), **options)
    wide = torch.randn(640, 448, generator=generator)
    wide[::2, ::2] = x
    for same in (x.t().contiguous().t(), wide[::2, ::2]):
        assert not same.is_contiguous()
        got = quantize_operand(same, FORMATS["e4m3"], (1, 32), **options)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize(("scale_format", "scale_rule"), [("e8m0", "floor"), ("fp32", "amax")])
def test_chunks_do_not_matter(scale_format: str, scale_rule: str, generator: torch.Generator) -> None:
    # 300 x 512 is 4.7 chunks of 2^15 entries, so the whole is worked in parts and each row by itself is not
    x = torch.randn(300, 512, generator=generator)
    signs = torch.sign(torch.randn(64, generator=generator))
    u = torch.rand(300, 512, generator=generator)

    def quantized(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_operand(
            x[rows],
            FORMATS["e2m1"],
            (1, 32),
            scale_format=scale_format,
            scale_rule=scale_rule,
            rounding="stochastic",
            headroom=0.75,
            signs=signs,
            uniform=lambda part: u[rows][part],
        )

    elements, scale = quantized(slice(0, 300))
    for row in range(300):
        alone, its_scale = quantized(slice(row, row + 1))
        assert torch.equal(elements[row], alone[0])
        assert torch.equal(scale[row], its_scale[0])


def test_hadamard_comes_before_scales_and_headroom_after(generator: torch.Generator) -> None:
    x, signs = torch.randn(4, 64, generator=generator), torch.sign(torch.randn(64, generator=generator))
    fmt = FORMATS["e2m1"]
    got, byte = quantize_operand(x, fmt, (1, 32), scale_format="e8m0", scale_rule="floor", headroom=0.75, signs=signs)
    y = hadamard_transform(x, signs)
    want_byte = e8m0_scale(block_amax(y, (1, 32)), fmt, "floor")  # from y, not from 3/4 y
    assert torch.equal(byte, want_byte)
    scaled = y.view(4, 2, 32) * e8m0_encode_scale(byte).unsqueeze(-1) * 0.75
    assert torch.equal(got, round_to_format(scaled.view(4, 64), fmt, "nearest_even"))


@pytest.mark.parametrize("scale", [("e8m0", "floor"), ("e8m0", "round_up"), ("fp32", "amax_pow2")])
@pytest.mark.parametrize("name", ELEMENT_FORMATS)
def test_dequantized_bf16_is_exact_with_powers_of_two(
    name: str, scale: tuple[str, str], generator: torch.Generator
) -> None:
    x = torch.randn(64, 64, generator=generator).bfloat16() * torch.exp2(torch.arange(-32, 32)).unsqueeze(1).bfloat16()
    kwargs = {"scale_format": scale[0], "scale_rule": scale[1]}
    elements, scales = quantize_operand(x, FORMATS[name], (1, 32), **kwargs)
    decoder = e8m0_decode_scale(scales) if scale[0] == "e8m0" else scales
    got, _ = quantize_operand(x, FORMATS[name], (1, 32), dequantize=True, **kwargs)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.double(), elements.double() * decoder.double().repeat_interleave(32, 1))


def test_nan_block_and_inf_block_are_nan_and_no_other(generator: torch.Generator) -> None:
    x = torch.randn(2, 96, generator=generator)
    x[0, 5], x[1, 70] = torch.nan, -torch.inf
    alone = (("e4m3", "product"), ("ue4m3", "base"), ("ue5m3", "quotient"))  # coded, without a scale above
    for scale_format, scale_rule in (("e8m0", "floor"), ("fp32", "amax"), *alone):
        got, _ = quantize_operand(
            x, FORMATS["e4m3"], (1, 32), scale_format=scale_format, scale_rule=scale_rule, dequantize=True
        )
        blocks = got.view(2, 3, 32).isnan()
        assert blocks.all(-1).nonzero().tolist() == [[0, 0], [1, 2]]
        assert blocks.any(-1).sum() == 2


def test_subnormal_and_largest_inputs(generator: torch.Generator) -> None:
    """Byte 0 is 2^-127, subnormal in fp32, and must not be flushed."""
    tiny = torch.full((1, 32), 2.0**-126)
    tiny[0, ::2] = -(2.0**-127)
    got, byte = quantize_operand(
        tiny, FORMATS["e2m1"], (1, 32), scale_format="e8m0", scale_rule="floor", dequantize=True
    )
    assert byte.item() == 0  # floor(log2 2^-126) - 2 = -128, saturated to -127
    assert torch.equal(got, tiny)
    huge = torch.full((1, 32), FLT_MAX)
    got, byte = quantize_operand(huge, FORMATS["e2m1"], (1, 32), scale_format="e8m0", scale_rule="floor")
    assert byte.item() == 254 - 2  # exponent 127 less emax 2
    assert got.unique().tolist() == [6.0]


@pytest.mark.parametrize("tile", [(1, 32), (128, 128)])
@pytest.mark.parametrize(("scale_format", "scale_rule"), [("e8m0", "floor"), ("fp32", "amax")])
def test_zero_rows(tile: tuple[int, int], scale_format: str, scale_rule: str) -> None:
    elements, scale = quantize_operand(
        torch.zeros(0, 64), FORMATS["e4m3"], tile, scale_format=scale_format, scale_rule=scale_rule
    )
    assert elements.shape == (0, 64)
    assert scale.shape == (0, -(-64 // tile[1]))


@pytest.mark.parametrize("tile", [(1, 32), (128, 128)])
def test_known_encode_scales_one_an_entry_of_tiles(tile: tuple[int, int], generator: torch.Generator) -> None:
    """What the scales would be anyway, handed in: the same elements, over several chunks."""
    x, fmt = torch.randn(300, 256, generator=generator), FORMATS["e4m3"]
    known = fp32_encode_scale(block_amax(x, tile), fmt, "amax")
    options = {"scale_format": "fp32", "scale_rule": "amax"}
    want, want_scale = quantize_operand(x, fmt, tile, **options)
    got, scale = quantize_operand(x, fmt, tile, encode_scale=known, **options)
    assert torch.equal(got, want)
    assert torch.equal(scale, want_scale)
