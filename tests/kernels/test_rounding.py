"""Element rounding against a search in the format's table of values, and stochastic rounding draw by draw."""

from fractions import Fraction

import pytest
import torch

from megatron_lowprec.formats import ELEMENT_FORMATS, FORMATS, Format
from megatron_lowprec.kernels.quantize.reference import round_to_format, uniform_from_bits
from tests.kernels.exact import magnitudes, nearest

all_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
signed_formats = pytest.mark.parametrize("fmt", ELEMENT_FORMATS.values(), ids=ELEMENT_FORMATS)
nearest_modes = pytest.mark.parametrize("rounding", ["nearest_even", "half_away"])


def step_by_ulps(x: torch.Tensor, ulps: int) -> torch.Tensor:
    """fp32 neighbours of positive numbers."""
    return (x.view(torch.int32) + ulps).view(torch.float32)


def interesting(fmt: Format, generator: torch.Generator) -> torch.Tensor:
    table = magnitudes(fmt).float()
    ties = ((magnitudes(fmt)[:-1] + magnitudes(fmt)[1:]) / 2).float()
    edges = torch.cat((table[1:], ties))
    around = torch.cat([step_by_ulps(edges, ulps) for ulps in (-2, -1, 0, 1, 2)])
    magnitude = torch.randn(20_000, generator=generator) * torch.exp2(
        torch.empty(20_000).uniform_(fmt.min_exponent - 12, fmt.max_exponent + 3, generator=generator)
    )
    smallest = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
    tiny = torch.tensor([0.0, 1e-45, 1.1e-38, smallest / 2, smallest / 4])  # 1e-45 is fp32's smallest subnormal
    # between the maximum and the next step that the exponent would have, beyond it, and fp32's own end
    huge = torch.tensor([fmt.max * 1.01, fmt.max * 1.26, fmt.max * 2, 3.4028235e38, torch.inf])
    x = torch.cat((around, magnitude, tiny, huge))
    return torch.cat((x, -x, torch.tensor([torch.nan]))) if fmt.signed else x.abs()


@all_formats
@nearest_modes
def test_nearest_is_the_nearest(fmt: Format, rounding: str, generator: torch.Generator) -> None:
    x = interesting(fmt, generator)
    got = round_to_format(x, fmt, rounding)
    want = nearest(x, fmt, rounding)
    assert got.dtype == torch.float32
    assert torch.equal(got.isnan(), x.isnan())
    different = ((got.double() != want) | (got.signbit() != want.signbit())) & ~x.isnan()
    assert x[different].tolist() == []


@all_formats
def test_ties_go_to_even_codes_or_away(fmt: Format) -> None:
    table = magnitudes(fmt)
    ties = ((table[:-1] + table[1:]) / 2).float()
    even = torch.arange(len(table)) % 2 == 0
    want_even = torch.where(even[:-1], table[:-1], table[1:]).float()
    assert torch.equal(round_to_format(ties, fmt, "nearest_even"), want_even)
    assert torch.equal(round_to_format(ties, fmt, "half_away"), table[1:].float())


@pytest.mark.parametrize("rounding", ["nearest_even", "half_away", "stochastic"])
@signed_formats
def test_saturation_zeros_and_nan(fmt: Format, rounding: str) -> None:
    x = torch.tensor([torch.inf, -torch.inf, fmt.max * 1.5, -3.4028235e38, 0.0, -0.0, torch.nan])
    # the largest 16-bit draw: what can round up does, and still nothing passes the maximum
    got = round_to_format(x, fmt, rounding, torch.full_like(x, 1 - 2.0**-17))
    assert got[:4].tolist() == [fmt.max, -fmt.max, fmt.max, -fmt.max]
    assert got[4:6].tolist() == [0.0, 0.0]
    assert got[4:6].signbit().tolist() == [False, True]
    assert got[6].isnan()


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS.values() if not fmt.signed], ids=str)
def test_a_format_without_sign_saturates_at_both_ends(fmt: Format) -> None:
    x = torch.tensor([torch.inf, -torch.inf, fmt.max * 1.5, -1.0, torch.nan])
    got = round_to_format(x, fmt, "nearest_even")
    assert got[:4].abs().tolist() == [fmt.max, 0.0, fmt.max, 0.0]
    assert got[4].isnan()


@nearest_modes
def test_small_negative_rounds_to_negative_zero(rounding: str) -> None:
    # 0.1 is below half of E2M1's smallest step, 0.25
    assert round_to_format(torch.tensor([-0.1]), FORMATS["e2m1"], rounding).signbit().item()


@all_formats
def test_input_is_not_changed(fmt: Format, generator: torch.Generator) -> None:
    x = interesting(fmt, generator)
    before = x.clone()
    for rounding in ("nearest_even", "half_away", "stochastic"):
        u = torch.rand(x.shape, generator=generator)
        kept = u.clone()
        round_to_format(x, fmt, rounding, u)
        assert torch.equal(x.nan_to_num(), before.nan_to_num())
        assert torch.equal(u, kept)


