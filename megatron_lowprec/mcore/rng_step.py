"""Step and microbatch of the running forward pass, including its activation recomputation.

A recomputation runs inside a node of the backward pass that its first forward pass created. Autograd numbers nodes in
order of creation, so the node's number identifies the microbatch: under any pipeline schedule, any recomputation
function and any state of Megatron-core's RNG tracker.
"""

from bisect import bisect_right
from operator import itemgetter
from typing import Protocol

import torch

from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.quantization.random_stream import RngStep, in_backward_pass


class StepCounter(Protocol):
    """Counts what a loop does that makes no calls; layers have the counts that they need in their extra state."""

    def counts(self, linear_gemms: LinearGemms) -> dict[str, torch.Tensor]:
        """int64 scalars: ``steps`` begun, where draws or phases follow; ``microbatches`` of the last, where dy does."""

    def resume(self, state: dict[str, torch.Tensor]) -> None:
        """Continue behind the counts in a layer's extra state; a step in progress ends without an update."""


# (number of the next node, RNG step), ascending: the microbatches of this step begun so far
_begun = [(0, RngStep(0, 0))]
# A recomputation's backward pass is a nested autograd task. Its nodes were created by the recomputation on autograd's
# thread and numbered separately. While it runs: (outermost task, RNG step of its latest recomputation).
_recomputing: tuple[int, RngStep] | None = None


def set_rng_step(rng_step: RngStep) -> None:
    """Set the RNG step, on the thread that runs the forward pass."""
    global _recomputing
    _recomputing = None  # may be left from a backward pass that raised
    if rng_step.step != _begun[-1][1].step:
        _begun.clear()
    # Without gradients the pass may be inside a reentrant checkpoint, whose node was the last to be created.
    _begun.append((torch.autograd._get_sequence_nr() - (not torch.is_grad_enabled()), rng_step))


def current_rng_step() -> RngStep:
    """RNG step of the forward pass that is running or being recomputed; (0, 0) before the first step.

    Raises:
        RuntimeError: the recomputed forward pass belongs to an earlier step.
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
