"""Products of all experts by one launch, in bf16 and in FP8, beside their references."""

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import torch

from megatron_lowprec.kernels.grouped_fp8_gemm import reference as fp8_reference
from megatron_lowprec.kernels.grouped_gemm import reference as gemm_reference
from tests.kernels.grouped_operands import ROWS
from tests.kernels.mx_launch import difference


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
