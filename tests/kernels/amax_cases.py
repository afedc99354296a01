"""Kernels that find the amax of what they write (norms, GELU, gradients of GELU and dropout), or of operands.

Run interpreted, and on a GPU.
"""

from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch

from megatron_lowprec.kernels.amax.reference import raise_to_amax
from megatron_lowprec.kernels.quantize.rule import Direction

SIZES = ((70, 96), (9, 1000), (3, 2056))
# dtype of what is written, amax before: a smaller one is raised and a larger one stays
STARTS = ((torch.bfloat16, 0.0), (torch.bfloat16, 1e6), (torch.float32, 0.0))

# transform along rows and along columns (None: direction not asked for), whether it rounds, dtype, whether a NaN
OPERANDS = (
    (0, None, False, torch.bfloat16, False),
    (0, 16, True, torch.bfloat16, False),
    (16, 0, True, torch.bfloat16, True),
    (None, 16, False, torch.bfloat16, False),
    (64, 64, True, torch.float32, False),
    (0, 256, True, torch.bfloat16, False),
    (128, 128, False, torch.bfloat16, False),
    (0, 0, False, torch.float32, True),
)

SUMS = ((1, 1, 40), (2, 70, 33), (1, 129, 64))


def made(rows: int, width: int, dtype: torch.dtype, device: str) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Kernel -> what it writes, raising the amax that it is given."""
    from megatron_lowprec.kernels.dropout.triton import bias_dropout_add_backward
    from megatron_lowprec.kernels.gelu.triton import bias_gelu, bias_gelu_backward
    from megatron_lowprec.kernels.layernorm.triton import norm
    from megatron_lowprec.kernels.swiglu.triton import swiglu, swiglu_backward

    generator = torch.Generator().manual_seed(rows * width)
    x, y = (torch.randn(2, rows, width, generator=generator) * 3).to(device, dtype)
    key = torch.tensor([7, -8], dtype=torch.int32, device=device)
    weight, bias = torch.randn(2, width, generator=generator).to(device, dtype)
    return {
        "layernorm": lambda amax: norm(x, weight, bias, 1e-5, amax).y,
        "rmsnorm": lambda amax: norm(x, weight, None, 1e-5, amax).y,
        "bias_gelu": lambda amax: bias_gelu(x, bias, amax),
        "bias_gelu_backward": lambda amax: bias_gelu_backward(x, y, bias, amax=amax)[0],
        "swiglu": lambda amax: swiglu(torch.cat((x, y), 1), amax),
        "swiglu_backward": lambda amax: swiglu_backward(x, torch.cat((y, x), 1), amax),
        "dropout": lambda amax: bias_dropout_add_backward(x, 0.3, key, None, amax=amax)[0],
        "dropout, bias": lambda amax: bias_dropout_add_backward(x, 0.3, key, dtype, amax=amax)[0],
        "nothing dropped": lambda amax: bias_dropout_add_backward(x, 0.0, None, None, amax=amax)[0],
        "of a NaN": lambda amax: bias_gelu(torch.where(x > x.max() - 1e-6, torch.nan, x), bias, amax),
    }


def faults(device: str) -> Iterator[str]:
    """Every amax that is not that of the output, a line each."""
    for rows, width in SIZES:
        for dtype, before in STARTS:
            for name, run in made(rows, width, dtype, device).items():
                amax = torch.full((1,), before, device=device)
                raise_to_amax(largest := torch.full((1,), before, device=device), run(amax))
                if not torch.equal(amax, largest) and not (amax.isnan().all() and largest.isnan().all()):
                    yield f"{name} {rows}x{width} {dtype} from {before}: {amax.item()}, not {largest.item()}"


def sum_faults(device: str) -> Iterator[str]:
    """Sums over rows, of gradients of biases, further from the reference than the order of addition explains."""
    from megatron_lowprec.kernels.bias_grad import reference, triton

    generator = torch.Generator().manual_seed(1)
    for shape, dtype in ((size, dtype) for size in SUMS for dtype in (torch.float32, torch.bfloat16)):
        partial = torch.randn(shape, generator=generator).to(device)
        got, want = triton.sum_partials(partial, dtype), reference.sum_partials(partial, dtype)
        bound = partial.abs().sum(1) * shape[1] * 2.0**-24 + want.abs() * torch.finfo(dtype).eps
        if got.dtype != dtype or not bool(((got.float() - want.float()).abs() <= bound).all()):
            yield f"sums over rows of {shape} as {dtype} differ"


def operand_faults(device: str) -> Iterator[str]:
    """Amaxes of operands behind transforms that are not the reference's; few programs share the tiles."""
    from megatron_lowprec.kernels.amax import reference, triton

    for rows, columns, rounds, dtype, broken in OPERANDS:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(137, 640, generator=generator)
        x[130, 570] = torch.nan if broken else 5.0
        signs = {g: (torch.randint(0, 2, (g,), generator=generator) * 2.0 - 1.0) * g**-0.5 for g in (16, 64, 128, 256)}
        ways: dict[str, Direction | None] = {
            name: None if g is None else Direction(signs=signs[g].to(device) if g else None)
            for name, g in (("rows", rows), ("columns", columns))
        }
        x = x.to(device, dtype)
        with patch.object(triton, "_WARPS", 12):
            got = triton.operand_amaxes(x, **ways, rounds_transform=rounds)
        want = reference.operand_amaxes(x, **ways, rounds_transform=rounds)
        if not torch.equal(got.nan_to_num(-1.0), want.nan_to_num(-1.0)):
            yield f"operands behind {rows} and {columns}, {dtype}: {got.tolist()}, not {want.tolist()}"


def differences(device: str) -> tuple[int, list[str]]:
    """(cases, faults)"""
    return len(SIZES) * len(STARTS) * 8 + 2 * len(SUMS) + len(OPERANDS), [
        *faults(device),
        *sum_faults(device),
        *operand_faults(device),
    ]
