"""The kernel that ends a step of delayed scaling against the reference. Run interpreted, and on a GPU."""

import itertools
import math
from collections.abc import Iterator

import torch

from megatron_lowprec.kernels.amax_history import reference

LENGTHS = (1, 2, 63, 64, 65, 200)
TENSORS = (1, 15, 16, 37)
RULES = ("max", "most_recent", "held")
STEPS = 4


def amaxes(length: int, tensors: int) -> Iterator[torch.Tensor]:
    """fp32 [STEPS, N], with zeros, subnormals, Inf and NaN among them; ever other ones."""
    generator = torch.Generator().manual_seed(1000 * length + tensors)
    found = torch.rand(STEPS, tensors, generator=generator) * 10
    special = torch.tensor([0.0, 1e-45, math.inf, math.nan, 3e38])
    where = torch.rand(STEPS, tensors, generator=generator) < 0.3
    drawn = special[torch.randint(0, 5, (STEPS, tensors), generator=generator)]
    return iter(torch.where(where, drawn, found))


def faults(device: str) -> Iterator[str]:
    """Every step whose result differs, a line each."""
    from megatron_lowprec.kernels.amax_history import triton

    for length, tensors, rule in itertools.product(LENGTHS, TENSORS, RULES):
        generator = torch.Generator().manual_seed(length)
        window = torch.rand(length, tensors, generator=generator) * 12
        if rule == "held":
            window = torch.where(torch.rand(window.shape, generator=generator) < 1 / length, window, 0.0)
        in_effect = torch.rand(tensors, generator=generator)
        found = [window.to(device), in_effect.to(device)]
        wanted = [window.clone(), in_effect.clone()]
        for step, newest in enumerate(amaxes(length, tensors)):
            mine, theirs = newest.to(device), newest.clone()
            triton.update_history_(mine, *found, rule == "max", rule == "held")
            reference.update_history_(theirs, *wanted, rule == "max", rule == "held")
            for name, one, other in zip(("newest", "window", "in effect"), [mine, *found], [theirs, *wanted]):
                if not torch.equal(one.cpu().view(torch.int32), other.view(torch.int32)):
                    yield f"length {length}, {tensors} tensors, {rule}, step {step}: {name}"


def differences(device: str) -> tuple[int, list[str]]:
    """(cases, faults)"""
    return len(LENGTHS) * len(TENSORS) * len(RULES) * STEPS, list(faults(device))
