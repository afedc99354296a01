"""Signs of random Hadamard transforms times 1/sqrt(g), drawn on a GPU with the bits of ``philox.reference``."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.launch import Specialized
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.kernels.philox.triton import draw_bits


@triton.jit(do_not_specialize=["a0", "a1", "b0", "b1"])
def _signs_kernel(out_ptr, a0, a1, b0, b1, rng_step_ptr, scale, GROUP: tl.constexpr):
    second = tl.program_id(0) == 1
    zero = tl.zeros([1], tl.int32)
    bits = draw_bits(
        zero.to(tl.uint32),
        zero,
        tl.where(second, b0, a0).to(tl.uint32, bitcast=True),
        tl.where(second, b1, a1).to(tl.uint32, bitcast=True),
        tl.load(rng_step_ptr).to(tl.uint32, bitcast=True),
        tl.load(rng_step_ptr + 1).to(tl.uint32, bitcast=True),
        0,
        GROUP,
        0,
        GROUP,
    )
    signs = tl.reshape(1.0 - 2.0 * (bits >> 15).to(tl.float32), [GROUP])
    tl.store(out_ptr + tl.program_id(0) * GROUP + tl.arange(0, GROUP), signs * scale)


@lru_cache(maxsize=len((32, 64, 128, 256)))
def _signs_launcher(group: int) -> Specialized:
    return Specialized(_signs_kernel, {"GROUP": group}, num_warps=1)


def scaled_signs(keys: tuple[Key, ...], rng_step: torch.Tensor, group: int) -> tuple[torch.Tensor, ...]:
    """fp32 [group] for each key: random signs times fl32(1/sqrt(group)), as ``philox/reference.py``.

    Args:
        keys: one or two Philox keys.
        rng_step: int32 [2], (step, microbatch), on the device of the result.
    """
    out = torch.empty((len(keys), group), dtype=torch.float32, device=rng_step.device)
    arguments = (out, *keys[0], *keys[-1], rng_step, group**-0.5)
    _signs_launcher(group).launch(len(keys), rng_step.device, arguments, None)
    return out.unbind()
