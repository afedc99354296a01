"""The kernel that casts many tensors to FP8 against the reference. Run interpreted, and on a GPU."""

import math
from collections.abc import Iterator

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.multi_tensor_cast import reference

# Entries of each tensor: all multiples of 16, or else none is read by whole words; more blocks than one has programs.
SIZES = ((4096, 16, 32 * 48, 9 * 4096 + 16), (1, 4095, 0, 4097, 10007), (257 * 4096 + 16, 64))
SCALES = (1.0, 3.7, 2.0**-9, math.nan)
OFFSETS = (0, 1, 32)  # where they begin in their memory
BUCKETS = 200  # of 8 billion gradients, in Megatron-core's smallest buckets


def tensors(sizes: tuple[int, ...], offset: int, device: str) -> list[torch.Tensor]:
    """fp32 numbers of any bits, the middles between codes, zeros of both signs, Inf and NaN."""
    generator = torch.Generator().manual_seed(sum(sizes))
    found = []
    for size in sizes:
        bits = torch.randint(-(2**31), 2**31, (size + offset,), generator=generator).to(torch.int32)
        x = bits.view(torch.float32).clone()
        x[::3] = torch.randn(size + offset, generator=generator)[::3]
        x[1::5] = (torch.randint(-512, 512, (size + offset,), generator=generator) / 16)[1::5]  # many of them ties
        special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 464.0, 3e38])
        x[offset : offset + 8] = special[: max(0, min(8, size))]
        found.append(x.to(device)[offset:])
    return found


def inner(codes: list[torch.Tensor], sizes: tuple[int, ...], offset: int) -> list[torch.Tensor]:
    return [code[offset : offset + n] for code, n in zip(codes, sizes, strict=True)]


def faults(device: str) -> Iterator[str]:
    """Every tensor whose codes differ, or whose neighbours in memory were written, a line each."""
    from megatron_lowprec.kernels.multi_tensor_cast import triton

    for name in ("e4m3", "e5m2"):
        for sizes in SIZES:
            for offset in OFFSETS:
                values = tensors(sizes, offset, device)
                scales = torch.tensor([SCALES[i % len(SCALES)] for i in range(len(sizes))], device=device)
                found, wanted = (
                    [torch.full((n + offset + 64,), 0x55, dtype=torch.uint8, device=where) for n in sizes]
                    for where in (device, "cpu")
                )
                triton.multi_tensor_cast_(values, scales, FORMATS[name], inner(found, sizes, offset))
                values = [value.cpu() for value in values]
                reference.multi_tensor_cast_(values, scales.cpu(), FORMATS[name], inner(wanted, sizes, offset))
                for i, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
                    nan_of_other_sign = ((theirs & 0x7F) == 0x7F) & (mine.cpu() == 0x7F)
                    if not ((mine.cpu() == theirs) | nan_of_other_sign).all():
                        yield f"{name}, {sizes[i]} entries from {offset}, scale {scales[i]}"


def tables_made_again(device: str) -> Iterator[str]:
    """Buckets of gradients are cast one after the other, each step alike: copying a table waits for the device."""
    from megatron_lowprec.kernels.multi_tensor_cast import triton

    for _ in range(2):
        before = triton.address_table.cache_info().misses
        for bucket in range(BUCKETS):
            triton.address_table(((64 * bucket, 16 * bucket, 16),), torch.device(device))
    if made := triton.address_table.cache_info().misses - before:
        yield f"{made} of {BUCKETS} tables are copied to the device again in the second step"


def differences(device: str) -> tuple[int, list[str]]:
    """(cases, faults)"""
    return 2 * len(OFFSETS) * sum(map(len, SIZES)) + 1, [*faults(device), *tables_made_again(device)]
