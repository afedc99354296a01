"""Cases of the FP8 cast kernels against the reference, bit for bit; run interpreted on a CPU, and natively on a GPU.

``python -m tests.kernels.cast_cases`` runs the small set under Triton's interpreter, which must be chosen before Triton
is imported, and prints what differs.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from itertools import product
from unittest.mock import patch

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.cast_fp8 import reference
from megatron_lowprec.kernels.cast_fp8.prologue import (
    KINDS,
    BiasGelu,
    BiasGeluGrad,
    CastPrologue,
    DropoutGrad,
    Matrix,
    QkvGrad,
    Swiglu,
    SwigluGrad,
    norm_output,
)
from megatron_lowprec.kernels.cast_fp8.rule import Fp8Cast, Fp8Rule
from megatron_lowprec.scaling import scale_rules
from tests.kernels.mx_launch import difference

FLOOR, EPS = 1e-12, 1e-5
# by columns of the joined matrix: those of a group's queries, and of its key or its value
WIDTHS = {144: (32, 8), 384: (256, 64), 1024: (64, 32), 1152: (64, 64), 9216: (128, 128)}
NORMS = ("layernorm", "rmsnorm")


@dataclass(frozen=True)
class Case:
    """One launch on [rows, columns], along ``ways`` ("r" rows, "c" columns)."""

    rows: int
    columns: int
    dtype: torch.dtype
    fmt: str
    granularity: str
    rule: str
    ways: str
    given: float | None = None  # an amax that is known before, as delayed scaling has it
    special: bool = True  # NaN and Inf in it: every scale of a whole tensor is then NaN
    kind: str = "matrix"  # what is cast: x, or what GELU, dropout or a norm makes of it
    tiling: int | None = None  # which of the kernel's; None: as it chooses itself
    margin: int = 0
    floor: float = FLOOR  # of the amax of rows

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self)).replace("torch.", "")


def input_of(case: Case, device: str) -> torch.Tensor:
    """Normal numbers over 24 binades, ties, zeros of both signs, tiny and huge numbers, a zero block and column."""
    generator = torch.Generator().manual_seed(case.rows * 1000 + case.columns)
    shape = (case.rows, case.columns)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-12, 12, shape, generator=generator).float())
    edge = [0.0, -0.0, 1e-40, -1e-38, 1e-13, 464.0, 0.0009765625, -0.0029296875]
    edge += [torch.inf, torch.nan, -torch.inf, 3e38] if case.special else []
    where = torch.randperm(x.numel(), generator=generator)[: 2 * len(edge)]
    x.view(-1)[where] = torch.tensor(edge).repeat(2)
    x[:, 3] = 0
    x[: min(case.rows, 128), :128] = 0
    x[5, 130] = 1e-40  # so small that fl(M / amax) leaves fp32
    return x.to(case.dtype).to(device)


def prologue_of(case: Case, x: torch.Tensor) -> CastPrologue:
    """x, or a computed source that starts from it."""
    generator = torch.Generator().manual_seed(case.columns)
    bias = (1 + torch.randn(case.columns, generator=generator)).to(x.device, x.dtype)
    if case.kind in NORMS:
        from megatron_lowprec.kernels.layernorm.triton import statistics

        weight = torch.randn(case.columns, generator=generator).to(x.device, x.dtype)
        centered = case.kind == "layernorm"
        return norm_output(x, weight, bias if centered else None, statistics(x, EPS, centered))
    if case.kind == "bias_gelu":
        return BiasGelu(x, bias)
    if case.kind == "bias_gelu_grad":
        return BiasGeluGrad(x, 3 * torch.randn(x.shape, generator=generator).to(x.device, x.dtype), bias)
    if case.kind == "swiglu":
        up = torch.randn(x.shape, generator=generator).to(x.device, x.dtype)
        return Swiglu(torch.cat((x, up), 1))
    if case.kind == "swiglu_grad":
        return SwigluGrad(x[:, ::2].contiguous(), 3 * torch.randn(x.shape, generator=generator).to(x.device, x.dtype))
    if case.kind == "dropout_grad":
        return DropoutGrad(x, torch.tensor([-5, 6], dtype=torch.int32, device=x.device), 0.3)
    if case.kind == "qkv_grad":
        query, key = WIDTHS[case.columns]
        parts = x.view(case.rows, -1, query + 2 * key).split([query, key, key], dim=-1)
        dq, dk, dv = (part.reshape(case.rows, -1).contiguous() for part in parts)
        return QkvGrad(dq, dk, dv, (query, key))
    return Matrix(x)


def made_of(source: CastPrologue) -> torch.Tensor:
    """The matrix, by the kernels that write it; interpreted in fp32, and then rounded as a GPU rounds."""
    from megatron_lowprec.kernels.dropout.triton import bias_dropout_add_backward
    from megatron_lowprec.kernels.gelu.triton import bias_gelu, bias_gelu_backward
    from megatron_lowprec.kernels.layernorm.triton import norm
    from megatron_lowprec.kernels.swiglu.triton import swiglu, swiglu_backward

    if source.kind == "matrix":
        return source.x
    if source.kind == "qkv_grad":
        groups = source.x.shape[1] // source.head_widths[0]
        return torch.cat([part.view(source.shape[0], groups, -1) for part in source.in_memory], -1).flatten(1)
    dtype = source.x.dtype if source.x.is_cuda else torch.float32
    x, second, third = (None if t is None else t.to(dtype) for t in source.tensors()[:3])
    if source.kind in NORMS:
        y = norm(x, second, third, EPS).y  # type: ignore[arg-type]
    elif isinstance(source, Swiglu):
        y = swiglu(source.h.to(dtype))
    elif isinstance(source, SwigluGrad):
        y = swiglu_backward(source.dout.to(dtype), source.h.to(dtype))
    elif source.kind == "dropout_grad":
        y = bias_dropout_add_backward(x, source.dropout_p, source.tensors()[3], None)[0]
    else:
        y = bias_gelu(x, third) if source.kind == "bias_gelu" else bias_gelu_backward(x, second, third)[0]
    return y.to(source.x.dtype)


def differences(case: Case, device: str) -> list[str]:
    """What the kernels and the reference disagree about, a line each; empty where all bits agree."""
    from megatron_lowprec.kernels.cast_fp8.triton import amax_of, cast_fp8

    source = prologue_of(case, input_of(case, device))
    x = made_of(source)
    floor = case.floor if case.granularity == "row" else 0.0
    rule = Fp8Rule(FORMATS[case.fmt], case.granularity, case.rule, floor, case.margin)
    given = None if case.given is None else torch.tensor([case.given], device=device)
    observed = torch.full((1,), 1e-3, device=device)
    ways = {"rowwise": "r" in case.ways, "columnwise": "c" in case.ways}
    known = given
    if given is None and not source.in_memory and case.granularity in ("tensor", "row"):
        known = amax_of(x, vectors=case.granularity == "row")
    with nullcontext() if case.tiling is None else _tiled(case.tiling):
        made = cast_fp8(source, rule, **ways, amax=known, observed=observed, sums=True)
    lines = statistics_differences(case, source) if case.kind in NORMS else []
    want_observed = torch.full((1,), 1e-3, device=device)
    want = reference.cast_fp8(x, rule, **ways, amax=given, observed=want_observed)
    lines += _compare(str(case), made, want)
    lines += difference(f"{case} observed", observed == want_observed, observed, want_observed)
    if not case.special:  # the reference's own functions, a few last bits from the kernels'; the interpreter cuts
        computed = reference.entries(source)
        # Near 0 an entry is a difference of terms of the mean's size. A GPU fuses its multiply-add: 2^-24 of a term.
        unit, of_terms = (2.0**-7, 2.0**-13) if x.dtype == torch.bfloat16 else (2.0**-18, 2.0**-20)
        bound = unit * computed.abs() + of_terms * computed.abs().mean()
        lines += difference(f"{case} entries", (computed - x.float()).abs() <= bound, x, computed)
    if not case.special:
        assert made.sums is not None
        sums, exact = made.sums.double(), x.double().sum(0)
        # sums of what is computed are of entries before they are rounded; the interpreter cuts to bf16
        bound = (2.0**-20 if source.in_memory else 2.0**-8) * x.double().abs().sum(0)
        rounding = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8 if x.is_cuda else 2.0**-7}[x.dtype]
        bound += rounding * exact.abs()
        lines += difference(f"{case} sums", (sums - exact).abs() <= bound, sums, exact)
    return lines


def _tiled(number: int) -> AbstractContextManager[object]:
    def chosen(name: str, candidates: Sequence[object], *_: object) -> object:
        return candidates[number]

    return patch.multiple("megatron_lowprec.kernels.tuning", LARGE_ENOUGH=0, fastest=chosen)


def statistics_differences(case: Case, source: CastPrologue) -> list[str]:
    """Between what a norm's kernel finds of rows and what the cast was given."""
    from megatron_lowprec.kernels.layernorm.triton import norm

    made = norm(source.x, source.tensors()[1], source.tensors()[2], EPS)  # type: ignore[arg-type]
    lines = []
    for name, got, exact in zip(("rstd", "mean"), source.tensors()[3], (made.rstd, made.mean), strict=False):  # type: ignore[arg-type]
        same = (got == exact) | (got.isnan() & exact.isnan())
        lines += difference(f"{case} {name}", same, got, exact)
    return lines


