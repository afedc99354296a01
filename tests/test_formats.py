"""Every code point of every format, against a definition in exact rational arithmetic."""

from fractions import Fraction

import pytest
import torch

from megatron_lowprec.formats import E8M0_BIAS, E8M0_NAN, FORMATS, Format
from megatron_lowprec.kernels.format_dtypes import DTYPES
from megatron_lowprec.kernels.quantize.reference import (
    decode,
    e8m0_decode_scale,
    e8m0_encode_scale,
    encode,
    round_to_format,
)
from tests.kernels.exact import exact_value

# from the specifications, not from the rows: (largest, smallest normal, smallest subnormal, bits)
TABLE = {
    "e4m3": (448, Fraction(1, 2**6), Fraction(1, 2**9), 8),
    "e5m2": (57344, Fraction(1, 2**14), Fraction(1, 2**16), 8),
    "e2m3": (Fraction(15, 2), 1, Fraction(1, 8), 6),
    "e3m2": (28, Fraction(1, 4), Fraction(1, 16), 6),
    "e2m1": (6, 1, Fraction(1, 2), 4),
    "e1m2": (Fraction(7, 4), 1, Fraction(1, 4), 4),
    "ue4m3": (448, Fraction(1, 2**6), Fraction(1, 2**9), 7),
    "ue5m3": (61440, Fraction(1, 2**14), Fraction(1, 2**17), 8),
    "e5m6": (65024, Fraction(1, 2**14), Fraction(1, 2**20), 12),
}
TORCH_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}  # not from the rows

all_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def codes_of(fmt: Format) -> torch.Tensor:
    return torch.arange(1 << fmt.bits, dtype=torch.int32).to(torch.uint8 if fmt.bits <= 8 else torch.int16)


def test_formats_have_rows_in_the_table_of_this_test() -> None:
    assert set(TABLE) <= set(FORMATS)


@all_formats
def test_row_is_consistent_with_its_own_codes(fmt: Format) -> None:
    finite = [v for v in (exact_value(c, fmt) for c in range(1 << fmt.bits)) if isinstance(v, Fraction)]
    assert max(finite) == Fraction(fmt.max)
    assert 2**fmt.max_exponent <= Fraction(fmt.max) < 2 ** (fmt.max_exponent + 1)
    assert fmt.bits <= 12  # a code is a uint8 or an int16
    assert fmt.source


@pytest.mark.parametrize("name", TABLE)
def test_row_is_the_specifications(name: str) -> None:
    largest, min_normal, min_subnormal, bits = TABLE[name]
    fmt = FORMATS[name]
    assert (Fraction(fmt.max), fmt.bits) == (largest, bits)
    assert Fraction(2) ** fmt.min_exponent == min_normal
    assert exact_value(1, fmt) == min_subnormal


@all_formats
def test_decode_every_code(fmt: Format) -> None:
    got = decode(codes_of(fmt), fmt)
    assert got.dtype == torch.float32
    for code, value in enumerate(got.tolist()):
        want = exact_value(code, fmt)
        if want != want:
            assert value != value, code
        else:
            assert value == want, code
            assert (str(value)[0] == "-") == bool(fmt.signed and code >> (fmt.bits - 1)), f"sign of code {code}"


def test_rows_name_torchs_dtypes() -> None:
    assert DTYPES == TORCH_DTYPES


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_decode_every_code_as_torch(name: str) -> None:
    codes = codes_of(FORMATS[name])
    torch.testing.assert_close(
        decode(codes, FORMATS[name]), codes.view(TORCH_DTYPES[name]).float(), rtol=0, atol=0, equal_nan=True
    )


@all_formats
def test_encode_gives_every_finite_code_back(fmt: Format) -> None:
    codes = codes_of(fmt)
    values = decode(codes, fmt)
    finite = values.isfinite()
    assert torch.equal(encode(values, fmt)[finite], codes[finite])


@all_formats
def test_encode_gives_the_codes_of_inf_back(fmt: Format) -> None:
    codes = codes_of(fmt)[decode(codes_of(fmt), fmt).isinf()]
    assert codes.numel() == (1 + fmt.signed if fmt.specials == "ieee" else 0)
    assert torch.equal(encode(decode(codes, fmt), fmt), codes)


@all_formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_finite_values_are_exact_in_16_bits(fmt: Format, dtype: torch.dtype) -> None:
    """Emulated operands hold elements in the compute dtype."""
    values = decode(codes_of(fmt), fmt)
    values = values[values.isfinite()]
    assert torch.equal(values.to(dtype).float(), values)
    assert torch.equal(encode(values.to(dtype), fmt), encode(values, fmt))


@all_formats
def test_nan_is_the_formats_nan_or_zero_where_it_has_none(fmt: Format) -> None:
    code = encode(torch.tensor([torch.nan]), fmt)
    if fmt.specials == "none":
        assert code.item() == 0
    else:
        assert decode(code, fmt).isnan().all()


@all_formats
@pytest.mark.parametrize("rounding", ["nearest_even", "half_away"])
def test_values_of_the_format_round_to_themselves(fmt: Format, rounding: str) -> None:
    values = decode(codes_of(fmt), fmt)
    values = values[values.isfinite()]
    rounded = round_to_format(values, fmt, rounding)
    assert torch.equal(rounded, values)
    assert torch.equal(rounded.signbit(), values.signbit())


@all_formats
@pytest.mark.parametrize("u", [0.0, 2.0**-17, 1.0 - 2.0**-17])
def test_no_draw_moves_a_value_of_the_format(fmt: Format, u: float) -> None:
    # 2^-17 and 1 - 2^-17 are the least and the largest of 16-bit draws
    values = decode(codes_of(fmt), fmt)
    values = values[values.isfinite()]
    assert torch.equal(round_to_format(values, fmt, "stochastic", torch.full_like(values, u)), values)


def test_e8m0_every_byte() -> None:
    bytes_ = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    decoded, encoded = e8m0_decode_scale(bytes_), e8m0_encode_scale(bytes_)
    for byte in range(255):
        assert Fraction(decoded[byte].item()) == Fraction(2) ** (byte - E8M0_BIAS), byte
        assert Fraction(encoded[byte].item()) == Fraction(2) ** (E8M0_BIAS - byte), byte
    assert E8M0_NAN == 255
    assert decoded[255].isnan()
    assert encoded[255].isnan()
