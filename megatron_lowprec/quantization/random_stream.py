"""Counter-based random streams of tensors: the key names the tensor, the counter the RNG step and the entry.

A tensor's 64-bit key is a hash of what is constant during a run. Step and microbatch are words of the counter
(``kernels/philox/reference.py``). Only these two integers change from call to call; they are the same for all
layers, and a captured CUDA graph can read them from memory.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.philox.reference import ShardSlice, draw_bits
from megatron_lowprec.kernels.quantize.reference import uniform_from_bits

Purpose = Literal["sign", "rounding"]


class RngStep(NamedTuple):
    """Step and microbatch of a draw: optimizer steps completed, and the microbatch within the step."""

    step: int
    microbatch: int


NO_DRAWS = RngStep(0, 0)  # for operands without random draws, whose step is not read


def in_backward_pass() -> bool:
    """Whether autograd runs a backward pass on this thread; a forward pass within it is a recomputation."""
    in_task: bool = torch._C._current_graph_task_id() != -1
    return in_task


def stream_key(
    seed: int,
    purpose: Purpose,
    *,
    layer: int,
    linear: str,
    gemm: str,
    operand: str = "",
    expert: int = -1,
    data_parallel_rank: int = 0,
) -> tuple[int, int]:
    """Philox key of one stream, as two 32-bit words.

    Args:
        seed: the run's seed.
        purpose: "sign" of a Hadamard transform, or "rounding". A GEMM's operands share signs: leave ``operand`` empty.
        layer: global layer number.
        linear: the linear layer's name within it.
        gemm, operand: the GEMM and its operand.
        expert: global expert number, -1 outside experts.
        data_parallel_rank: rank among those with different data.
    """
    return _key_of(f"{seed}/{purpose}/{layer}/{linear}/{expert}/{gemm}/{operand}/{data_parallel_rank}")


def optimizer_key(seed: int, weight: str) -> tuple[int, int]:
    """Philox key for rounding one weight's optimizer state, as two 32-bit words.

    Args:
        seed: the run's seed.
        weight: the weight's name in the whole model, with global layer and expert numbers. Copies of a weight share it.
    """
    return _key_of(f"{seed}/optimizer/{weight}")


def _key_of(name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


@dataclass(frozen=True)
class RandomStream:
    """Random draws of one tensor at one RNG step; pure: equal streams give equal bits.

    ``row_span`` and ``column_span`` locate a shard in the unsharded tensor, contracted dimension last.

    Raises:
        UserError: a key that is not two integers of 32 bits.
    """

    key: tuple[int, int]
    rng_step: RngStep = RngStep(0, 0)
    row_span: ShardSlice = ShardSlice()
    column_span: ShardSlice = ShardSlice()

    def __post_init__(self) -> None:
        key = self.key
        words = key if isinstance(key, tuple) else ()
        if len(words) != 2 or not all(isinstance(word, int) and 0 <= word < 1 << 32 for word in words):
            raise UserError(f"RandomStream got key={key!r}: give two integers from 0 to 2^32 - 1, such as key=(7, 0)")

    def at(self, rng_step: RngStep) -> "RandomStream":
        """The same tensor's stream at another RNG step."""
        return replace(self, rng_step=rng_step)

    def of_scales(self) -> "RandomStream":
        """The stream of the tensor's block scales, independent of that of its elements."""
        return replace(self, key=_key_of(f"{self.key[0]}/{self.key[1]}/scales"))

    def uniform(self, columns: int, random_bits: int, device: torch.device) -> Callable[[slice], torch.Tensor]:
        """A function from a row slice to fp32 draws [rows, columns] in (0, 1) with ``random_bits`` bits each."""

        def draw(rows: slice) -> torch.Tensor:
            bits = draw_bits(
                self.key,
                self.rng_step,
                rows.stop - rows.start,
                columns,
                row_span=self.row_span,
                column_span=self.column_span,
                first_row=rows.start,
                device=device,
            )
            return uniform_from_bits(bits, random_bits)

        return draw

    def signs(self, count: int, device: torch.device) -> torch.Tensor:
        """fp32 [count] of +1 and -1, from the top bit of each draw."""
        bits = draw_bits(self.key, self.rng_step, 1, count, device=device).view(count)
        return 1.0 - 2.0 * (bits >> 15).to(torch.float32)
