"""Cases of the grouped kernels against their references; run interpreted on a CPU, and natively on a GPU.

``python -m tests.kernels.grouped_cases`` runs all under Triton's interpreter and prints what differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.cast_fp8.rule import Fp8Rule
from megatron_lowprec.kernels.grouped_cast_fp8 import reference as cast_reference
from megatron_lowprec.kernels.grouped_fp8_gemm import reference as fp8_reference
from megatron_lowprec.kernels.grouped_gemm import reference as gemm_reference
from megatron_lowprec.kernels.grouped_quantize import reference
from megatron_lowprec.kernels.matrices import Matrices
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.kernels.quantize.coded_scale import PLAIN, CodedOptions
from megatron_lowprec.kernels.quantize.rule import MxRule
from tests.kernels.interpreted import main
from tests.kernels.mx_cases import MOMENT, difference

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


def product_differences(device: str, size: int = 1, dtype: torch.dtype = torch.float32) -> list[str]:
    """Products of small integers, whose sums are exact in any order.

    The interpreter multiplies bf16 numbers as their bits: elsewhere pass bf16.
    """
    return _product_differences(device, [count * size for count in ROWS], 48 * size, 80 * size, dtype)


def tiling_differences(device: str, dtype: torch.dtype = torch.float32) -> list[str]:
    """The same of whole tiles, by every tiling."""
    from megatron_lowprec.kernels.grouped_gemm import triton

    found = []
    for tiling in triton.TILINGS[torch.bfloat16]:
        chosen = SimpleNamespace(choose=lambda *_, tiling=tiling: tiling)
        with patch.object(triton, "_tuned", lambda *_, chosen=chosen: chosen):
            found += _product_differences(device, ROWS, 256, 256, dtype)
    return found


def _product_differences(device: str, rows: Sequence[int], n: int, k: int, dtype: torch.dtype) -> list[str]:
    from megatron_lowprec.kernels.grouped_gemm import triton

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(device, dtype)

    generator = torch.Generator().manual_seed(0)
    a = integers(sum(rows), k)
    found = []
    of_groups = torch.exp2(torch.arange(len(rows), device=device) - 2.0)
    for alpha, b in ((0.5, [integers(n, k) for _ in rows]), (of_groups, [integers(k, n).t() for _ in rows])):
        want, got = (
            module.grouped_gemm(a, b, rows, alpha=alpha, out_dtype=dtype) for module in (gemm_reference, triton)
        )
        found += difference(f"product [{n}, {k}], strides {b[0].stride()}", got == want, got, want)
    dy, some, every = integers(sum(rows), n), [i % 2 == 0 for i in range(len(rows))], [True] * len(rows)
    for total_dtype, writes, offset, alpha in (
        (torch.float32, some, 0, 0.5),
        (torch.float32, some, 1, of_groups),  # as gradients that follow one another without padding
        (torch.float32, every, 0, 0.5),
        (torch.bfloat16, every, 0, 0.5),
    ):
        room = torch.full((2, len(rows) * n * k + offset), 7.0, dtype=total_dtype, device=device)
        totals = [list(each[offset:].view(-1, n, k).unbind()) for each in room]
        for module, own in zip((gemm_reference, triton), totals, strict=True):
            module.grouped_wgrad_(dy, a, rows, own, alpha=alpha, overwrite=writes)
        want, got = torch.stack(totals[0]), torch.stack(totals[1])
        found += difference(f"weight gradient [{n}, {k}], {total_dtype}", got == want, got, want)
    return found


def fp8_differences(device: str, size: int = 1) -> list[str]:
    """Products of FP8 integers under scales that are powers of two, whose sums are exact in any order."""
    from megatron_lowprec.kernels.grouped_fp8_gemm import triton

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(device, torch.float32).to(torch.float8_e4m3fn)

    def scales(*shape: int) -> torch.Tensor:
        return torch.exp2(torch.randint(-1, 2, shape, generator=generator).float()).to(device)

    generator = torch.Generator().manual_seed(0)
    rows, n, k = [count * size for count in (5, 0, 130, 128)], 256, 256 * size
    x = torch.randn(sum(rows), 48, generator=generator).to(device, torch.bfloat16)
    found = []
    for matrix in (x, x.view(torch.uint8), x.float()):  # tokens; codes and scales that a dispatcher sent
        padded, want = triton.pad_groups(matrix, rows), fp8_reference.pad_groups(matrix, rows)
        found += difference("padding", padded == want, padded, want)
    tokens = len(want)
    a = codes(tokens, k), scales(k // 128, tokens).t()  # 1x128 scales have tokens last in memory
    by_rows = (
        codes(len(rows) * n, k).view(-1, n, k),
        scales(len(rows) * n // 128, k // 128).view(-1, n // 128, k // 128),
    )
    by_columns = (
        codes(n, len(rows) * k).view(n, -1, k).transpose(0, 1),
        scales(n // 128, len(rows) * k // 128).view(n // 128, -1, k // 128).transpose(0, 1),
    )
    apart = [one.clone() for one in by_rows[0]], by_rows[1]  # FP8 primary weights
    for b in (by_rows, by_columns, apart):
        want, got = (
            module.grouped_fp8_gemm(*a, *b, rows, granularity="1x128", out_dtype=torch.float32)
            for module in (fp8_reference, triton)
        )
        found += difference(f"FP8 product, strides {b[0][0].stride()}", got == want, got, want)
    # neither K nor N is a multiple of a tile's
    data = a[0][:, : k - 48].contiguous(), codes(len(rows), n + 16, k + 16)[:, :, : k - 48]
    of_a, of_b = (scales(len(rows)), scales(tokens, 1)), (scales(len(rows)), scales(len(rows), n + 16))
    for granularity, a_scale, b_scale in zip(("tensor", "row"), of_a, of_b, strict=True):
        for fast in (True, False):
            options = {"granularity": granularity, "out_dtype": torch.float32, "fast_accumulation": fast}
            want, got = (
                module.grouped_fp8_gemm(data[0], a_scale, data[1], b_scale, rows, **options)
                for module in (fp8_reference, triton)
            )
            found += difference(f"FP8 product, {granularity} scales", got == want, got, want)
    e5m2 = [one.float().to(torch.float8_e5m2) for one in by_rows[0]]  # a format of FP8 primary weights
    want, got = (
        module.grouped_fp8_gemm(a[0], of_a[0], e5m2, of_b[0], rows, granularity="tensor", out_dtype=torch.float32)
        for module in (fp8_reference, triton)
    )
    found += difference("FP8 product, weights in E5M2", got == want, got, want)
    m = n + 16
    dy, x8 = (codes(m, tokens), scales(tokens // 128, m).t()), (codes(k, tokens), scales(tokens // 128, k).t())
    of_dy = {"1x128": dy[1], "tensor": scales(len(rows)), "row": scales(len(rows), m)}
    of_x = {"1x128": x8[1], "tensor": scales(len(rows)), "row": scales(len(rows), k)}
    for granularity, fast in (("1x128", False), *product(("tensor", "row"), (False, True))):
        totals = [[torch.full((m, k), 7.0, device=device) for _ in rows] for _ in range(2)]
        for module, own in zip((fp8_reference, triton), totals, strict=True):
            fmt = torch.float8_e5m2 if granularity == "tensor" else torch.float8_e4m3fn
            operands = dy[0].float().to(fmt), of_dy[granularity], x8[0], of_x[granularity]
            options = {"granularity": granularity, "fast_accumulation": fast}
            overwrite = [True, True, granularity == "tensor", granularity == "tensor"]
            module.grouped_fp8_wgrad_(*operands, rows, own, overwrite=overwrite, **options)
        want, got = torch.stack(totals[0]), torch.stack(totals[1])
        found += difference(f"FP8 weight gradient, {granularity} scales", got == want, got, want)
    for granularity, of_a, of_b in (("tensor", of_dy["tensor"], of_x["tensor"]), ("1x128", dy[1][:, :0], x8[1][:, :0])):
        empty = codes(m, 0), of_a, codes(k, 0), of_b
        totals = [[torch.full((m, k), 7.0, device=device) for _ in range(2)] for _ in range(2)]
        for module, own in zip((fp8_reference, triton), totals, strict=True):
            module.grouped_fp8_wgrad_(*empty, [0, 0], own, granularity=granularity, overwrite=[True, False])
        want, got = torch.stack(totals[0]), torch.stack(totals[1])
        found += difference(f"FP8 weight gradient without tokens, {granularity} scales", got == want, got, want)
    return found


def fp8_tiling_differences(device: str) -> list[str]:
    """The same by every tiling; slow in the interpreter."""
    from megatron_lowprec.kernels.grouped_fp8_gemm import triton

    found = []
    for tilings in zip(triton.PROMOTED, triton.FAST, strict=True):
        chosen = [SimpleNamespace(choose=lambda *_, tiling=tiling: tiling) for tiling in tilings]
        with patch.object(triton, "_tuned", lambda _, fast, chosen=chosen: chosen[fast]):
            found += fp8_differences(device)
    return found


def cast_differences(device: str) -> list[str]:
    """Codes, scales and amaxes of matrices with a scale each."""
    from megatron_lowprec.kernels.grouped_cast_fp8 import triton

    generator, found = torch.Generator().manual_seed(0), []
    sources = [
        torch.randn(rows, 48, generator=generator).bfloat16().to(device) * 2.0**power
        for rows, power in ((5, 3), (0, 0), (130, -9), (1, 0))
    ]
    sources[3].zero_()
    whole = Matrices(torch.cat(sources), [len(source) for source in sources])
    observed = [torch.tensor([value], device=device) for value in (1e9, 3.0, 0.0, 0.0)]
    for fmt, margin, observes in (("e4m3", 0, False), ("e5m2", 1, True)):
        rule = Fp8Rule(FORMATS[fmt], "tensor", margin=margin)
        amaxes = [cast_reference.amax_of_groups(sources), triton.amax_of_groups(whole)]
        found += difference("amax", amaxes[0] == amaxes[1], amaxes[1], amaxes[0])
        results = []
        for module in (cast_reference, triton):
            raised = [cell.clone() for cell in observed] if observes else None
            cast = module.cast_fp8_groups(
                sources, rule, amax=amaxes[0].split(1), observed=raised, rowwise=True, columnwise=True
            )
            assert cast.rowwise_data is not None
            assert cast.columnwise_data is not None
            both = cast.rowwise_data.view(torch.uint8), cast.columnwise_data.view(torch.uint8)
            results.append((*both, cast.rowwise_scale, torch.cat(raised or observed)))
        for name, want, got in zip(("rows", "columns", "scale", "observed"), *results, strict=True):
            found += difference(f"{name} of {fmt}", got == want, got, want)
    rule = Fp8Rule(FORMATS["e4m3"], "row", "amax_pow2", 1e-12)
    amaxes = [module.amax_of_groups(sources, columns=True) for module in (cast_reference, triton)]
    found += difference("amax of columns", amaxes[0] == amaxes[1], amaxes[1], amaxes[0])
    casts = [
        module.cast_fp8_groups(sources, rule, amax=amaxes[0].unbind(), rowwise=False, columnwise=True)
        for module in (cast_reference, triton)
    ]
    codes = [cast.columnwise_data.view(torch.uint8) for cast in casts if cast.columnwise_data is not None]
    found += difference("columns with a scale each", codes[0] == codes[1], codes[1], codes[0])
    want, got = (cast.columnwise_scale for cast in casts)
    found += difference("their scales", want == got, got, want)
    for granularity in ("tensor", "row"):  # of the current amax, another rank's is twice as large
        rule, ways = Fp8Rule(FORMATS["e4m3"], granularity), {"rowwise": False, "columnwise": True}
        want, got = (
            module.cast_fp8_groups(given, rule, reduce_amax=lambda own: 2 * own, **ways)
            for module, given in ((cast_reference, sources), (triton, whole))
        )
        for name, one, other in zip(("codes", "scale"), want[2:4], got[2:4], strict=True):
            found += difference(f"current {name} of a {granularity}", one == other, other, one)
    own, newest = torch.rand(2, len(sources), device=device)
    casts, raised = [], [newest.clone(), newest.clone()]
    for module, observes in zip((cast_reference, triton), raised, strict=True):
        rule = Fp8Rule(FORMATS["e4m3"], "tensor")
        casts.append(module.cast_fp8_groups(sources, rule, amax=own, observed=observes, rowwise=True, columnwise=False))
    want, got = (cast.rowwise_scale for cast in casts)
    found += difference("scales of one tensor's amaxes", want == got, got, want)
    found += difference("observed in one tensor", raised[0] == raised[1], raised[1], raised[0])
    return found + cast_tiling_differences(device)


def cast_tiling_differences(device: str) -> list[str]:
    """Codes and scales by tilings of each height and part, NaN and Inf among the entries."""
    from megatron_lowprec.kernels.grouped_cast_fp8 import triton

    generator, found = torch.Generator().manual_seed(0), []
    directions = [(True, False), (False, True), (True, True)]
    ways_of = {"1x128": directions, "128x128": directions, "tensor": [(True, True)], "row": [(False, True)]}
    for granularity, (rowwise, columnwise) in ((name, way) for name, ways in ways_of.items() for way in ways):
        columns = 256 if granularity in cast_reference.BLOCKS else 144
        sources = [
            torch.randn(rows, columns, generator=generator).bfloat16().to(device) * 2.0**power
            for rows, power in ((5, 3), (0, 0), (130, -9), (7, 0), (3, 0))
        ]
        sources[2][:, 128:256], sources[3][2, 5], sources[4][1, 140] = 0, torch.nan, -torch.inf
        whole = Matrices(torch.cat(sources), [len(source) for source in sources])
        rule, ways = Fp8Rule(FORMATS["e4m3"], granularity), {"rowwise": rowwise, "columnwise": columnwise}
        tilings = triton.tilings_of(granularity, rowwise, columnwise)
        for tiling in {(each.rows, each.part_rows, each.part_columns): each for each in tilings}.values():
            with patch.object(triton.Tuned, "choose", lambda *_, tiling=tiling, **__: tiling):
                want, got = (
                    module.cast_fp8_groups(given, rule, **ways)
                    for module, given in ((cast_reference, sources), (triton, whole))
                )
            for name in want._fields[:4]:
                one, other = getattr(want, name), getattr(got, name)
                assert (one is None) == (other is None)
                if one is not None:
                    nan = one.float().isnan() & other.float().isnan()  # of either sign
                    if name.endswith("data"):
                        one, other = one.view(torch.uint8), other.view(torch.uint8)
                    same = (one == other) | nan
                    found += difference(f"{name} of {granularity}, {tiling}", same, other, one)
    return found


def differences(device: str) -> tuple[int, list[str]]:
    """Number of cases, and what differs."""
    found = [line for case in CASES for line in operand_differences(case, device)]
    found += product_differences(device) + tiling_differences(device)
    return len(CASES) + 4, found + fp8_differences(device) + cast_differences(device)


if __name__ == "__main__":
    main(differences)