def scale_differences(fmt: str, device: str) -> list[str]:
    """As ``differences`` for 1x128 tiles whose amax is each of the 32768 bf16 numbers that are not negative."""
    from megatron_lowprec.kernels.cast_fp8.triton import cast_fp8

    amax = torch.arange(1 << 15, dtype=torch.int16).view(torch.bfloat16).to(device)
    tiles = amax[:, None].expand(-1, 128).contiguous()
    case = Case(*tiles.shape, torch.bfloat16, fmt, "1x128", "amax", "rc")
    rule, columns = Fp8Rule(FORMATS[fmt], case.granularity), tiles.t().contiguous()
    lines = []
    for way, matrix in (("rowwise", tiles), ("columnwise", columns)):
        ways = {name: name == way for name in ("rowwise", "columnwise")}
        lines += _compare(str(case), cast_fp8(matrix, rule, **ways), reference.cast_fp8(matrix, rule, **ways))
    return lines


def _compare(case: str, made: Fp8Cast, want: Fp8Cast) -> list[str]:
    """Differences of data, but for the sign of a NaN, and of scales."""
    lines = []
    for way in ("rowwise", "columnwise"):
        data, scale, codes, exact = (
            getattr(cast, f"{way}_{part}") for cast in (made, want) for part in ("data", "scale")
        )
        assert (data is None) == (codes is None)
        if data is None:
            continue
        assert (data.shape, data.stride(), scale.shape) == (codes.shape, codes.stride(), exact.shape)
        assert scale.stride() == exact.stride() or 1 in scale.shape
        data, codes = data.view(torch.uint8), codes.view(torch.uint8)
        same = (data == codes) | (((codes & 0x7F) == 0x7F) & ((data ^ codes) == 0x80))
        lines += difference(f"{case} {way} codes", same, data, codes)
        same = (scale == exact) | (scale.isnan() & exact.isnan())
        lines += difference(f"{case} {way} scales", same, scale, exact)
    return lines


