"""Step and microbatch of the running forward pass, also where activation recomputation runs it a second time.

A recomputation runs inside a node of the backward pass, one that its first pass has made. Autograd numbers nodes in the
order of their making, so the node's number tells the microbatch: under any pipeline schedule, any function that
recomputes and any state of Megatron-core's RNG tracker.
"""

from bisect import bisect_right
from operator import itemgetter

import torch

from megatron_lowprec.quantization.random_stream import RngStep, in_backward_pass

# (number of the next node, moment), ascending: where the moments of this step began, as far as it has come
_begun = [(0, RngStep(0, 0))]
# A recomputation's backward pass is a task of autograd's inside another. Nodes in it were made by the recomputation, on
# autograd's thread, with numbers of their own: (outermost task, moment of its latest recomputation) while that runs.
_recomputing: tuple[int, RngStep] | None = None


def set_rng_step(rng_step: RngStep) -> None:
    """Enter a step or a microbatch, on the thread that runs the forward pass."""
    global _recomputing
    _recomputing = None  # of a backward pass that an exception has ended
    if rng_step.step != _begun[-1][1].step:
        _begun.clear()
    _begun.append((torch.autograd._get_sequence_nr(), rng_step))


def current_rng_step() -> RngStep:
    """Moment of the running forward pass or of the one that is recomputed; (0, 0) before the first step.

    Raises:
        RuntimeError: the forward pass of another step is recomputed.
    """
    global _recomputing
    if not in_backward_pass():
        return _begun[-1][1]
    task, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
    if _recomputing is not None and _recomputing[0] != task:
        return _recomputing[1]
    found = bisect_right(_begun, node._sequence_nr(), key=itemgetter(0)) - 1
    if found < 0:
        raise RuntimeError(
            f"the forward pass of a step before {_begun[0][1].step} is recomputed: run a step's backward passes before "
            f"the next begin_step"
        )
    if _recomputing is None:
        torch.autograd.Variable._execution_engine.queue_callback(_end_task)
    _recomputing = task, _begun[found][1]
    return _recomputing[1]


def _end_task() -> None:
    global _recomputing
    _recomputing = None
