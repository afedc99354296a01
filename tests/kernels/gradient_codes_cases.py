"""The kernels of gradients in FP8 codes against the reference. Run interpreted, and on a GPU."""

import math
from collections.abc import Iterator
from itertools import product

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.gradient_codes import reference
from tests.kernels.multi_tensor_cast_cases import tensors

SIZES = (1, 16, 4097, 257 * 4096 + 16)  # the last has more blocks than a launch has programs
LARGEST = (1.0, 447.0, 2.0**-130, 3e38, 0.0, math.inf, math.nan)
MU = (1.0, 0.7331, 2.0)
# Of a buffer of 3 * 4096 entries, also empty ones; all multiples of 16, or not.
BOUNDS = ([(0, 4096), (4096, 4096), (4112, 12000)], [(3, 5), (5, 4103), (9000, 12288)])


def differs(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether codes differ, but for the sign of NaN."""
    found = found.cpu()
    return not ((found == wanted) | (((wanted & 0x7F) == 0x7F) & (found == 0x7F))).all()


def scales(device: str) -> Iterator[str]:
    """Scales of many tensors whose bits differ, a line each."""
    from megatron_lowprec.kernels.gradient_codes import triton

    draws = torch.rand(289, generator=torch.Generator().manual_seed(7))
    amax = torch.cat([torch.tensor(LARGEST), torch.tensor([2.0**-149, 2.0**-126, 448.0, 57344.0]), draws * 500])
    for name, mu in product(("e4m3", "e5m2"), MU):
        fmt, factor = FORMATS[name], torch.tensor([mu])
        found = triton.gradient_scale(amax.to(device), fmt, factor.to(device)).cpu()
        wanted = reference.gradient_scale(amax, fmt, factor)
        if not torch.equal(found.nan_to_num(-1), wanted.nan_to_num(-1)):
            yield f"{name}: scales by mu {mu}"


def casts(device: str) -> Iterator[str]:
    """Casts whose codes or amax differ, a line each."""
    from megatron_lowprec.kernels.gradient_codes import triton

    for name, size, largest, mu in product(("e4m3", "e5m2"), SIZES, LARGEST, MU):
        if size == SIZES[-1] and (largest, mu) != (447.0, 0.7331):
            continue
        values = torch.randn(size, generator=torch.Generator().manual_seed(size)).clamp(-1, 1) * min(largest, 1e38)
        values[-1] = -largest
        found, wanted = (torch.zeros(size, dtype=torch.uint8, device=where) for where in (device, "cpu"))
        amax, other = (torch.full((1,), 7.0, device=where) for where in (device, "cpu"))
        factor = torch.tensor([mu])
        triton.cast_gradient_(values.to(device), found, amax, factor.to(device), FORMATS[name])
        reference.cast_gradient_(values, wanted, other, factor, FORMATS[name])
        if differs(found, wanted) or not torch.equal(amax.cpu().nan_to_num(-1), other.nan_to_num(-1)):
            yield f"{name}, {size} entries up to {largest}, mu {mu}"


def buffers(device: str) -> Iterator[str]:
    """Counts, requantized codes and sums that differ, a line each."""
    from megatron_lowprec.kernels.gradient_codes import triton

    for name, ranks, bounds in product(("e4m3", "e5m2"), (1, 3), BOUNDS):
        fmt = FORMATS[name]
        values = torch.stack(tensors((3 * 4096,) * ranks, 0, "cpu")) * torch.logspace(-3, 1, ranks)[:, None]
        codes = reference.fp8_codes(values.nan_to_num(), torch.ones(1), fmt)
        if triton.count_saturated(codes.to(device), fmt).cpu() != reference.count_saturated(codes, fmt):
            yield f"{name}: saturated codes of {ranks} ranks"
        ratio = torch.tensor([0.25, 2.0**-12, math.nan])
        found, wanted = codes[0].to(device, copy=True), codes[0].clone()
        triton.requantize_(found, bounds, ratio.to(device), fmt)
        reference.requantize_(wanted, bounds, ratio, fmt)
        if differs(found, wanted):
            yield f"{name}: requantized {bounds}"
        for rounds in (False, True):
            factor = torch.tensor([0.3, 1.0, 2.0**-20])
            total, sums = (torch.full((3 * 4096,), 7.0, device=where) for where in (device, "cpu"))
            triton.sum_codes_(codes.to(device), bounds, factor.to(device), fmt, rounds, total)
            reference.sum_codes_(codes, bounds, factor, fmt, rounds, sums)
            if not torch.equal(total.cpu(), sums):
                yield f"{name}: sum over {ranks} ranks of {bounds}, {rounds=}"


def every_code(device: str) -> Iterator[str]:
    """Sums and requantized codes of all 256, of NaN and Inf as well, that differ, a line each."""
    from megatron_lowprec.kernels.gradient_codes import triton

    codes = torch.arange(256).to(torch.uint8)
    received, bounds, one = torch.stack([codes, codes.roll(1)]), [(0, 256)], torch.ones(1)
    for name in ("e4m3", "e5m2"):
        fmt, found, wanted = FORMATS[name], codes.to(device, copy=True), codes.clone()
        triton.requantize_(found, bounds, one.to(device), fmt)
        reference.requantize_(wanted, bounds, one, fmt)
        if differs(found, wanted):
            yield f"{name}: requantized codes"
        for ranks, rounds in ((1, False), (2, True)):
            total, sums = torch.zeros(256, device=device), torch.zeros(256)
            triton.sum_codes_(received[:ranks].to(device), bounds, one.to(device), fmt, rounds, total)
            reference.sum_codes_(received[:ranks], bounds, one, fmt, rounds, sums)
            if not torch.allclose(total.cpu(), sums, rtol=0.0, atol=0.0, equal_nan=True):
                yield f"{name}: sum over {ranks} ranks of all codes"


def far_apart(device: str) -> Iterator[str]:
    """A sum over ranks whose codes lie more than 2^31 bytes apart."""
    from megatron_lowprec.kernels.gradient_codes import triton

    stride = 2**30
    received = torch.empty(2 * stride + 16, dtype=torch.uint8, device=device).as_strided((3, 16), (stride, 1))
    received[:] = torch.tensor([[0x38], [0x40], [0x48]])  # 1, 2 and 4 in E4M3; nothing writes the bytes between them
    total = torch.zeros(16, device=device)
    triton.sum_codes_(received, [(0, 16)], torch.ones(1, device=device), FORMATS["e4m3"], False, total)
    if total.tolist() != [7.0] * 16:
        yield f"sum over ranks {stride} bytes apart: {total.tolist()}"


def differences(device: str) -> tuple[int, list[str]]:
    """(cases, faults)"""
    small = 2 * (len(SIZES) - 1) * len(LARGEST) * len(MU)
    found = [*scales(device), *casts(device), *buffers(device), *every_code(device), *far_apart(device)]
    return 2 * len(MU) + small + 2 + 2 * 2 * len(BOUNDS) * 4 + 2 * 3 + 1, found
