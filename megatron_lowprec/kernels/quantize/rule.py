"""MX quantization rules, and the constants of the kernels compiled for them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.kernel_cache import KernelCache
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.kernels.quantize.coded_scale import PLAIN, CodedOptions
from megatron_lowprec.scaling import SCALE_RULES

MX_BLOCKS = (16, 32, 64)
"""Sizes of the blocks along the contracted dimension that the MX kernel is tested with."""
ROUNDINGS = {"nearest_even": 0, "half_away": 1, "stochastic": 2}
ZERO_CODES = {"zero": 0, "flush": 1, "one": 2}
MEASURES = {None: 0, "mse": 1, "mae": 2, "abs_max": 3}


def converts_fp8(device: torch.device) -> bool:
    """Whether instructions convert between fp32 and FP8: GPUs of compute capability 8.9 and above."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def rules_that(attribute: str, scale_format: str = "e8m0") -> int:
    """Bit set of a scale format's rules with an attribute of ``ScaleRule``, by the rules' numbers."""
    rows = [row for row in SCALE_RULES.values() if scale_format in row.scale_formats]
    return sum(1 << row.number for row in rows if getattr(row, attribute))


class Direction(NamedTuple):
    """Arguments of one direction, rowwise or columnwise, of a quantization in blocks.

    Attributes:
        key: Philox key of stochastic rounding.
        signs: fp32 [g], aligned to 16 bytes, of +-1/sqrt(g) for the Hadamard transform, from
            ``hadamard.triton.scaled_signs``; None for no transform.
        amax: fp32, one entry: amax of the tensor, transformed, for a rule with a tensor scale; else None.
        scale_key: Philox key of the stochastic rounding of coded scales.
        lanes_first: as ``MxConstants.LANES_FIRST``; set by the kernel's wrapper.
    """

    key: Key = Key()
    signs: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    scale_key: Key = Key()
    lanes_first: bool = False


class CodedMatrix(NamedTuple):
    """A matrix [M, N] of fp32 values: E2M1 codes times the scale of their block, fl32(E4M3 code * tensor scale).

    Attributes:
        codes: uint8 [M, N / 2], contiguous, entry 2i in the low nibble.
        scale: uint8 [M, N / 16].
        tensor_scale: fp32 [1, 1].
    """

    codes: torch.Tensor
    scale: torch.Tensor
    tensor_scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N)."""
        return self.codes.shape[0], self.codes.shape[1] * 2


class MxCast(NamedTuple):
    """Data of [M, N] in blocks, rowwise, columnwise or both, contracted dimension last; None where not requested.

    Attributes:
        rowwise_data: [M, N] dequantized in the matrix's dtype; or codes, uint8 [M, N], two a byte for 4-bit formats,
            entry 2i in the low nibble.
        columnwise_data: dequantized, [N, M], M rounded up to whole groups if transformed, a transposed view; or codes
            [N, M rounded up to whole groups], row-major, padded with quantized zeros.
        rowwise_scale, columnwise_scale: codes of block scales, uint8 [R, K / rule.block]; only with codes.
        rowwise_tensor_scale, columnwise_tensor_scale: fp32 [1, 1], decode scale of the tensor; only with a target.
        beside: rowwise data in codes.
    """

    rowwise_data: torch.Tensor | None = None
    rowwise_scale: torch.Tensor | None = None
    columnwise_data: torch.Tensor | None = None
    columnwise_scale: torch.Tensor | None = None
    rowwise_tensor_scale: torch.Tensor | None = None
    columnwise_tensor_scale: torch.Tensor | None = None
    beside: CodedMatrix | None = None

    def direction(self, rowwise: bool) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Data, scale and tensor scale of one direction."""
        if rowwise:
            return self.rowwise_data, self.rowwise_scale, self.rowwise_tensor_scale
        return self.columnwise_data, self.columnwise_scale, self.columnwise_tensor_scale

    def transposed(self) -> "MxCast":
        """The cast of the transpose."""
        by_row, by_column, above = self[:2], self[2:4], self[4:6]
        return MxCast(*by_column, *by_row, *above[::-1])


