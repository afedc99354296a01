"""Cases of the operand-statistics kernel against the reference; run interpreted on a CPU, and natively on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch.nn.functional import pad

import megatron_lowprec.quantization.error_stats
from megatron_lowprec import get_recipe
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.operand_stats import reference
from megatron_lowprec.kernels.operand_stats.reference import SUMS
from megatron_lowprec.kernels.quantize.reference import encode, quantize_operand
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import DIMS, SIDES, LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.error_stats import error_stats
from megatron_lowprec.quantization.random_stream import RngStep

# A tile's 4096 squares are added in fp32; rounding errors of opposite sign leave far less than this.
_RELATIVE = 1e-5
_TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Case:
    """One call on [rows, columns]; ``data`` are grid "values", uint8 "codes" or a torch "fp8" tensor."""

    rows: int
    columns: int
    fmt: str
    block: tuple[int, int]
    scale_format: str = "e8m0"
    data: str = "codes"
    transform: int = 0
    headroom: float = 1.0
    magnitude: float = 1.0
    dtype: torch.dtype = torch.bfloat16
    transposed: bool = False  # x is a transposed view
    special: float | None = None  # one entry of x
    scaled: bool = True  # without, data are plain numbers
    zero_scale: bool = False  # of a block, as coded scales may be


RECIPES = ("mxfp8", "mxfp4_rht_sr")
NATIVE = ("fp8_current", "fp8_rowwise", "fp8_blockwise")
MX, WHOLE = (1, 32), (1 << 20, 1 << 20)
CASES = (
    Case(70, 96, "e2m1", MX),
    Case(33, 256, "e2m1", MX, transform=64, headroom=0.75, transposed=True),
    Case(20, 100, "e2m1", MX, transform=32),  # padded to whole groups
    Case(9, 512, "e4m3", MX, transform=256, data="values"),
    Case(70, 160, "e2m3", MX),
    Case(70, 160, "e3m2", MX, data="values", dtype=torch.float32),
    Case(130, 260, "e4m3", (128, 128), "fp32", "fp8", transposed=True),
    Case(5, 260, "e5m2", (1, 128), "fp32", "fp8", magnitude=1e-30, dtype=torch.float32),
    Case(70, 96, "e4m3", (1, 1 << 20), "fp32", "values", magnitude=1e30),
    Case(70, 96, "e5m2", WHOLE, "fp32", "fp8"),
    Case(70, 96, "e4m3", MX, special=torch.nan),
    Case(70, 96, "e2m1", MX, special=torch.nan),  # whose codes are 0
    Case(70, 96, "e5m2", WHOLE, "fp32", "fp8", special=torch.inf),
    Case(33, 64, "e2m1", (16, 16), "fp32", "values", transform=16),
    Case(20, 64, "e2m1", (1, 16), "fp32", "values", zero_scale=True),
    Case(70, 600, "e4m3", WHOLE, "fp32", "fp8"),  # more tiles than programs in this test
    Case(64, 200, "e4m3", WHOLE, "fp32", "values", dtype=torch.float32, scaled=False),
    Case(64, 96, "e4m3", WHOLE, "fp32", "values", dtype=torch.float32, scaled=False, special=torch.nan),
)


def arguments(case: Case, device: str) -> dict[str, object]:
    """Arguments of ``operand_stats``: normal numbers over 20 binades, zeros, and a zero block."""
    generator = torch.Generator().manual_seed(case.rows * 1000 + case.columns)
    shape = (case.rows, case.columns)
    binades = torch.randint(-10, 10, shape, generator=generator).float()
    x = torch.randn(shape, generator=generator) * torch.exp2(binades) * case.magnitude
    x[:, :3] = 0
    x[: case.rows // 2, 32:64] = 0
    if case.special is not None:
        x[case.rows - 1, 70] = case.special
    x = x.to(case.dtype).to(device)
    if case.transposed:
        x = x.t().contiguous().t()
    fmt = FORMATS[case.fmt]
    signs = None
    if case.transform:
        signs = (1.0 - 2.0 * torch.randint(0, 2, (case.transform,), generator=generator)).to(device)
    padded = pad(x, (0, -case.columns % (case.transform or 1)))
    block = (min(case.block[0], padded.shape[0]), min(case.block[1], padded.shape[1]))
    values, scale = quantize_operand(
        padded,
        fmt,
        block,
        scale_format=case.scale_format,
        scale_rule="floor" if case.scale_format == "e8m0" else "amax",
        headroom=case.headroom,
        signs=signs,
    )
    data = values
    if case.data == "fp8":
        data = values.float().to(_TORCH[case.fmt])
    elif case.data == "codes":
        data = encode(values, fmt)
        data = data[:, ::2] | (data[:, 1::2] << 4) if fmt.bits == 4 else data
    if case.zero_scale:
        x[0, :16], data[0, :16], scale[0, 0] = 1.0, 0, 0
    if not case.scaled:  # an output that is not 0 where the exact product is
        x[3, 8:16], data[3, 8:16] = 0, 1e-2
    return {
        "x": x,
        "data": data,
        "scale": scale.to(device) if case.scaled else None,
        "fmt": fmt if case.scaled else None,
        "block": block,
        "headroom": case.headroom,
        "signs": signs,
    }


def faults(device: str) -> Iterator[str]:
    """Every statistic that differs from the reference's by more than its promise, a line each."""
    from megatron_lowprec.kernels.operand_stats import triton

    if device == "cpu":
        triton._PROGRAMS = 16  # the interpreter takes a second for a hundred
    for case in CASES:
        given = arguments(case, device)
        got, want = triton.operand_stats(**given), reference.operand_stats(**given)  # type: ignore[arg-type]
        again = triton.operand_stats(**given)  # type: ignore[arg-type]
        if not torch.equal(got.nan_to_num(nan=-1.0), again.nan_to_num(nan=-1.0)):
            yield f"{case}: {got.tolist()}, the second time {again.tolist()}"
        for number, (mine, theirs) in enumerate(zip(got.tolist(), want.tolist(), strict=True)):
            exact = (number < 4 or number >= SUMS) and not case.transform
            scale = (want[4] * want[5]).sqrt().item() + abs(theirs) if number == 6 else abs(theirs)
            same = mine == theirs or (mine != mine and theirs != theirs)
            if not same and (exact or not abs(mine - theirs) <= _RELATIVE * scale):
                yield f"{case}: statistic {number} is {mine}, not {theirs}"


