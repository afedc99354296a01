"""Counter-based random numbers: Philox4x32 (Salmon et al., SC 2011, section 3.3), equal bits on every device.

The layout of the stream is fixed, since every stochastic bit of every recipe depends on it. Entry (row, column) of an
operand, indexed in the unsharded tensor with the contracted dimension last, takes 16 bits from the call with counter

    (column // 8, row, step, microbatch)

under the tensor's 64-bit key: from word ``(column % 8) // 2``, the low half for even columns, the high half for odd.
"""

from typing import NamedTuple

import torch

ROUNDS = 7
"""Fewest rounds that pass BigCrush (table 2 of the source); its default of 10 has a safety margin."""

VALUES_PER_CALL = 8

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


class ShardSlice(NamedTuple):
    """Location of a shard in an unsharded dimension: index i is ``start + i``, or from ``gate_offset`` on
    ``start + i + gate_stride``.

    The shard of a gated fc1 has two parts: a slice of the gate, then the same slice of the up projection.
    """

    start: int = 0
    gate_offset: int = 2**31 - 1
    gate_stride: int = 0

    def place(self, index: torch.Tensor) -> torch.Tensor:
        """Indices in the shard -> indices in the unsharded dimension."""
        return index + self.start + self.gate_stride * (index >= self.gate_offset)


WHOLE = ShardSlice()

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[int, int], rounds: int = ROUNDS) -> Words:
    """Four random 32-bit words for each counter.

    Args:
        counter: four broadcastable int64 tensors, values in [0, 2^32).
        key: two 32-bit words.
        rounds: 7 here; 10 gives the published known-answer vectors.

    Returns:
        four int64 tensors, values in [0, 2^32), of the broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # int64 products wrap beyond 2^63 with correct 64 bits; the mask removes the high half's sign extension
        product0, product1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = ((product1 >> 32) & _MASK) ^ c1 ^ k0
        c1 = product1 & _MASK
        c2 = ((product0 >> 32) & _MASK) ^ c3 ^ k1
        c3 = product0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def draw_bits(
    key: tuple[int, int],
    rng_step: tuple[int, int],
    rows: int,
    columns: int,
    *,
    row_span: ShardSlice = WHOLE,
    column_span: ShardSlice = WHOLE,
    first_row: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """16 random bits for each entry of a row slice of an operand's shard.

    Args:
        key: the tensor's key.
        rng_step: (step, microbatch).
        rows, columns: shape of the slice; it has all columns of the shard.
        row_span, column_span: location of the shard; column starts, offsets and strides are multiples of 8.
        first_row: index of the slice's first row in the shard.

    Returns:
        int64 [rows, columns], values in [0, 2^16).
    """
    if any(index % VALUES_PER_CALL for index in (column_span.start, column_span.gate_stride)) or (
        column_span.gate_stride and column_span.gate_offset % VALUES_PER_CALL
    ):
        raise ValueError(f"a shard's columns must lie at multiples of {VALUES_PER_CALL}, got {column_span}")
    calls = -(-columns // VALUES_PER_CALL)
    column = column_span.place(torch.arange(calls, device=device) * VALUES_PER_CALL)
    group = (column // VALUES_PER_CALL).view(1, calls)
    row = row_span.place(torch.arange(first_row, first_row + rows, device=device)).view(rows, 1)
    step, microbatch = (torch.full((1, 1), value, dtype=torch.int64, device=device) for value in rng_step)
    return halves(philox((group, row, step, microbatch), key)).view(rows, calls * VALUES_PER_CALL)[:, :columns]


def halves(words: Words) -> torch.Tensor:
    """The eight 16-bit numbers of each call, low half first: int64 [..., 8]."""
    joined = torch.stack(torch.broadcast_tensors(*words), dim=-1)
    return torch.stack((joined & 0xFFFF, joined >> 16), dim=-1).flatten(-2)