class MxConstants(NamedTuple):
    """The constexpr ``MX`` of the kernel, passed as a whole to the functions that it calls. Numbers only.

    Names and order are part of the key of a cached tiling in ``kernels.tuning``; fields with defaults, of coded scales
    and of blocks of several rows, only where they differ from these.

    Attributes:
        PACKED: whether two bf16 numbers are read as a word.
        ALONG_ROWS, ALONG_COLUMNS: whether rowwise and columnwise data are written.
        BLOCK: consecutive entries that share a scale.
        GROUP: consecutive entries in a thread: the transform's block, or an MX block without a transform.
        HADAMARD: whether groups are transformed.
        MANTISSA, MIN_EXPONENT, MAX, MAX_EXPONENT: properties of the format.
        RULE: ``ScaleRule.number`` of the scale rule.
        ROUNDING: number of the rounding in ROUNDINGS.
        RANDOM_BITS: bits of a draw that stochastic rounding uses.
        HEADROOM: factor applied before rounding.
        CODE_BITS: bits of a code; 0 for dequantized operands.
        NAN_CODE: the format's NaN code; 0 if it has none.
        NATIVE: whether the GPU's conversion rounds; false in the interpreter.
        BLOCK_ROWS: rows that share a scale.
        PLAIN: bit set of directions without the other's transform: 1 for rows, 2 for columns.
        ROUNDS_TRANSFORM: whether transformed values are rounded to the operand's dtype.
        SCALE_MANTISSA: mantissa bits of a coded scale's format; 0 for E8M0.
        SCALE_MIN_EXPONENT, SCALE_MAX, SCALE_NAN_CODE: properties of that format.
        SCALE_ROUNDING: number of the rounding of scales in ROUNDINGS.
        LARGEST, INVERSE_LARGEST: the magnitude that a block's amax is mapped to under coded scales, and fl32(1 / it).
        ZERO_CODE, FOUR_OVER_SIX: numbers in ZERO_CODES and MEASURES.
        EDEN: whether each group of the transform has a correction.
        TARGET: amax of the scaled tensor, for a tensor scale; 0 for none.
        LANES_FIRST: whether sums over square blocks add the P entries of a row of [GROUP, P] first.
        WHOLE: whether the tensor's decode scale is multiplied into dequantized values.
        CODED: whether a ``CodedMatrix`` is read, along columns only.
        BESIDE: whether one is written beside dequantized rows.
    """

    PACKED: bool
    ALONG_ROWS: bool
    ALONG_COLUMNS: bool
    BLOCK: int
    GROUP: int
    HADAMARD: bool
    MANTISSA: int
    MIN_EXPONENT: int
    MAX: float
    MAX_EXPONENT: int
    RULE: int
    ROUNDING: int
    RANDOM_BITS: int
    HEADROOM: float
    CODE_BITS: int
    NAN_CODE: int
    NATIVE: bool
    BLOCK_ROWS: int = 1
    PLAIN: int = 0
    ROUNDS_TRANSFORM: bool = False
    SCALE_MANTISSA: int = 0
    SCALE_MIN_EXPONENT: int = 0
    SCALE_MAX: float = 0.0
    SCALE_NAN_CODE: int = 0
    SCALE_ROUNDING: int = 0
    LARGEST: float = 0.0
    INVERSE_LARGEST: float = 0.0
    ZERO_CODE: int = 0
    FOUR_OVER_SIX: int = 0
    EDEN: bool = False
    TARGET: float = 0.0
    LANES_FIRST: bool = False
    WHOLE: bool = False
    CODED: bool = False
    BESIDE: bool = False

    def tuning_name(self) -> str:
        """The constants in the key of a cached tiling."""
        return str({k: v for k, v in self._asdict().items() if v != self._field_defaults.get(k)})


