"""FP8 cast rules, and the constants of the kernels compiled for them."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.format_dtypes import DTYPES
from megatron_lowprec.kernels.gemm.native import ROW_MULTIPLE
from megatron_lowprec.kernels.kernel_cache import KernelCache
from megatron_lowprec.kernels.quantize.rule import converts_fp8
from megatron_lowprec.scaling import GRANULARITIES, SCALE_RULES

GRANULARITY_NUMBERS = {name: number for number, name in enumerate(GRANULARITIES)}
NAN_CODE = 0x7F  # of E4M3 and of E5M2, as of kernels.quantize.reference.encode


class CodeConstants(NamedTuple):
    """Constants of the conversion to codes.

    Attributes:
        MANTISSA, MIN_EXPONENT, MAX, NAN_CODE: properties of the format.
        NATIVE: whether hardware instructions convert to FP8 and bf16; false in the interpreter.
    """

    MANTISSA: int
    MIN_EXPONENT: int
    MAX: float
    NAN_CODE: int
    NATIVE: bool


def code_constants(fmt: Format, device: torch.device) -> CodeConstants:
    """Constants of codes in ``fmt``."""
    return CodeConstants(fmt.mantissa_bits, fmt.min_exponent, fmt.max, NAN_CODE, converts_fp8(device))


class CastConstants(NamedTuple):
    """The constexpr ``CAST`` of a kernel, passed as a whole to the functions that it calls. Numbers only.

    Names and order are part of the key of a cached tiling in ``kernels.tuning``.

    Attributes:
        ALONG_ROWS, ALONG_COLUMNS: whether rowwise and columnwise data are written.
        OBSERVES: whether the cast raises an amax.
        SUMS: whether entries are summed over M.
        KIND: number of the prologue in ``prologue.KINDS``.
        QUERY, HEAD: ``CastPrologue.head_widths``.
        GRANULARITY: number of the granularity in GRANULARITY_NUMBERS.
        CODES: constants of the conversion to codes.
        FLOOR: the least fp32 number not below the rule's amax_floor.
        FLOOR_SCALE: fl32(SCALED_MAX / amax_floor), the encode scale for a lower amax; 1 without a floor.
        SCALED_MAX: MAX / 2^margin, the value that amax is scaled to.
        POWER_OF_TWO: whether encode scales are truncated to powers of two.
        WHOLE: whether tiles divide the matrix, and the halves of SwiGLU's gradient: no bounds checks are needed.
    """

    ALONG_ROWS: bool
    ALONG_COLUMNS: bool
    OBSERVES: bool
    SUMS: bool
    KIND: int
    QUERY: int
    HEAD: int
    GRANULARITY: int
    CODES: CodeConstants
    FLOOR: float
    FLOOR_SCALE: float
    SCALED_MAX: float
    POWER_OF_TWO: bool
    WHOLE: bool = False


_BLOCK = 128


class Fp8Cast(NamedTuple):
    """FP8 data and fp32 decode scales of [M, N], rowwise, columnwise or both; None where not requested.

    Scales of data [R, K] are [ceil(R / block rows), ceil(K / block columns)]: [1, 1] for "tensor", [R, 1] for "row".
    Those of 1x128 blocks have K outermost in memory, those of 128x128 blocks columns in multiples of 4, for cuBLAS.

    Attributes:
        rowwise_data: [M, N]; for 1x128 blocks M is zero-padded to a multiple of 128.
        columnwise_data: [N, M], M zero-padded to a multiple of 16, of 128 for blocks.
        sums: sums over M, [N] in the matrix's dtype.
    """

    rowwise_data: torch.Tensor | None = None
    rowwise_scale: torch.Tensor | None = None
    columnwise_data: torch.Tensor | None = None
    columnwise_scale: torch.Tensor | None = None
    sums: torch.Tensor | None = None


class Layout(NamedTuple):
    """How a cast allocates one tensor.

    Attributes:
        padded: part of it stays unwritten: it begins as zeros, so that it is not NaN by chance.
    """

    size: tuple[int, int]
    stride: tuple[int, int]
    dtype: torch.dtype
    padded: bool = False

    def empty(self, device: torch.device) -> torch.Tensor:
        """The tensor."""
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)
        return made.zero_() if self.padded else made


Layouts = tuple[Layout | None, Layout | None, Layout | None, Layout | None]
"""Of the first four fields of ``Fp8Cast``."""


@dataclass(frozen=True)
class Fp8Rule(KernelCache):
    """Rule of a cast to FP8, fields as in ``recipe.schema.QuantSpec``; rounding to nearest even, fp32 scales.

    ``granularity`` is "tensor", "row", "1x128" or "128x128", its second size along the contracted dimension.
    """

    fmt: Format
    granularity: str
    scale_rule: str = "amax"
    amax_floor: float = 0.0
    margin: int = 0

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the codes."""
        return DTYPES[self.fmt.name]

    @cached_property
    def _scaled(self) -> tuple[float, float, float]:
        """SCALED_MAX, FLOOR and FLOOR_SCALE of ``CastConstants``."""
        scaled_max = self.fmt.max * 2.0**-self.margin
        floor = torch.tensor(self.amax_floor, dtype=torch.float64)
        floor32 = floor.float()
        if floor32 < floor:
            floor32 = torch.nextafter(floor32, torch.tensor(torch.inf))
        largest = torch.finfo(torch.float32).max  # of a scale, as where there is no floor
        floor_scale = float((scaled_max / floor).clamp(max=largest).float()) if self.amax_floor else 1.0
        return scaled_max, float(floor32), floor_scale

    def padded_rows(self, rows: int) -> tuple[int, int]:
        """Rows of rowwise data, and length of columnwise data, of a matrix with ``rows`` rows."""
        unit = _BLOCK if self.granularity in ("1x128", "128x128") else ROW_MULTIPLE
        padded = -(-rows // unit) * unit
        # cuBLAS requires the columns of 1x128 scales in multiples of 16 bytes
        return padded if self.granularity == "1x128" else rows, padded

    def empty(self, shape: torch.Size, device: torch.device, *, rowwise: bool, columnwise: bool) -> Fp8Cast:
        """Empty data and scales of a cast of a matrix."""
        layouts = self.layouts(shape, rowwise=rowwise, columnwise=columnwise)
        return Fp8Cast(*(None if each is None else each.empty(device) for each in layouts))

    def layouts(self, shape: torch.Size, *, rowwise: bool, columnwise: bool) -> Layouts:
        """Layouts of the data and scales of a cast of a matrix; its rows may be symbolic."""
        height, padded = self.padded_rows(shape[0])
        by_rows = self._layouts(height, shape[1]) if rowwise else (None, None)
        return *by_rows, *(self._layouts(shape[1], padded) if columnwise else (None, None))

    def _layouts(self, height: int, length: int) -> tuple[Layout, Layout]:
        data, fp32 = Layout((height, length), (length, 1), self.dtype), torch.float32
        blocks = -(-length // _BLOCK)
        if self.granularity == "1x128":
            return data, Layout((height, blocks), (1, height), fp32)
        if self.granularity == "tensor":
            return data, Layout((1, 1), (1, 1), fp32)
        if self.granularity == "row":
            return data, Layout((height, 1), (1, 1), fp32)
        columns = -(-blocks // 4) * 4
        return data, Layout((-(-height // _BLOCK), columns), (columns, 1), fp32, padded=bool(blocks % 4))

    def constants(
        self,
        rows: bool,
        columns: bool,
        observes: bool,
        sums: bool,
        kind: int,
        widths: tuple[int, int],
        device: torch.device,
    ) -> CastConstants:
        """Constants of the kernel that writes these outputs by this rule on ``device``."""
        scaled_max, floor, floor_scale = self._scaled
        return CastConstants(
            ALONG_ROWS=rows,
            ALONG_COLUMNS=columns,
            OBSERVES=observes,
            SUMS=sums,
            KIND=kind,
            QUERY=widths[0],
            HEAD=widths[1],
            GRANULARITY=GRANULARITY_NUMBERS[self.granularity],
            CODES=code_constants(self.fmt, device),
            FLOOR=floor,
            FLOOR_SCALE=floor_scale,
            SCALED_MAX=scaled_max,
            POWER_OF_TWO=SCALE_RULES[self.scale_rule].power_of_two,
        )
