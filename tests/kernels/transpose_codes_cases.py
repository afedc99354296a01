"""Transposed codes by the kernel against the reference, byte for byte; run interpreted on a CPU, and on a GPU."""

from itertools import product

import torch

from megatron_lowprec.kernels.transpose_codes import reference

# one row, one column, whole tiles of 128, whole vectors of 16 bytes, and neither
SIZES = ((1, 1), (1, 300), (300, 1), (128, 256), (144, 272), (257, 131))
DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


def codes_of(size: tuple[int, int]) -> torch.Tensor:
    """uint8; every byte value occurs in a matrix of 256 entries and more."""
    entries = size[0] * size[1]
    generator = torch.Generator().manual_seed(entries)
    return (torch.arange(entries) % 256)[torch.randperm(entries, generator=generator)].to(torch.uint8).view(size)


def differences(device: str) -> tuple[int, list[str]]:
    """(cases, those that differ) of the kernel, alone and for groups."""
    from megatron_lowprec.kernels.transpose_codes import triton

    cases = list(product(SIZES, (1, 16, 256), DTYPES))
    found = []
    for size, multiple, dtype in cases:
        codes = codes_of(size).view(dtype)
        got = triton.transpose_codes(codes.to(device), multiple)
        want = reference.transpose_codes(codes, multiple)
        same = (got.dtype, got.stride()) == (dtype, want.stride())
        if not same or not torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8)):
            found.append(f"{dtype} {size}, rows padded to a multiple of {multiple}")
    groups = list(product(SIZES, (1, 3)))
    for size, count in groups:
        several = [codes_of(size).view(torch.float8_e4m3fn).roll(i, 0) for i in range(count)]
        got, want = triton.transpose_groups([each.to(device) for each in several]), reference.transpose_groups(several)
        if got.dtype != want.dtype or not torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8)):
            found.append(f"{count} of {size}")
    return len(cases) + len(groups), found
