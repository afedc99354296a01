"""The random stream of ``reference.py`` in Triton kernels: equal words for equal counters and keys."""

import triton
import triton.language as tl

from megatron_lowprec.kernels.philox import reference

_ROUNDS = tl.constexpr(reference.ROUNDS)
_MULTIPLIER_0, _MULTIPLIER_1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_WEYL_0, _WEYL_1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four uint32 words of each counter; the counter's words are broadcastable."""
    for _ in tl.static_range(_ROUNDS):
        product0 = c0.to(tl.uint64) * _MULTIPLIER_0
        product1 = c2.to(tl.uint64) * _MULTIPLIER_1
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product1.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product0.to(tl.uint32)
        k0 += _WEYL_0
        k1 += _WEYL_1
    return c0, c1, c2, c3


@triton.jit
def place(index, start, gate_offset, gate_stride):
    """Indices in a shard -> uint32 indices in the unsharded dimension; ``reference.ShardSlice``."""
    return (index + start + tl.where(index >= gate_offset, gate_stride, 0)).to(tl.uint32)


@triton.jit
def draw_bits(row, first_column, k0, k1, step, microbatch, start, gate_offset, gate_stride, GROUP: tl.constexpr):
    """16 random bits for ``GROUP`` consecutive columns of each row, as uint32 [GROUP, P].

    Args:
        row: uint32 [P], rows in the unsharded tensor.
        first_column: int32 [P], first column of each group in the shard.
        start, gate_offset, gate_stride: the ``ShardSlice`` of the shard's columns.
    """
    P: tl.constexpr = row.shape[0]
    CALLS: tl.constexpr = GROUP // 8
    column = first_column[None, :] + tl.arange(0, CALLS)[:, None] * 8
    call = place(column, start, gate_offset, gate_stride) // 8
    rng_step = tl.zeros([1, 1], tl.uint32)
    w0, w1, w2, w3 = philox(call, row[None, :], rng_step + step, rng_step + microbatch, k0, k1)
    # entry 4 b2 + 2 b1 + b0 takes word 2 b2 + b1, half b0: the bits are joined from the top down
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(tl.permute(halves, (0, 2, 3, 4, 1)), [GROUP, P])
