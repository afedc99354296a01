"""Cases of the packed cast's kernels against the reference, bit for bit; run interpreted on a CPU, and on a GPU."""

from itertools import product

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.packed_cast import reference

PACKED = ("e4m3", "e5m6")


def matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers over 24 binades; a block of zeros, one of ties, and some with NaN, Inf, huge and tiny numbers."""
    generator = torch.Generator().manual_seed(rows)
    shape = (rows, columns)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-12, 12, shape, generator=generator).float())
    x[0, :128] = 0.0
    x[0, 0] = -0.0
    x[1, :128] = 1.0 + torch.arange(128) / 128  # half of a step of 2^-6, and less
    for row, value in enumerate((torch.nan, torch.inf, 3e38, 1e-39, -torch.inf), start=2):
        x[row, 7] = value
    x[3, 128:] *= 1e-38 if dtype == torch.float32 else 1e-28  # the interpreter flushes subnormal bf16 numbers
    return x.to(dtype)


def differences(device: str) -> tuple[int, list[str]]:
    """(comparisons, faults) of the kernels."""
    from megatron_lowprec.kernels.packed_cast import triton

    found, compared = [], 0
    for size, dtype, name in product(((8, 256), (37, 384)), (torch.bfloat16, torch.float32), PACKED):
        x, fmt = matrix(*size, dtype), FORMATS[name]
        want = reference.packed_cast(x, fmt)
        got = triton.packed_cast(x.to(device), fmt)
        values = reference.packed_decode(*want, fmt, dtype)
        pairs = {
            "codes": (got.codes.cpu(), want.codes),
            "scales": (got.scale.cpu(), want.scale),
            "values": (triton.packed_decode(*(t.to(device) for t in want), fmt, dtype).cpu(), values),
        }
        for what, (mine, theirs) in pairs.items():
            same = (mine == theirs) | (mine.isnan() & theirs.isnan()) if mine.is_floating_point() else mine == theirs
            compared += 1
            if not bool(same.all()):
                at = tuple((~same).nonzero()[0].tolist())
                case = f"{what} of {name} {size} {dtype}"
                found.append(f"{case}: {int((~same).sum())} differ, at {at} {mine[at]}, not {theirs[at]}")
    return compared, found
