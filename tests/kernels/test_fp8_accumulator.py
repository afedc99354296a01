"""The accumulator of Hopper's tensor cores on cases computed by hand; tests/golden has MMA-Sim's sums."""

import math

import pytest
import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.gemm import fp8_accumulator
from megatron_lowprec.kernels.gemm.fp8_accumulator import HOPPER, Fp8Accumulator, fp8_product
from megatron_lowprec.kernels.gemm.reference import gemm
from megatron_lowprec.kernels.quantize.reference import round_to_format

E4M3, E5M2 = FORMATS["e4m3"], FORMATS["e5m2"]
BIG = (256.0, 64.0)  # a product of 2^14, so that the unit of 13 fraction bits is 2


def total(*terms: tuple[float, float], accumulator: Fp8Accumulator = HOPPER) -> float:
    a, b = torch.tensor(terms).t().unsqueeze(1)
    return float(fp8_product(a, b, E4M3, E4M3, accumulator))


def repeated(term: tuple[float, float], count: int) -> list[tuple[float, float]]:
    return [term] * count


@pytest.mark.parametrize(
    ("terms", "found"),
    [
        ([(256.0, 32.0), (1.0, 1.0)], 8193.0),  # 2^13 + 1 has 13 fraction bits
        ([BIG, (1.0, 1.0)], 16384.0),
        ([BIG, *repeated((1.0, 1.0), 31)], 16384.0),  # each addend is cut before the sum
        ([BIG, (3.0, 1.0)], 16386.0),
        ([(-256.0, 64.0), (-3.0, 1.0)], -16386.0),
        ([BIG, (3.0, 1.0), (-3.0, 1.0)], 16384.0),
        ([BIG, (-256.0, 64.0), (1.0, 1.0)], 0.0),  # what was cut does not come back
        ([(0.0, 0.0)], 0.0),
    ],
)
def test_addends_lose_the_bits_below_the_unit_of_the_largest(terms: list[tuple[float, float]], found: float) -> None:
    assert total(*terms) == found


def test_alignment_is_to_the_sum_of_the_exponents() -> None:
    """1.75^2 = 3.0625 aligns as a number in [1, 2), so two terms of 2^-13 count; in the sum's own unit one is lost."""
    tiny = (2.0**-6, 2.0**-7)
    assert total((1.75, 1.75), tiny, tiny) == 3.0625 + 2.0**-12
    assert total((1.75, 1.75), tiny) == 3.0625


def test_subnormal_numbers_align_by_the_smallest_exponent() -> None:
    """2^-9 has E4M3's exponent -6: with 2^-6 * 1 as the largest, the unit is 2^-19."""
    assert total((2.0**-9, 1.0), (2.0**-9, 2.0**-9)) == 2.0**-9 + 2.0**-18
    assert total((2.0**-9, 1.0), (2.0**-9, 2.0**-9), accumulator=Fp8Accumulator(fraction_bits=11)) == 2.0**-9


def test_order_over_groups() -> None:
    ones = repeated((1.0, 1.0), 32)
    assert total(*ones, BIG) == 16416.0
    assert total(BIG, *repeated((0.0, 1.0), 31), *ones) == 16384.0
    assert total(BIG, *ones, accumulator=Fp8Accumulator(group=1)) == 16384.0
    assert total(*ones, BIG, accumulator=Fp8Accumulator(group=64)) == 16384.0


def test_promotion_into_fp32() -> None:
    terms = [BIG, *repeated((0.0, 1.0), 31), *repeated((1.0, 1.0), 33)]
    assert total(*terms, accumulator=Fp8Accumulator(promote=32)) == 16384.0 + 33.0
    assert total(*terms, accumulator=Fp8Accumulator(promote=16)) == 16384.0 + 33.0
    assert total(*terms, accumulator=Fp8Accumulator(promote=64)) == 16384.0 + 1.0


@pytest.mark.parametrize(
    ("dropping", "found"),
    [("truncate", (16386.0, -16386.0)), ("floor", (16386.0, -16388.0)), ("nearest_even", (16388.0, -16388.0))],
)
def test_dropping(dropping: fp8_accumulator.Dropping, found: tuple[float, float]) -> None:
    accumulator = Fp8Accumulator(dropping=dropping)
    assert (
        total(BIG, (3.0, 1.0), accumulator=accumulator),
        total((-256.0, 64.0), (-3.0, 1.0), accumulator=accumulator),
    ) == found


def test_wide_sums_are_exact_and_wider_ones_refused() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(0, 9, (5, 96), generator=generator).float() for _ in range(2))
    assert torch.equal(fp8_product(a, b, E4M3, E4M3, Fp8Accumulator(fraction_bits=16)), a @ b.t())
    with pytest.raises(ValueError, match="32 terms of 17 fraction bits sum to 25 bits"):
        Fp8Accumulator(fraction_bits=17)


def test_inf_and_nan_are_those_of_the_plain_product() -> None:
    a = torch.tensor([[math.inf, 1.0], [1.0, math.nan], [1.0, 2.0]])
    b = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    found = fp8_product(a, b, E5M2, E5M2)
    assert found[0].tolist() == [math.inf, -math.inf]
    assert bool(found[1].isnan().all())
    assert found[2].tolist() == [3.0, 1.0]


def test_chunks_and_partial_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = (round_to_format(80 * torch.randn(n, 72, generator=generator), E4M3, "nearest_even") for n in (7, 5))
    whole = fp8_product(a, b, E4M3, E4M3)
    padded = (torch.nn.functional.pad(x, (0, 24)) for x in (a, b))
    assert torch.equal(fp8_product(*padded, E4M3, E4M3), whole)
    monkeypatch.setattr(fp8_accumulator, "_CHUNK", 200)
    assert torch.equal(fp8_product(a.bfloat16(), b.bfloat16(), E4M3, E4M3), whole)
    assert not torch.equal(whole, a @ b.t())
    assert fp8_product(a[:0], b, E4M3, E4M3).shape == (0, 5)
    assert fp8_product(a[:, :0], b[:, :0], E4M3, E4M3).count_nonzero() == 0


def test_a_gemm_scales_what_the_product_sums() -> None:
    a, b = torch.tensor([[256.0, 1.0]]), torch.tensor([[64.0, 1.0], [1.0, 1.0]])
    scales = {"a_scale": torch.tensor([[2.0]]), "b_scale": torch.tensor([[1.0], [4.0]])}
    found = gemm(a, b, **scales, out_dtype=torch.float32, product=lambda x, y: fp8_product(x, y, E4M3, E4M3))
    assert found.tolist() == [[32768.0, 2056.0]]
