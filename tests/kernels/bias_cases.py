"""A bias alone, with GELU, and with dropout and a residual; SwiGLU; rope: references and kernels.

All are compared with float64, but rope's kernel with its reference, whose bits a GPU has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from megatron_lowprec.kernels.bias import reference as bias_reference
from megatron_lowprec.kernels.dropout import reference as dropout_reference
from megatron_lowprec.kernels.gelu import reference as gelu_reference
from megatron_lowprec.kernels.philox.reference import draw_bits
from megatron_lowprec.kernels.rope import reference as rope_reference
from megatron_lowprec.kernels.swiglu import reference as swiglu_reference
from tests.kernels.interpreted import steps_of

DTYPES = (torch.bfloat16, torch.float32)


def sizes(large: bool) -> list[tuple[int, int]]:
    """Odd and even, smaller and larger than a kernel's tile."""
    return [(5, 64), (33, 1000), (3, 2056)] + ([(1, 1), (4097, 3072), (1025, 8192), (20000, 96)] if large else [])


def tensors(rows: int, columns: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """(y, bias, dout): y over many binades, with a row of zeros and one of huge numbers."""
    generator = torch.Generator().manual_seed(rows * 10_000 + columns)
    y, dout = 3 * torch.randn(2, rows, columns, generator=generator)
    y *= torch.exp2(torch.randint(-8, 3, (rows, columns), generator=generator).float())
    y[0] = 0.0
    y[rows // 2] *= 1e25
    return [t.to(device, dtype) for t in (y, torch.randn(columns, generator=generator), dout)]


def bias_errors(rows: int, columns: int, dtype: torch.dtype, module: Any, device: str) -> Iterator[str]:
    """Sums that do not have torch's bits; cut ones where the interpreter runs the kernel."""
    y, bias, _ = tensors(rows, columns, dtype, device)
    want = y + bias
    got = module.add_bias(y.clone(), bias)
    step = want.abs() * torch.finfo(dtype).eps if steps_of(module, device) > 0.5 and dtype == torch.bfloat16 else 0.0
    if got.dtype != dtype or not bool(((got - want).abs() <= step).all()):
        yield f"bias {rows}x{columns} {dtype}: differs from torch's"


def gelu_errors(rows: int, columns: int, dtype: torch.dtype, module: Any, device: str) -> Iterator[str]:
    """Outputs and gradients further from float64 than rounding explains."""
    y, bias, dout = tensors(rows, columns, dtype, device)
    # Both are added in fp32: what that loses is not the function's.
    x = (y.float() + bias.float()).double().requires_grad_()
    # torch's own takes 1 + tanh, which leaves no digits far on the negative side
    want = x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    torch.testing.assert_close(want, torch.nn.functional.gelu(x, approximate="tanh"), rtol=1e-14, atol=1e-14)
    want.backward(dout.double())
    assert x.grad is not None
    dy_want = x.grad
    got = module.bias_gelu(y, bias)
    dy, dbias = module.bias_gelu_backward(dout, y, bias)
    steps, unit, eps = steps_of(module, device), 2.0**-24, torch.finfo(dtype).eps
    value, g = x.detach().abs(), dout.double().abs()
    # A GPU's exponential and division are good to two last bits each, and the exponential's argument carries some of
    # its own, as far as it reaches.
    reach = (1.6 * value * (1 + 0.045 * value.clamp(max=20) ** 2)).clamp(max=100)
    # compiled, a factor of x that is less than the smallest normal number is 0; so it is from -20 on
    near = value.clamp(max=20)
    lost = {"out": 2.0**-126 * near, "dy": 2.0**-126 * g * (1 + 1.6 * near * (1 + 0.135 * near**2))}
    slack = {
        "out": 12 * unit * (1 + reach) * want.detach().abs() + lost["out"] + 1e-37,
        "dy": 16 * unit * g * (1 + reach * (want.detach().abs() / (value + 1e-30) * (1 + near))) + lost["dy"] + 1e-37,
    }
    slack["dbias"] = slack["dy"].sum(0) + 4 * unit * rows**0.5 * dy_want.abs().sum(0)
    exact = {"out": want.detach(), "dy": dy_want, "dbias": dy_want.sum(0)}
    for (name, value), found in zip(exact.items(), (got, dy, dbias), strict=True):
        over = (found.double() - value).abs() - (1.01 * eps * steps * value.abs() + slack[name])
        if found.dtype != dtype or not bool((over <= 0).all()):
            at = int(over.argmax())
            yield (
                f"gelu {rows}x{columns} {dtype}: {name} is {found.flatten()[at]} instead of {value.flatten()[at]}, "
                f"{int((~(over <= 0)).sum())} entries are off"
            )


def swiglu_errors(rows: int, columns: int, dtype: torch.dtype, module: Any, device: str) -> Iterator[str]:
    """Outputs and gradients further from float64 than rounding explains; the gate covers many binades."""
    gate, _, dout = tensors(rows, columns, dtype, device)
    h = torch.cat((gate, dout.flip(0)), 1)
    exact_h = h.double().requires_grad_()
    value, up = exact_h.chunk(2, -1)
    want = value * torch.sigmoid(value) * up
    want.backward(dout.double())
    assert exact_h.grad is not None
    value, up, g = value.detach().abs(), up.detach().abs(), dout.double().abs()
    steps, unit, eps = steps_of(module, device), 2.0**-24, torch.finfo(dtype).eps
    # as GELU's: two last bits each of the exponential and the division, and the argument's own as far as it reaches;
    # a factor below the smallest normal number is 0, so it is from -88 on
    reach = 1 + value.clamp(max=100)
    lost = 2.0**-126 * reach
    factor = torch.sigmoid(exact_h.detach().chunk(2, -1)[0])
    slack = {
        "out": 12 * unit * reach * want.detach().abs() + lost * up,
        "dgate": 16 * unit * reach * g * up * factor * (1 + value * (1 - factor)) + lost * g * up * reach,
        "dup": 12 * unit * reach * g * value * factor + lost * g,
    }
    dgate, dup = module.swiglu_backward(dout, h).chunk(2, -1)
    found = {"out": module.swiglu(h), "dgate": dgate, "dup": dup}
    exact = dict(zip(found, (want.detach(), *exact_h.grad.chunk(2, -1)), strict=True))
    weights = torch.rand(rows, generator=torch.Generator().manual_seed(rows)).to(device)
    dh, found["dweights"] = module.weighted_swiglu_backward(dout, h, weights)
    found |= zip(("weighted dgate", "weighted dup"), dh.chunk(2, -1), strict=True)
    for name in ("dgate", "dup"):
        slack[f"weighted {name}"] = slack[name] * weights[:, None] + 2 * unit * exact[name].abs()
        exact[f"weighted {name}"] = exact[name] * weights.double()[:, None]
    terms = (want.detach() * dout.double()).abs().sum(1)
    slack["dweights"] = (slack["out"] * g).sum(1) + 4 * unit * columns**0.5 * terms
    exact["dweights"] = (want.detach() * dout.double()).sum(1)
    for name, got in found.items():
        of, steps_in = (torch.float32, 0) if name == "dweights" else (dtype, steps)
        over = (got.double() - exact[name]).abs() - (1.01 * eps * steps_in * exact[name].abs() + slack[name] + 1e-37)
        if got.dtype != of or not bool((over <= 0).all()):
            yield f"swiglu {rows}x{columns} {dtype}: {int((~(over <= 0)).sum())} entries of {name} are off"


def rope_errors(rows: int, columns: int, dtype: torch.dtype, module: Any, device: str) -> Iterator[str]:
    """Rotations other than the reference's by a bit, or in the interpreter by a step of each rounding.

    Heads lie apart as in the output of linear_qkv, gradients as attention leaves them.
    """
    width, turned = (24, 12) if columns % 16 else (16, 16)
    generator = torch.Generator().manual_seed(rows + columns)
    mixed = torch.randn(rows, 2, 3, 4 * width + 8, generator=generator).to(device, dtype)
    x = mixed[..., : 4 * width].unflatten(-1, (4, width))
    dout = torch.randn(2, 12, rows, width, generator=generator).to(device, dtype).permute(2, 0, 1, 3)
    angles = (100 * torch.randn(rows, 1, 1, turned, generator=generator)).to(device)
    eps = 0.0 if device == "cuda" else 4 * torch.finfo(dtype).eps
    for name, of in (("rope", x), ("rope_backward", dout)):
        turn = rope_reference.cos_and_sin(angles, dtype)
        got, want = getattr(module, name)(of, *turn), getattr(rope_reference, name)(of, *turn)
        flat = of.flatten(2, 3) if of.dim() == 5 else of
        bound = eps * (flat.float().abs() + flat[..., :turned].float().abs().amax(-1, keepdim=True))
        if got.dtype != dtype or got.shape != want.shape or not bool(((got - want).float().abs() <= bound).all()):
            yield f"{name} {rows}x{columns} {dtype}: differs from the reference"


def dropout_errors(rows: int, columns: int, dtype: torch.dtype, module: Any, device: str) -> Iterator[str]:
    """As above; which entries are dropped must be what the stream says, to the last one."""
    x, bias, dout = tensors(rows, columns, dtype, device)
    residual = dout.flip(0).contiguous()
    steps, eps, unit = steps_of(module, device), torch.finfo(dtype).eps, 2.0**-24
    words = torch.tensor([-1234567, 987654321], dtype=torch.int32)
    draws = draw_bits((int(words[0]) & 0xFFFFFFFF, int(words[1])), (0, 0), rows, columns).to(device)
    for p, with_bias in product((0.0, 0.1, 0.5), (True, False)):
        key = words.to(device) if p else None
        kept = (draws >= round(p * 65536)).double()
        factors = kept * 65536 / (65536 - round(p * 65536))
        b = bias if with_bias else None
        v = x.double() + (bias.double() if with_bias else 0.0)
        dx_want = dout.double() * factors
        exact = {"out": residual.double() + v * factors, "dx": dx_want, "dbias": dx_want.sum(0)}
        out = module.bias_dropout_add(x, b, residual, p, key)
        dx, dbias = module.bias_dropout_add_backward(dout, p, key, bias.dtype if with_bias else None)
        assert (dbias is not None) == with_bias
        slack = {
            "out": 4 * unit * (residual.double().abs() + (x.double().abs() + bias.double().abs()) * factors),
            "dx": 2 * unit * dx_want.abs(),
            "dbias": 4 * unit * rows**0.5 * dx_want.abs().sum(0),
        }
        for (name, value), found in zip(exact.items(), (out, dx, dbias), strict=True):
            if found is None:
                continue
            over = (found.double() - value).abs() - (1.01 * eps * steps * value.abs() + slack[name] + 1e-37)
            if found.dtype != dtype or not bool((over <= 0).all()):
                wrong = int((~(over <= 0)).sum())
                yield f"dropout {p} of {rows}x{columns} {dtype}, bias {with_bias}: {wrong} entries of {name} are off"


def differences(device: str, reference: bool = False) -> tuple[int, list[str]]:
    """(cases, faults) of the Triton kernels, or of the references."""
    bias: Any = bias_reference
    gelu: Any = gelu_reference
    dropout: Any = dropout_reference
    swiglu: Any = swiglu_reference
    rope: Any = rope_reference
    if not reference:
        from megatron_lowprec.kernels.bias import triton as bias
        from megatron_lowprec.kernels.dropout import triton as dropout
        from megatron_lowprec.kernels.gelu import triton as gelu
        from megatron_lowprec.kernels.rope import triton as rope
        from megatron_lowprec.kernels.swiglu import triton as swiglu
    cases = list(product(sizes(large=device == "cuda"), DTYPES))
    checks = (
        (bias_errors, bias),
        (gelu_errors, gelu),
        (swiglu_errors, swiglu),
        (dropout_errors, dropout),
        (rope_errors, rope),
    )
    found = [line for check, module in checks for size, dtype in cases for line in check(*size, dtype, module, device)]
    return len(checks) * len(cases), found