def small_cases() -> list[Case]:
    """A few launches that together pass through every branch."""
    bf16, fp32 = torch.bfloat16, torch.float32
    return [
        Case(37, 144, bf16, "e4m3", "tensor", "amax", "rc", special=False),
        Case(150, 144, fp32, "e5m2", "tensor", "amax", "rc"),
        Case(37, 144, bf16, "e4m3", "tensor", "amax", "rc", given=3.0),
        Case(37, 144, bf16, "e5m2", "tensor", "amax", "c", given=0.0),
        Case(150, 144, bf16, "e4m3", "row", "amax_pow2", "rc"),
        Case(150, 144, bf16, "e4m3", "row", "amax_pow2", "r", special=False),
        Case(150, 144, bf16, "e4m3", "row", "amax", "rc", special=False, floor=1e-37),
        Case(150, 256, bf16, "e4m3", "1x128", "amax", "rc"),
        Case(150, 256, fp32, "e4m3", "1x128", "amax", "c"),
        Case(150, 384, bf16, "e4m3", "128x128", "amax", "rc"),
        Case(300, 256, bf16, "e4m3", "128x128", "amax_pow2", "c"),
        Case(150, 256, bf16, "e4m3", "1x128", "amax", "rc", special=False, kind="bias_gelu"),
        Case(37, 144, bf16, "e4m3", "tensor", "amax", "rc", special=False, kind="bias_gelu"),
        Case(150, 144, bf16, "e5m2", "row", "amax_pow2", "rc", special=False, kind="bias_gelu_grad"),
        Case(150, 256, bf16, "e4m3", "1x128", "amax", "c", special=False, kind="bias_gelu_grad"),
        Case(37, 144, fp32, "e5m2", "tensor", "amax", "rc", given=3.0, kind="bias_gelu_grad"),
        Case(150, 256, bf16, "e4m3", "1x128", "amax", "rc", special=False, kind="swiglu"),
        Case(37, 144, fp32, "e4m3", "tensor", "amax", "rc", given=3.0, kind="swiglu"),
        Case(150, 256, bf16, "e4m3", "1x128", "amax", "rc", special=False, kind="swiglu_grad"),
        Case(37, 160, bf16, "e5m2", "tensor", "amax", "rc", special=False, kind="swiglu_grad"),
        Case(37, 144, bf16, "e5m2", "tensor", "amax", "rc", given=3.0, kind="dropout_grad"),
        Case(150, 208, bf16, "e4m3", "tensor", "amax", "rc", special=False, kind="dropout_grad"),
        Case(150, 256, fp32, "e4m3", "1x128", "amax", "rc", special=False, kind="dropout_grad"),
        Case(37, 144, bf16, "e4m3", "tensor", "amax", "rc", given=3.0, special=False, kind="layernorm"),
        Case(150, 272, bf16, "e4m3", "tensor", "amax", "rc", kind="rmsnorm"),
        Case(9, 2064, bf16, "e4m3", "tensor", "amax_pow2", "rc", given=9.0, special=False, kind="rmsnorm"),
        Case(33, 256, fp32, "e4m3", "tensor", "amax", "r", given=0.0, kind="layernorm"),
        Case(37, 256, bf16, "e4m3", "1x128", "amax", "rc", special=False, kind="layernorm"),
        Case(37, 144, bf16, "e5m2", "tensor", "amax", "rc", given=3.0, kind="qkv_grad"),
        Case(37, 144, fp32, "e4m3", "tensor", "amax", "rc", special=False, kind="qkv_grad"),
        Case(37, 384, bf16, "e4m3", "1x128", "amax", "rc", kind="qkv_grad"),
        Case(37, 384, bf16, "e4m3", "128x128", "amax", "rc", special=False, kind="qkv_grad"),
        # a margin, also where M / amax and then M / 2^margin / amax leaves fp32
        *(Case(37, 144, fp32, "e4m3", "tensor", "amax", "rc", given=amax, margin=2) for amax in (3.0, 1e-36, 1e-38)),
        # a quotient that is subnormal, and one without a reciprocal in fp32
        *(
            Case(37, 144, fp32, "e4m3", "tensor", rule, "rc", given=3e38, margin=margin)
            for rule, margin in (("amax_pow2", 7), ("amax_pow2", 10), ("amax", 10))
        ),
        # tiles that divide the matrix
        Case(128, 192, bf16, "e4m3", "tensor", "amax", "rc"),
        Case(128, 192, bf16, "e4m3", "row", "amax_pow2", "rc"),
        Case(256, 256, bf16, "e4m3", "1x128", "amax", "rc"),
        Case(256, 384, bf16, "e4m3", "128x128", "amax", "rc"),
        Case(128, 192, bf16, "e4m3", "tensor", "amax", "rc", given=3.0, special=False, kind="layernorm"),
        # tiles in parts
        Case(64, 1024, bf16, "e4m3", "tensor", "amax", "rc", tiling=-2),
        Case(67, 656, bf16, "e4m3", "tensor", "amax", "rc", special=False, tiling=-2),
        Case(128, 256, bf16, "e5m2", "tensor", "amax", "rc", given=3.0, kind="bias_gelu_grad", tiling=-3),
        Case(67, 272, bf16, "e5m2", "tensor", "amax", "rc", special=False, kind="bias_gelu_grad", tiling=-1),
        Case(64, 1024, bf16, "e5m2", "tensor", "amax", "rc", given=3.0, kind="swiglu_grad", tiling=-2),
        Case(128, 384, bf16, "e5m2", "1x128", "amax", "rc", special=False, kind="swiglu_grad"),
        Case(128, 512, bf16, "e5m2", "1x128", "amax", "rc", special=False, kind="swiglu_grad"),
        # amaxes of rows and columns in programs of several tiles, the last without rows of their own
        Case(530, 272, bf16, "e4m3", "row", "amax_pow2", "rc"),
        Case(530, 272, fp32, "e4m3", "row", "amax_pow2", "c", special=False),
        # every other scale rule
        *(Case(150, 144, bf16, "e4m3", "row", rule, "rc") for rule in scale_rules("fp32")[2:]),
    ]