def fractions_between_neighbours(fmt: Format, generator: torch.Generator) -> torch.Tensor:
    """fp32 numbers between values of the format: dyadic fractions of a step, their fp32 neighbours, and random ones."""
    table = magnitudes(fmt)
    pairs = torch.randint(0, len(table) - 1, (40,), generator=generator)
    pairs[:4] = torch.tensor([0, 1, len(table) - 2, 2**fmt.mantissa_bits - 1])  # subnormal, top, end of the subnormals
    f = torch.rand(40, generator=generator, dtype=torch.float64)
    f[:16] = torch.tensor([2.0**-k for k in range(1, 9)] + [1 - 2.0**-k for k in range(1, 9)], dtype=torch.float64)
    f[16:22] = torch.tensor([2.0**-17, 2.0**-18, 1 - 2.0**-17, 3 * 2.0**-17, 2.0**-9, 2.0**-5])
    values = (table[pairs] + f * (table[pairs + 1] - table[pairs])).float()
    return torch.cat((values, step_by_ulps(values[:22], -1), step_by_ulps(values[:22], 1)))


def fraction_of_step(x: float, low: float, high: float, fmt: Format) -> Fraction:
    """Where x lies between its neighbours; subnormal magnitudes count to 2^-23 of the smallest normal, ties to even."""
    magnitude = Fraction(x)
    if magnitude < Fraction(2) ** fmt.min_exponent:
        grain = Fraction(2) ** (fmt.min_exponent - 23)
        magnitude = round(magnitude / grain) * grain
    return (magnitude - Fraction(low)) / (Fraction(high) - Fraction(low))


@all_formats
@pytest.mark.parametrize("random_bits", [1, 4, 8, 16])
def test_stochastic_rounding_over_all_draws(fmt: Format, random_bits: int, generator: torch.Generator) -> None:
    """Of the 2^b draws round(f 2^b) go up (ties up), so the mean is off by at most 2^-(b+1) of a step."""
    draws = torch.arange(1 << random_bits) << (16 - random_bits)
    draws = draws + torch.randint(0, 1 << (16 - random_bits), draws.shape, generator=generator)  # bits without effect
    u = uniform_from_bits(draws, random_bits)
    table = magnitudes(fmt)
    for x in fractions_between_neighbours(fmt, generator):
        above = int(torch.searchsorted(table, x.double(), right=True).clamp(max=len(table) - 1))
        low, high = table[above - 1].item(), table[above].item()
        for sign in (1.0, -1.0) if fmt.signed else (1.0,):
            got = round_to_format((sign * x).expand(u.shape), fmt, "stochastic", u)
            up = got == sign * high
            assert bool((up | (got == sign * low)).all()), x
            f = fraction_of_step(x.item(), low, high, fmt)
            expected = (f * (1 << random_bits) + Fraction(1, 2)).__floor__()
            assert int(up.sum()) == expected, (x, sign)
            assert abs(Fraction(int(up.sum()), 1 << random_bits) - f) <= Fraction(1, 1 << (random_bits + 1))
        # monotone: a larger draw never rounds down what a smaller one rounded up
        assert bool((got.abs().diff() >= 0).all())


@pytest.mark.parametrize("random_bits", range(1, 17))
def test_draws_are_centred_and_exact(random_bits: int) -> None:
    u = uniform_from_bits(torch.arange(1 << 16), random_bits)
    assert u.dtype == torch.float32
    want = [Fraction(2 * (r >> (16 - random_bits)) + 1, 2 << random_bits) for r in range(0, 1 << 16, 97)]
    assert [Fraction(value) for value in u[::97].tolist()] == want
    assert float(u.double().mean()) == 0.5
    assert u.min() > 0.0
    assert u.max() < 1.0


def test_stochastic_rounding_is_floor_of_v_plus_u(generator: torch.Generator) -> None:
    """The published form, with arbitrary fp32 draws, computed in float64; sums within 2^-24 of 1 are left out."""
    v = torch.rand(100_000, generator=generator) * 2  # E2M1's steps below 2 are 1/2
    u = torch.rand(100_000, generator=generator)
    total = v.double() * 2 + u.double()
    clear = (total - total.round()).abs() > 2.0**-23
    want = total.floor() / 2
    got = round_to_format(v, FORMATS["e2m1"], "stochastic", u)
    assert int(clear.sum()) > 99_000
    assert torch.equal(got.double()[clear], want[clear])


def test_stochastic_without_draws_is_refused() -> None:
    with pytest.raises(ValueError, match="uniform draws"):
        round_to_format(torch.ones(1), FORMATS["e2m1"], "stochastic")
