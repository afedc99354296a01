"""Operands of all experts quantized by one launch, beside the reference."""

from dataclasses import dataclass

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.grouped_quantize import reference
from megatron_lowprec.kernels.matrices import Matrices
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.kernels.quantize.coded_scale import PLAIN, CodedOptions
from megatron_lowprec.kernels.quantize.rule import MxRule
from tests.kernels.mx_launch import MOMENT, difference

ROWS = (5, 0, 33, 70, 1, 0)
SPANS = (ShardSlice(1 << 20, gate_offset=16, gate_stride=4096), ShardSlice(512))

FOUR_OVER_SIX, EDEN = CodedOptions(four_over_six="mse"), CodedOptions(zero_code="one", group=32)
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """One launch on ``ROWS`` rows of ``columns``, behind a transform of ``block``, 0 for none."""

    columns: int
    dtype: torch.dtype
    fmt: str
    scale_rule: str
    rounding: str
    block: int
    columnwise: bool
    scale: str = "e8m0"
    target: float | None = None
    square: bool = False
    rounds: bool = False
    options: CodedOptions = PLAIN
    scale_rounding: str = "nearest_even"
    out: torch.dtype | None = None
    whole: bool = False


CASES = [
    Case(64, torch.bfloat16, "e4m3", "round_up", "nearest_even", 0, columnwise=False),
    Case(64, torch.bfloat16, "e4m3", "floor", "nearest_even", 0, columnwise=True),
    Case(128, torch.bfloat16, "e2m1", "floor", "stochastic", 64, columnwise=False),
    Case(96, torch.bfloat16, "e2m1", "floor", "stochastic", 64, columnwise=True),
    Case(64, torch.float32, "e2m1", "floor", "stochastic", 0, columnwise=True),
    Case(128, torch.float32, "e2m1", "even", "nearest_even", 32, columnwise=False),
    Case(48, torch.bfloat16, "e2m1", "product", "stochastic", 16, True, "e4m3", 2688.0, rounds=True),
    Case(48, torch.bfloat16, "e2m1", "product", "nearest_even", 0, False, "e4m3", 2688.0),
    Case(48, torch.bfloat16, "e2m1", "product", "nearest_even", 0, False, "e4m3", 2688.0, square=True),
    Case(64, torch.float32, "e2m1", "quotient", "nearest_even", 16, False, "ue5m3", 2688.0),
    Case(48, torch.bfloat16, "e2m1", "base", "nearest_even", 0, False, "e4m3", 1536.0, True, options=FOUR_OVER_SIX),
    Case(
        48,
        torch.bfloat16,
        "e2m1",
        "divided",
        "nearest_even",
        32,
        True,
        "e4m3",
        1536.0,
        False,
        False,
        EDEN,
        "stochastic",
    ),
    # fprop's values, and these quantized again
    Case(
        48,
        BF16,
        "e2m1",
        "divided",
        "nearest_even",
        0,
        False,
        "e4m3",
        1536.0,
        options=FOUR_OVER_SIX,
        out=FP32,
        whole=True,
    ),
    Case(64, BF16, "e2m1", "round_up", "nearest_even", 0, False, out=FP32, whole=True),
    Case(
        48,
        FP32,
        "e2m1",
        "divided",
        "nearest_even",
        32,
        True,
        "e4m3",
        1536.0,
        options=EDEN,
        scale_rounding="stochastic",
        out=BF16,
    ),
]


def operand_differences(case: Case, device: str) -> list[str]:
    """What the launch for all matrices and the reference disagree about."""
    from megatron_lowprec.kernels.grouped_quantize import triton

    generator = torch.Generator().manual_seed(case.columns)
    sources = [torch.randn(rows, case.columns, generator=generator) * 2.0**i for i, rows in enumerate(ROWS)]
    sources[2][:, :32] = 0
    sources[3][7, 5], sources[0][1, 40] = torch.inf, torch.nan
    sources = [source.to(device, case.dtype) for source in sources]
    whole = Matrices(torch.cat(sources), ROWS) if case.columnwise else sources
    both = (reference, sources), (triton, whole)
    headroom = 0.75 if case.rounding == "stochastic" else 1.0
    rule = MxRule(
        FORMATS[case.fmt],
        case.scale_rule,
        case.rounding,
        headroom=headroom,
        block=32 if case.scale == "e8m0" else 16,
        block_rows=16 if case.square else 1,
        scale_fmt=FORMATS.get(case.scale),
        target=case.target,
        rounds_transform=case.rounds,
        scale_rounding=case.scale_rounding,
        options=case.options,
    )
    rng_step = torch.tensor(MOMENT, dtype=torch.int32, device=device)
    keys = [Key.of((0x9E3779B9 * (i + 1) & 0xFFFFFFFF, i)) for i in range(len(ROWS))]
    signs, found = None, []
    if case.block:
        signs = reference.scaled_signs_of_groups(keys, rng_step, case.block)
        drawn = triton.scaled_signs_of_groups(keys, rng_step, case.block)
        found += difference(f"signs of {case}", drawn == signs, drawn, signs)
    amaxes = [module.amaxes_of_groups(given, rule, columnwise=case.columnwise, signs=signs) for module, given in both]
    same = (amaxes[0] == amaxes[1]) | (amaxes[0].isnan() & amaxes[1].isnan())
    found += difference(f"amaxes of {case}", same, amaxes[1], amaxes[0])
    (want, want_scales), (got, scales) = (
        module.quantize_mx_groups(
            given,
            rule,
            columnwise=case.columnwise,
            keys=keys,
            signs=signs,
            amax=amaxes[0],
            scale_keys=keys[::-1],
            rng_step=rng_step,
            spans=SPANS,
            whole=case.whole,
            out_dtype=case.out,
        )
        for module, given in both
    )
    if want_scales is not None and scales is not None:
        same = (scales == want_scales) | (scales.isnan() & want_scales.isnan())
        found += difference(f"tensor scales of {case}", same, scales, want_scales)
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return [*found, f"{case}: {tuple(got.shape)} in {got.dtype} instead of {tuple(want.shape)} in {want.dtype}"]
    bits = torch.int16 if got.dtype == torch.bfloat16 else torch.int32
    same = (got.view(bits) == want.contiguous().view(bits)) | (got.isnan() & want.isnan())
    return found + difference(str(case), same, got, want)
