"""Kind and number of a layer's forward pass outside Megatron: training, evaluation or recomputation.

Draws follow from the number, so a recomputation must find that of its first pass. It runs within a node of the backward
pass. Autograd numbers nodes in order of creation. The node of a reentrant checkpoint was the last one created before
its part ran first. The node that makes a checkpoint that is not reentrant run its part again is the last one of the
part that saved tensors.
"""

import weakref
from collections import deque
from typing import Any, NamedTuple

import torch

from megatron_lowprec.quantization.random_stream import in_backward_pass

_REMEMBERED = 1024  # passes of a layer in checkpoints, from a forward pass to its recomputation

_backward_passes: list[int] = []  # autograd's number of those in progress that recompute, each within the one before


def is_training_pass(training: bool) -> bool:
    """Whether a forward pass of a module in mode ``training`` belongs to a step of training.

    With gradients it does, and within the forward pass of an autograd function, which may be a reentrant checkpoint: it
    turns gradients off and recomputes in the backward pass. Under ``torch.no_grad`` a pass is evaluation, unless in a
    reentrant checkpoint: its first pass cannot tell, so nor may its recomputation.
    """
    if not training or torch.is_inference_mode_enabled():
        return False
    # torch.no_grad leaves forward-mode gradients on, an autograd function turns off both
    if torch.is_grad_enabled() or not torch._C._is_fwd_grad_enabled():
        return True
    return in_backward_pass() and _checkpoint() is None


class _Pass(NamedTuple):
    """A pass in a checkpoint: the number of its autograd node, its own number, and its part of the model.

    ``part`` refers to the hooks on saved tensors of a checkpoint that is not reentrant; None for a reentrant one.
    """

    node: int
    number: int
    part: Any


class _Passes:
    """Passes of a layer that may be recomputed, and the recomputation in progress."""

    def __init__(self) -> None:
        self.first: deque[_Pass] = deque(maxlen=_REMEMBERED)
        self._recomputing: tuple[int, int, Any] | None = None
        self._next = 0

    def append(self, number: int, own_node: bool) -> None:
        part = _checkpoint() if torch.is_grad_enabled() else None
        if part is not None or not torch.is_grad_enabled():
            self.first.append(_Pass(torch.autograd._get_sequence_nr() - own_node, number, part))

    def recomputed(self) -> int | None:
        """The number of the pass that is recomputed; None for a pass that is no recomputation."""
        node, part = torch._C._current_autograd_node(), _checkpoint()
        if node is None or not self.first:
            return None
        place = torch._C._current_graph_task_id(), node._sequence_nr()
        if self._recomputing not in ((*place, part), (*place, None)):
            begins, self._next = self._begin(place[1], part is not None)
            self._recomputing = (*place, part if begins else None)
            if self._next == 0 and len(self.first) == _REMEMBERED:
                raise RuntimeError(f"a layer runs more than {_REMEMBERED} times in checkpoints before it is recomputed")
        if self._next == len(self.first):
            return None
        self._next += 1
        return self.first[self._next - 1].number

    def _begin(self, node: int, by_hooks: bool) -> tuple[bool, int]:
        """Whether a node recomputes a part that is not reentrant, and the index of the first pass of the part.

        ``by_hooks``: saved tensors have hooks, of such a part or of one within a reentrant part that runs again.
        """
        begun = range(len(self.first))
        before = [i for i in begun if self.first[i].part is not None and self.first[i].node <= node]
        if by_hooks and before:
            part = self.first[before[-1]].part
            return True, next(i for i in begun if self.first[i].part is part)
        after = (i for i in begun if self.first[i].part is None and self.first[i].node > node)
        return False, next(after, len(begun))


class PassCounter:
    """Numbers the forward passes of a layer; a recomputation has the number of its first pass.

    Attributes:
        count: first passes in training so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._passes: list[_Passes] = []  # outside of a backward pass, within one, within one that runs in that, ...

    def __getstate__(self) -> dict[str, Any]:
        """Without passes of this process that may be recomputed."""
        return {"count": self.count, "_passes": []}

    def number(self, training: bool, own_node: bool = False) -> int:
        """The number of the forward pass that begins; in evaluation that of the next one in training.

        Args:
            training: ``is_training_pass``.
            own_node: whether the pass runs within its own autograd node, instead of before it.
        """
        depth = _depth()
        while len(self._passes) <= depth:
            self._passes.append(_Passes())
        number = self._passes[depth - 1].recomputed() if training and depth else None
        if number is None:
            number = self.count
            self.count += training
        if training:
            self._passes[depth].append(number, own_node)
        return number


def _checkpoint() -> Any:
    """Reference to the hooks on saved tensors, which a checkpoint that is not reentrant sets anew for each part."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else weakref.ref(hooks[0])


def _depth() -> int:
    """How many backward passes that recompute this pass runs in."""
    if not in_backward_pass():
        _backward_passes.clear()  # one may be left that raised
        return 0
    task = torch._C._current_graph_task_id()
    if task not in _backward_passes:
        _backward_passes.append(task)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _end(task))
    return _backward_passes.index(task) + 1


def _end(task: int) -> None:
    if task in _backward_passes:
        _backward_passes.remove(task)