def gpu_cases() -> list[Case]:
    """Every format, tile, direction and dtype, at odd sizes and at one that is large enough to tune."""
    bf16, fp32 = torch.bfloat16, torch.float32
    cases = [
        Case(*size, dtype, fmt, tile, rule, ways, special=special)
        for (*size, dtype), fmt, (tile, rule), ways, special in product(
            ((37, 256, bf16), (1000, 1152, bf16), (333, 256, fp32)),
            ("e4m3", "e5m2"),
            (("tensor", "amax"), ("row", "amax_pow2"), ("1x128", "amax"), ("128x128", "amax")),
            ("r", "c", "rc"),
            (True, False),
        )
    ]
    cases += [Case(*c, "e4m3", "tensor", "amax", "rc", given=amax) for c in ((37, 144, bf16),) for amax in (0.0, 3.0)]
    cases += [Case(37, 144, bf16, "e5m2", "tensor", "amax", "rc", given=amax, margin=2) for amax in (3.0, 1e-34, 1e-37)]
    cases += [
        Case(*size, bf16, "e4m3", tile, rule, ways, special=special, kind=kind)
        for kind in KINDS
        for size, (tile, rule), ways, special in (
            ((1000, 1152), ("tensor", "amax"), "rc", False),
            ((333, 256), ("row", "amax_pow2"), "rc", False),
            ((1000, 1152), ("1x128", "amax"), "rc", True),
            ((333, 256), ("1x128", "amax"), "c", False),
            ((37, 144), ("tensor", "amax"), "rc", True),
            ((2053, 9216), ("tensor", "amax"), "rc", False),
        )
        if kind not in ("matrix", "qkv_grad")
    ]
    cases += [
        Case(*size, dtype, "e4m3", tile, "amax", ways, given=given, special=special, kind="qkv_grad")
        for size, dtype, tile, ways, given, special in (
            ((37, 144), bf16, "tensor", "rc", 3.0, True),
            ((37, 144), bf16, "tensor", "c", None, False),
            ((333, 384), bf16, "1x128", "rc", None, False),
            ((333, 384), fp32, "128x128", "rc", None, True),
            ((1000, 1152), bf16, "tensor", "rc", None, False),
            ((1000, 1152), bf16, "1x128", "rc", None, True),
            ((1000, 1152), fp32, "1x128", "r", None, False),
            ((2053, 9216), bf16, "tensor", "rc", 5.0, False),
            ((2053, 9216), bf16, "1x128", "rc", None, False),
            ((2053, 9216), bf16, "128x128", "c", None, False),
        )
    ]
    cases += [
        Case(*size, dtype, "e4m3", "tensor", "amax", ways, given=given, special=special, kind=kind)
        for kind in NORMS
        for size, dtype, ways, given, special in (
            ((37, 144), bf16, "rc", 3.0, True),
            ((1000, 1024), bf16, "rc", None, False),
            ((333, 2048), fp32, "c", 5.0, False),
            ((4097, 2304), bf16, "r", 0.0, False),
            ((70, 20000), bf16, "rc", 5.0, False),
            ((16400, 2048), bf16, "rc", 5.0, False),  # large enough to tune
        )
    ]
    cases += [
        Case(*size, bf16, "e4m3", "tensor", "amax", "rc", special=False, kind=kind, tiling=number)
        for kind, size, number in product(KINDS, ((256, 1024), (250, 1152)), range(8))
    ]
    tiles = ("tensor", "row", "1x128", "128x128")
    return cases + [Case(2053, 2304, bf16, "e4m3", tile, "amax", "rc") for tile in tiles]


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    found = [line for case in small_cases() for line in differences(case, "cpu")]
    print(*found, f"{len(small_cases())} cases compared", sep="\n")
    sys.exit(bool(found))
