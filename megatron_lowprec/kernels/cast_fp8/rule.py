"""How a matrix becomes FP8, and what of it is fixed when a kernel is compiled."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megatron_lowprec.formats import Format
from megatron_lowprec.scaling import GRANULARITIES, SCALE_RULES

GRANULARITY_NUMBERS = {name: number for number, name in enumerate(GRANULARITIES)}
NAN_CODE = 0x7F  # of E4M3 and of E5M2, as of kernels.quantize.reference.encode


class CodeConstants(NamedTuple):
    """What codes are like, and who makes them.

    Attributes:
        MANTISSA, MIN_EXPONENT, MAX, NAN_CODE: of the format.
        NATIVE: whether the GPU converts to FP8 and bf16 itself; the interpreter does not.
    """

    MANTISSA: int
    MIN_EXPONENT: int
    MAX: float
    NAN_CODE: int
    NATIVE: bool


def code_constants(fmt: Format, device: torch.device) -> CodeConstants:
    """Of codes in ``fmt``, converted by the GPU itself where ``device`` is one that can."""
    native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return CodeConstants(fmt.mantissa_bits, fmt.min_exponent, fmt.max, NAN_CODE, native)


class CastConstants(NamedTuple):
    """The constexpr ``CAST`` of a kernel, which it hands on whole to the functions that it calls. Numbers alone.

    Names and order are part of the key under which ``kernels.tuning`` remembers a tiling.

    Attributes:
        ALONG_ROWS, ALONG_COLUMNS: which operands are made.
        OBSERVES: whether an amax is raised on the way.
        SUMS: whether entries are summed over M.
        KIND: what is read, of ``source.KINDS``.
        QUERY, HEAD: ``CastPrologue.head_widths``.
        GRANULARITY: entries that share a scale, of GRANULARITY_NUMBERS.
        CODES: how numbers become codes.
        FLOOR: the least fp32 not below the rule's amax_floor.
        FLOOR_SCALE: fl32(SCALED_MAX / amax_floor), the encode scale of a lower amax; 1 without a floor.
        SCALED_MAX: MAX / 2^margin, what amax is scaled to.
        POWER_OF_TWO: whether encode scales are cut to powers of two.
        WHOLE: whether tiles divide the matrix: nothing of a tile is outside of it, and nothing is asked about that.
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


class Fp8Cast(NamedTuple):
    """FP8 data and fp32 decode scales of [M, N], along rows, along columns, or both; None what was not asked for.

    Scales are [ceil(R / block rows), ceil(K / block columns)] of data [R, K]; [1, 1] of a tensor, [R, 1] of rows. Those
    of 1x128 blocks have K outermost in memory, those of 128x128 blocks have columns in multiples of 4, as cuBLAS wants.

    Attributes:
        rowwise_data: [M, N]; M padded with zeros to a multiple of 128 for 1x128 blocks.
        columnwise_data: [N, M], M padded with zeros to a multiple of 16, of 128 for blocks.
        sums: over M, [N] in the matrix's dtype.
    """

    rowwise_data: torch.Tensor | None = None
    rowwise_scale: torch.Tensor | None = None
    columnwise_data: torch.Tensor | None = None
    columnwise_scale: torch.Tensor | None = None
    sums: torch.Tensor | None = None


@dataclass(frozen=True)
class Fp8Rule:
    """How a matrix becomes FP8, as in ``recipe.schema.QuantSpec``; rounded to nearest even, fp32 scales.

    ``granularity`` is "tensor", "row", "1x128" or "128x128", its second size along the contracted dimension. A rule
    keeps the kernels that were specialized for it: looking one up must cost less than launching it.
    """

    fmt: Format
    granularity: str
    scale_rule: str = "amax"
    amax_floor: float = 0.0
    margin: int = 0
    kernels: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes."""
        return torch.float8_e4m3fn if self.fmt.name == "e4m3" else torch.float8_e5m2

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
        """Of a kernel that gives these operands by this rule on ``device``."""
        scaled_max = self.fmt.max * 2.0**-self.margin
        floor = torch.tensor(self.amax_floor, dtype=torch.float64)
        floor32 = floor.float()
        if floor32 < floor:
            floor32 = torch.nextafter(floor32, torch.tensor(torch.inf))
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
            FLOOR=float(floor32),
            FLOOR_SCALE=float((scaled_max / floor).float()) if self.amax_floor else 1.0,
            SCALED_MAX=scaled_max,
            POWER_OF_TWO=SCALE_RULES[self.scale_rule].power_of_two,
        )
