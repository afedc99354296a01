"""LayerNorm and RMSNorm against float64: reference and kernel, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from tests.kernels.interpreted import steps_of

EPS = 1e-5


class Case(NamedTuple):
    """Rows of ``width``: normal numbers around ``offset``, one row of zeros, one constant, one large."""

    rows: int
    width: int
    dtype: torch.dtype
    centered: bool
    offset: float = 0.0


class Tensors(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    dy: torch.Tensor


def cases(large: bool) -> list[Case]:
    """Odd sizes, both kinds and dtypes. The interpreter takes seconds for large ones, a compiler half a second each."""
    bf16, fp32 = torch.bfloat16, torch.float32
    shifted = [Case(33, 257, dtype, True, 1000.0) for dtype in (bf16, fp32)]
    if not large:
        sizes = ((5, 64), (70, 96), (9, 1000), (3, 1536))
        return shifted + [Case(*size, *kind) for size, kind in product(sizes, product((bf16, fp32), (True, False)))]
    wide = ((777, 2048), (513, 4096), (130, 8192), (3, 20000))
    found = [Case(4097, 1024, dtype, centered) for dtype, centered in product((bf16, fp32), (True, False))]
    found += [Case(*size, bf16, True) for size in wide]
    return [*shifted, *found, Case(1, 1, fp32, True), Case(70, 96, bf16, True), Case(513, 4096, fp32, False)]


def tensors(case: Case, device: str) -> Tensors:
    generator = torch.Generator().manual_seed(case.rows * 10000 + case.width)
    x = torch.randn(case.rows, case.width, generator=generator) + case.offset
    x[0] = 0.0
    if case.rows > 2:
        x[1] = 7.0
        x[2] *= 1e4
    weight, bias = 1 + 0.3 * torch.randn(2, case.width, generator=generator)
    dy = torch.randn(case.rows, case.width, generator=generator)
    every = (t.to(device, case.dtype) for t in (x, weight, bias, dy))
    x, weight, bias, dy = every
    return Tensors(x, weight, bias if case.centered else None, dy)


def exact(case: Case, t: Tensors) -> dict[str, torch.Tensor]:
    """By torch's autograd in float64."""
    x, weight = t.x.double().requires_grad_(), t.weight.double().requires_grad_()
    bias = None if t.bias is None else t.bias.double().requires_grad_()
    if bias is None:
        y = torch.nn.functional.rms_norm(x, (case.width,), weight, EPS)
    else:
        y = torch.nn.functional.layer_norm(x, (case.width,), weight, bias, EPS)
    y.backward(t.dy.double())
    found = {"y": y.detach(), "dx": x.grad, "dweight": weight.grad}
    return {k: v for k, v in (found | {"dbias": None if bias is None else bias.grad}).items() if v is not None}


def errors(case: Case, t: Tensors, module: Any, steps: float = 0.5) -> Iterator[str]:
    """Every output of ``module``'s norm whose distance from float64 is more than rounding by ``steps`` explains."""
    got = module.norm(t.x, t.weight, t.bias, EPS)
    dx, dw, db = module.norm_backward(t.dy, t.x, t.weight, got.mean, got.rstd)
    found = {"y": got.y, "dx": dx, "dweight": dw} | ({} if db is None else {"dbias": db})
    want = exact(case, t)
    assert found.keys() == want.keys()
    x = t.x.double()
    centered = x - x.mean(1, keepdim=True) if case.centered else x
    rstd = (centered.square().mean(1, keepdim=True) + EPS).rsqrt()
    # How far an fp32 x_hat may be off: a few of its own last bits, and those of x that centering has cancelled.
    unit = 2.0**-24
    off = 8 * unit * (1 + x.abs().amax(1, keepdim=True) * rstd * case.centered)
    g, w = t.dy.double().abs(), t.weight.double().abs()
    x_hat = (centered * rstd).abs() + off
    wg = (g * w).mean(1, keepdim=True)
    many = 4 * unit * case.rows**0.5
    slack = {
        "y": off * w + 4 * unit * x_hat * w,
        "dx": rstd * (off * (g * w).amax(1, keepdim=True) * 4 + 16 * unit * (g * w + x_hat * wg + wg)),
        "dweight": (off * g).sum(0) + many * (g * x_hat).sum(0),
        "dbias": many * g.sum(0),
    }
    for name, value in found.items():
        rounding = torch.finfo(case.dtype).eps * steps * want[name].abs()
        over = (value.double() - want[name]).abs() - (1.01 * rounding + slack[name] + 1e-30)
        if value.dtype != case.dtype or not bool((over <= 0).all()):
            yield f"{case}: {name} is off by {float(over.max()):.3g} more than rounding, dtype {value.dtype}"


def errors_with_residual(case: Case, t: Tensors, module: Any, steps: float = 0.5) -> Iterator[str]:
    """A residual's gradient is added to the rounded gradient of x; nothing else changes."""
    got = module.norm(t.x, t.weight, t.bias, EPS)
    saved = (t.dy, t.x, t.weight, got.mean, got.rstd)
    dresidual, amax = t.dy.flip(1) * 3, torch.zeros(1, device=t.dy.device)
    plain, *others = module.norm_backward(*saved)
    joined, *others_beside = module.norm_backward(*saved, dresidual, amax)
    if not torch.equal(amax[0], joined.abs().amax().float()):
        yield f"{case}: the amax of dx is {float(amax)} instead of {float(joined.abs().amax())}"
    want = plain.double() + dresidual.double()
    over = (joined.double() - want).abs() - 1.01 * torch.finfo(case.dtype).eps * steps * want.abs()
    if joined.dtype != case.dtype or not bool((over <= 0).all()):
        yield f"{case}: dx with a residual is off by {float(over.max()):.3g} more than rounding, dtype {joined.dtype}"
    yield from unequal(f"{case}, with a residual and without", others, others_beside)


def differences(device: str, module: Any = None) -> tuple[int, list[str]]:
    """(cases, faults) of the Triton kernels, or of another module with their functions."""
    if module is None:
        from megatron_lowprec.kernels.layernorm import triton as module
    found, tried = list[str](), cases(large=device == "cuda")
    for case in tried:
        t = tensors(case, device)
        steps = steps_of(module, device)
        found += [*errors(case, t, module, steps), *errors_with_residual(case, t, module, steps)]
        if device == "cuda":
            runs = (module.norm_backward(t.dy, t.x, t.weight, *module.norm(*t[:3], EPS)[1:]) for _ in range(2))
            found += unequal(str(case), *runs)
    return len(tried), found


def unequal(what: str, first: Sequence[torch.Tensor | None], second: Sequence[torch.Tensor | None]) -> list[str]:
    """A fault where two runs do not give the same bits."""
    same = all(a is None or b is None or torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return [] if same else [f"{what}: two runs differ"]