def kernel() -> AbstractContextManager[object]:
    """Statistics by the kernel on a CPU as well."""
    from megatron_lowprec.kernels.operand_stats import triton

    return patch.object(megatron_lowprec.quantization.error_stats, "operand_stats", triton.operand_stats)


def layer_faults(device: str) -> Iterator[str]:
    """Operands of a layer whose statistics from the fused cast's codes are not those of the reference, a line each."""
    from megatron_lowprec.kernels import dispatch

    generator = torch.Generator().manual_seed(7)
    for recipe in RECIPES:
        gemms = LinearGemms(get_recipe(recipe), LinearId(2, "mlp.linear_fc1"), 5, AmaxHistory).backends.built(
            "emulated"
        )
        for gemm, tensor in DIMS:
            if getattr(get_recipe(recipe).gemms[gemm], tensor) is None:
                continue
            matrix = torch.randn(72, 128, generator=generator).bfloat16()
            matrix = matrix[:64] if tensor == "weight" else matrix  # whole groups in both directions
            want = gemms.error_stats(gemm, tensor, matrix, RngStep(3, 0))
            fused = (
                patch.object(dispatch, "has_mx_kernel", lambda _, rule: rule is not None)
                if device == "cpu"
                else nullcontext()
            )
            with fused, kernel():
                got = gemms.error_stats(gemm, tensor, matrix.to(device), RngStep(3, 0)).cpu()
            if not torch.allclose(got, want, rtol=1e-4, atol=0.0):
                yield f"{recipe} {gemm} {tensor}: {got.tolist()}, not {want.tolist()}"


def native_faults(device: str) -> Iterator[str]:
    """Operands whose statistics from the codes of native casts are not those of the reference, a line each."""
    generator = torch.Generator().manual_seed(8)
    for recipe in NATIVE:
        gemms = LinearGemms(get_recipe(recipe), LinearId(2, "mlp.linear_fc1"), 5, AmaxHistory)
        for tensor, names in SIDES.items():
            matrix = torch.randn(200, 256, generator=generator).bfloat16()
            matrix = matrix[:128] if tensor == "weight" else matrix
            for columnwise, gemm in enumerate(names):
                want = gemms.backends.built("emulated").error_stats(gemm, tensor, matrix, RngStep(3, 0))
                here = matrix.to(device)
                native, request = gemms.backends.built("hopper_fp8"), CastRequest(not columnwise, bool(columnwise))
                quantized, _ = native.quantize(tensor, here, RngStep(3, 0), request)
                with kernel():
                    got = error_stats(here, quantized, columnwise=bool(columnwise)).cpu()
                if not torch.allclose(got, want, rtol=1e-5, atol=0.0):
                    yield f"{recipe} {gemm} {tensor}: {got.tolist()}, not {want.tolist()}"


def differences(device: str) -> tuple[int, list[str]]:
    """(cases, faults)"""
    found = [*faults(device), *layer_faults(device), *native_faults(device)]
    return len(CASES) + len(RECIPES) + len(NATIVE), found
