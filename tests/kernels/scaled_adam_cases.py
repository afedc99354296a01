"""The kernels of Adam on narrow formats against the reference. Run interpreted, and on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.kernels.scaled_adam import reference
from megatron_lowprec.kernels.scaled_adam.reference import FORMAT_OF, STATE, Hyperparameters, Slot, Stream, encode_scale

# All of whole words, or else none is read so: of one entry, of a block and one more.
SIZES = ((16, 1024, 5008), (1, 37, 1025))
STATES = (
    (torch.float8_e4m3fn, torch.float16, torch.float16),
    (torch.float8_e5m2, torch.float8_e4m3fn, torch.float32),
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.float32),
)
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
WEIGHTS = (torch.float32, torch.bfloat16)
# Nearest; whole tensors; parts of a tensor that ranks cut along both dimensions, from within a group of draws on.
STREAMS = (
    None,
    Stream((0xFFFFFFFF, 7), columns=1 << 20),
    Stream(
        (3, 1 << 31),
        columns=40,
        first=53,
        whole_columns=80,
        first_column=40,
        rows=ShardSlice(8, gate_offset=5, gate_stride=16),
    ),
)
# of the gradients, a step each; the second changes nothing
FACTORS = (0.37, float("nan"), None)


def _chosen(sizes: tuple[int, ...], weight: torch.dtype, grad: torch.dtype, stream: Stream | None) -> bool:
    """To nearest, every pair of sizes, weight and gradient for each state; with a stream one pair of dtypes."""
    if stream is not None:
        return (weight, grad) == (torch.bfloat16, torch.float32)
    return (SIZES.index(sizes) + WEIGHTS.index(weight) + WEIGHTS.index(grad)) % 2 == 0


CASES = [
    case
    for case in itertools.product(SIZES, STATES, WEIGHTS, WEIGHTS, STREAMS)
    if _chosen(case[0], case[2], case[3], case[4])
]
# (case, whether the state has scales): state in no format of theirs is also updated without
RUNS = [
    (case, scaled) for case in CASES for scaled in (True, False) if scaled or not any(d in FORMAT_OF for d in case[1])
]
TENSORS = Slot._fields[:-1]


def slots_of(
    sizes: tuple[int, ...],
    state: tuple[torch.dtype, ...],
    weight: torch.dtype,
    grad: torch.dtype,
    device: str,
    stream: Stream | None = None,
) -> tuple[list[Slot], list[torch.Generator]]:
    """Zero moments and random main weights, of sizes a thousandfold apart."""
    found, generators = [], []
    for number, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(number)
        values = torch.randn(size, generator=generator) * 10.0 ** (2 * number - 3)
        scale = encode_scale(values.abs().amax(), state[2])
        decode = torch.tensor([1.0, 1.0, float(1 / scale)])
        zeros = [torch.zeros(size, dtype=dtype) for dtype in state[:2]]
        parts = [torch.zeros(size, dtype=grad), torch.zeros(size, dtype=weight), *zeros, (values * scale).to(state[2])]
        found.append(Slot(*(part.to(device) for part in (*parts, decode)), stream))
        generators.append(generator)
    return found, generators


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def faults(device: str) -> Iterator[str]:
    """Every tensor that differs after a step, a line each."""
    from megatron_lowprec.kernels.scaled_adam import triton

    for (sizes, state, weight, grad, stream), scaled in RUNS:
        name = f"{sizes}, {state}, weight {weight}, gradient {grad}, {stream}, {'scales' if scaled else 'no scales'}"
        mine, generators = slots_of(sizes, state, weight, grad, device, stream)
        theirs, _ = slots_of(sizes, state, weight, grad, "cpu", stream)
        for count, value in enumerate(FACTORS, 1):
            step = Hyperparameters(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=count)
            for ours, other, generator in zip(mine, theirs, generators, strict=True):
                noise = torch.randn(other.grad.shape, generator=generator)
                noise[::7] = 0.0
                other.grad.copy_(noise * torch.exp2(6 * noise.roll(1)) * 1e-4)
                ours.grad.copy_(other.grad)
            factor = None if value is None else torch.tensor(value)
            factor_here = None if factor is None else factor.to(device)
            scales = scales_here = None
            if scaled:
                amax, wanted = triton.update_amax(mine, step, factor_here), reference.update_amax(theirs, step, factor)
                if value == value and not torch.equal(amax.cpu(), wanted):
                    yield f"{name}: amax of step {count}"
                scales = torch.stack([encode_scale(part, dtype) for part, dtype in zip(wanted.unbind(1), state)], 1)
                scales_here = scales.to(device)
            before = [[tensor.clone() for tensor in slot[:-1]] for slot in mine]
            triton.update_(mine, step, scales_here, factor_here)
            reference.update_(theirs, step, scales, factor)
            changed = False
            for number, (ours, other, old) in enumerate(zip(mine, theirs, before, strict=True)):
                for part, a, b, c in zip(TENSORS, ours, other, old):
                    if not torch.equal(bits(a), bits(b)):
                        yield f"{name}: {part} of tensor {number} after step {count}, factor {value}"
                    changed |= not torch.equal(bits(a), bits(c))
            if changed != (value == value):
                yield f"{name}: {'' if changed else 'not '}changed by factor {value}"


def _same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether values are equal; NaN has many bits."""
    return torch.allclose(found.cpu().float(), wanted.float(), rtol=0.0, atol=0.0, equal_nan=True)


def code_faults(device: str) -> Iterator[str]:
    """Tensors that differ after a step from all 256 codes, also NaN and Inf, in a part of the state, a line each."""
    from megatron_lowprec.kernels.scaled_adam import triton

    codes = torch.arange(256).to(torch.uint8)
    for dtype in CODES:
        for part in range(3):
            state = [codes if number == part else torch.zeros_like(codes) for number in range(3)]
            parts = [torch.zeros(256), torch.zeros(256), *(each.view(dtype) for each in state), torch.ones(3)]
            mine, theirs = (Slot(*(each.to(where, copy=True) for each in parts)) for where in (device, "cpu"))
            step = Hyperparameters(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
            amax, wanted = triton.update_amax([mine], step), reference.update_amax([theirs], step)
            if not _same(amax, wanted):
                yield f"{dtype}: amax from all codes of {STATE[part]}"
            scales = torch.stack([encode_scale(each, dtype) for each in wanted.unbind(1)], 1)
            triton.update_([mine], step, scales.to(device))
            reference.update_([theirs], step, scales)
            for name, a, b in zip(TENSORS, mine, theirs):
                if not _same(a, b):
                    yield f"{dtype}: {name} from all codes of {STATE[part]}"


def differences(device: str) -> tuple[int, list[str]]:
    """(comparisons, faults)"""
    compared = sum(1 + scaled + len(case[0]) * len(TENSORS) for case, scaled in RUNS)
    of_codes = len(CODES) * 3 * (1 + len(TENSORS))
    return len(FACTORS) * compared + of_codes, [*faults(device), *code_faults(device)]