@dataclass(frozen=True)
class MxRule(KernelCache):
    """Rule of a quantization in blocks, fields as in ``recipe.schema.QuantSpec``; the same for both directions.

    Attributes:
        block: entries along the contracted dimension that share a scale, a power of two from 8 up.
        block_rows: rows that share a scale: 1, or ``block`` of a square block, which both directions share.
        scale_fmt: format of coded scales; None for E8M0.
        target: amax of the scaled tensor, margin included, for a tensor scale; None for none.
        rounds_transform: ``HadamardSpec.output`` is "operand".
        scale_rounding: of coded scales.
        options: other fields of coded scales; the group of a correction is the transform's block.
    """

    fmt: Format
    scale_rule: str
    rounding: str = "nearest_even"
    random_bits: int = 16
    headroom: float = 1.0
    block: int = 32
    block_rows: int = 1
    scale_fmt: Format | None = None
    target: float | None = None
    rounds_transform: bool = False
    scale_rounding: str = "nearest_even"
    options: CodedOptions = PLAIN

    def constants(
        self,
        transform: int,
        rows: bool,
        columns: bool,
        packed: bool,
        codes: bool,
        converts: bool,
        plain: int = 0,
        lanes_first: bool = False,
        whole: bool = False,
        coded: bool = False,
        beside: bool = False,
    ) -> MxConstants:
        """Constants of the kernel that writes these outputs.

        Args:
            transform: block of the transform, a multiple of ``block``; 0 for none.
            converts: ``converts_fp8`` of the device.
            plain, lanes_first, whole, coded, beside: as in ``MxConstants``.
        """
        fmt, scale = self.fmt, self.scale_fmt
        of_scales: dict[str, Any] = {} if scale is None else self._constants_of_scales(scale)
        return MxConstants(
            PACKED=packed,
            ALONG_ROWS=rows,
            ALONG_COLUMNS=columns,
            BLOCK=self.block,
            GROUP=transform or self.block,
            HADAMARD=transform > 0,
            MANTISSA=fmt.mantissa_bits,
            MIN_EXPONENT=fmt.min_exponent,
            MAX=fmt.max,
            MAX_EXPONENT=fmt.max_exponent,
            RULE=SCALE_RULES[self.scale_rule].number,
            ROUNDING=ROUNDINGS[self.rounding],
            RANDOM_BITS=self.random_bits,
            HEADROOM=self.headroom,
            CODE_BITS=fmt.bits if codes else 0,
            NAN_CODE=_nan_code(fmt),
            NATIVE=converts and scale is None and fmt.name in ("e4m3", "e5m2") and self.rounding == "nearest_even",
            BLOCK_ROWS=self.block_rows,
            PLAIN=plain,
            ROUNDS_TRANSFORM=self.rounds_transform and transform > 0,
            TARGET=self.target or 0.0,
            LANES_FIRST=lanes_first,
            WHOLE=whole,
            CODED=coded,
            BESIDE=beside,
            **of_scales,
        )

    @property
    def makes_nvfp4(self) -> bool:
        """Whether rowwise values may be stored as NVFP4 codes beside them."""
        formats = self.fmt.name, None if self.scale_fmt is None else self.scale_fmt.name
        plain = self.headroom == 1.0 and self.target is not None
        return plain and formats == ("e2m1", "e4m3") and (self.block_rows, self.block) == (1, 16)

    @cached_property
    def shares_directions(self) -> bool:
        """Whether both directions have the same values: of square blocks, if nothing depends on an order of sums."""
        return self.block_rows > 1 and self.options.four_over_six in (None, "abs_max")

    def _constants_of_scales(self, fmt: Format) -> dict[str, Any]:
        largest = torch.tensor(self.options.largest(self.fmt), dtype=torch.float32)
        return {
            "SCALE_MANTISSA": fmt.mantissa_bits,
            "SCALE_MIN_EXPONENT": fmt.min_exponent,
            "SCALE_MAX": fmt.max,
            "SCALE_NAN_CODE": _nan_code(fmt),
            "SCALE_ROUNDING": ROUNDINGS[self.scale_rounding],
            "LARGEST": self.options.largest(self.fmt),
            "INVERSE_LARGEST": float(torch.ones(()) / largest),
            "ZERO_CODE": ZERO_CODES[self.options.zero_code],
            "FOUR_OVER_SIX": MEASURES[self.options.four_over_six],
            "EDEN": self.options.group > 0,
        }


def _nan_code(fmt: Format) -> int:
    return 0 if fmt.specials == "none" else (1 << (fmt.bits - fmt.signed)) - 1
