"""Which step and microbatch the random streams stand at, kept where activation recompute finds it again.

Megatron-core's recompute restores the states of its RNG tracker before it runs a forward again. The moment is kept as
one of these states, so that a recomputed forward draws the bits of the first one, under any pipeline schedule.
"""

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_lowprec.quantization.random_stream import Moment

_STATE = "megatron-lowprec-moment"


def set_moment(moment: Moment) -> None:
    """Enter a step or a microbatch."""
    tracker = get_cuda_rng_tracker()
    tracker.set_states({**tracker.get_states(), _STATE: torch.tensor(moment, dtype=torch.int64)})


def current_moment() -> Moment:
    """Where the running forward stands; (0, 0) before the first step."""
    state = get_cuda_rng_tracker().get_states().get(_STATE)
    return Moment(0, 0) if state is None else Moment(*state.tolist())
