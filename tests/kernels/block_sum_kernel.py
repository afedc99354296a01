"""A kernel around ``sum_of_blocks``: four-over-six shows the order of its sums only where two errors nearly tie."""

import torch
import triton
import triton.language as tl

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.quantize.blocks import block_sum
from megatron_lowprec.kernels.quantize.rule import MxRule
from megatron_lowprec.kernels.quantize.triton_coded import sum_of_blocks


@triton.jit
def _kernel(x_ptr, out_ptr, MX: tl.constexpr):
    lanes = tl.arange(0, 32)
    x = tl.load(x_ptr + tl.arange(0, 16)[:, None] * 32 + lanes[None, :])
    tl.store(out_ptr + lanes, tl.reshape(sum_of_blocks(tl.reshape(x, [1, 16, 32]), MX), [32]))


def differences(device: str) -> list[str]:
    """Sums over square blocks of a matrix whose columns (lanes) or rows come first in the operand's columns."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).to(device)
    rule, found = MxRule(FORMATS["e2m1"], "base", block=16, block_rows=16, scale_fmt=FORMATS["e4m3"]), []
    sums = {True: block_sum(x, (16, 16))[0], False: block_sum(x.t(), (16, 16))[:, 0]}
    assert not torch.equal(sums[True], sums[False])
    for lanes_first, want in sums.items():
        got = torch.empty(32, device=device)
        _kernel[(1,)](x, got, MX=rule.constants(0, False, True, False, False, False, 0, lanes_first))
        if not torch.equal(got[::16], want):
            found.append(f"sums with lanes first {lanes_first}: {got[::16].tolist()} instead of {want.tolist()}")
    return found
