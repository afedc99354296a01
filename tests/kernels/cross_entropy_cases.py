"""Cross entropy of a vocabulary in one piece or several against float64: reference and kernel, loss and gradient."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch

from tests.kernels.interpreted import steps_of


class Case(NamedTuple):
    """``ranks`` parts of ``width`` logits for each of ``tokens``, around ``offset``."""

    tokens: int
    width: int
    ranks: int
    dtype: torch.dtype
    offset: float = 0.0


def cases(large: bool) -> list[Case]:
    """Odd and even vocabularies, smaller and larger than a kernel's block."""
    sizes = [(7, 100, 1), (5, 4097, 2), (3, 8300, 1)]
    sizes += [(1000, 50304, 1), (513, 6288, 8), (33, 131072, 1), (1, 1, 3)] if large else []
    found = [Case(*size, dtype) for size, dtype in product(sizes, (torch.bfloat16, torch.float32))]
    return [*found, Case(9, 512, 1, torch.float32, 1e4), Case(9, 512, 2, torch.bfloat16, -3e3)]


def errors(case: Case, module: Any, device: str) -> Iterator[str]:
    """Losses and gradients of ``module`` further from float64 than rounding explains."""
    generator = torch.Generator().manual_seed(case.tokens * 100_000 + case.width)
    whole = case.width * case.ranks
    logits = 4 * torch.randn(case.tokens, whole, generator=generator) + case.offset
    logits[0] = case.offset  # all alike
    logits[-1, whole // 2] += 60.0  # nothing else counts
    targets = torch.randint(whole, (case.tokens,), generator=generator)
    dloss = torch.rand(case.tokens, generator=generator)
    dloss[case.tokens // 2] = 0.0
    logits, targets, dloss = logits.to(device, case.dtype), targets.to(device), dloss.to(device)

    exact = logits.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(exact, targets, reduction="none")
    want.backward(dloss.double())
    assert exact.grad is not None

    parts = [part.contiguous() for part in logits.chunk(case.ranks, 1)]
    firsts = [rank * case.width for rank in range(case.ranks)]
    sums = [module.logit_sums(part, targets, first) for part, first in zip(parts, firsts, strict=True)]
    maximum = torch.stack([s.maximum for s in sums]).amax(0)
    if not torch.equal(maximum, logits.float().amax(1)):
        yield f"{case}: the maximum is not the largest logit"
    total = torch.stack([s.total * (s.maximum - maximum).exp() for s in sums]).sum(0)
    log_total = total.log() + maximum
    loss = log_total - torch.stack([s.target for s in sums]).sum(0)
    # last bits of the logarithm, of the sum and of numbers as large as the offset
    unit = 2.0**-24
    slack = unit * (16 + 4 * log_total.abs().double() + 2 * case.width**0.5)
    over = (loss.double() - want.detach()).abs() - slack
    if not bool((over <= 0).all()):
        yield f"{case}: loss is off by {float(over.max()):.3g} more than rounding"

    gradients = [
        module.logits_gradient_(part, targets, first, log_total, dloss)
        for part, first in zip(parts, firsts, strict=True)
    ]
    if any(g.data_ptr() != p.data_ptr() for g, p in zip(gradients, parts, strict=True)):
        yield f"{case}: the gradient is not in the logits' place"
    got = torch.cat(gradients, 1)
    softmax = exact.detach().softmax(1)
    rounding = torch.finfo(case.dtype).eps * steps_of(module, device) * exact.grad.abs()
    # at the target 1 is subtracted, and the result has that number's last bits
    here = torch.zeros_like(softmax).scatter_(1, targets[:, None], 1.0)
    off = (2 * slack[:, None] * softmax + 2 * unit * here) * dloss[:, None] + 1e-12
    over = (got.double() - exact.grad).abs() - (1.01 * rounding + off)
    if got.dtype != case.dtype or not bool((over <= 0).all()):
        yield f"{case}: gradient is off by {float(over.max()):.3g} more than rounding"


def differences(device: str, module: Any = None) -> tuple[int, list[str]]:
    """(cases, faults) of the Triton kernels, or of another module with their functions."""
    if module is None:
        from megatron_lowprec.kernels.cross_entropy import triton as module
    tried = cases(large=device == "cuda")
    return len(tried), [line for case in tried for line in errors(case, module, device)]
