"""Amax histories of a layer outside Megatron: ended by optimizer steps, equal on all data-parallel ranks."""

import weakref
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_lowprec.comm.maximum import max_over
from megatron_lowprec.errors import UserError
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import in_backward_pass
from megatron_lowprec.recipe.schema import HistorySpec


def spans_ranks(group: dist.ProcessGroup | None) -> bool:
    """Whether a process group, None for all ranks, exists and has more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def check_common_step(specs: Iterable[HistorySpec], group: dist.ProcessGroup | None) -> None:
    """Raise UserError for histories that have no common step over the ranks of a group."""
    if spans_ranks(group) and any(spec.update == "microbatch" for spec in specs):
        raise UserError(
            "history_update=microbatch is not reduced over data-parallel ranks, whose scales would differ: "
            "use history_update=step"
        )


class LayerHistories:
    """Amax histories of one layer, and whether a training pass has recorded amaxes since their last update.

    Args:
        device: of the weight; histories of a meta tensor begin on the CPU.
        group: the layers of a model whose steps end together over data-parallel ranks; None for a layer alone.
    """

    def __init__(self, device: torch.device, group: "HistoryGroup | None" = None) -> None:
        self._device = torch.device("cpu") if device.type == "meta" else device
        self._by_spec: dict[HistorySpec, AmaxHistory] = {}
        self.group = group
        # optimizer steps before the last forward pass in training; None once its amaxes have entered the histories
        self._observed_after: int | None = None
        if group is not None:
            group.layers.append(self)

    def of(self, spec: HistorySpec) -> AmaxHistory:
        """The history that the layer's tensors with this spec share."""
        _count_optimizer_steps()
        return self._by_spec.setdefault(spec, AmaxHistory(spec, self._device))

    def __iter__(self) -> Iterator[AmaxHistory]:
        return iter(self._by_spec.values())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a pickle, perhaps from another process, whose count of optimizer steps has no meaning here."""
        self.__dict__.update(state, _observed_after=None)
        if self._by_spec:
            _count_optimizer_steps()

    def to(self, device: torch.device) -> None:
        """Move to the weight's device, unless that is meta."""
        if device not in (self._device, torch.device("meta")):
            self._device = device
            for history in self:
                history.to(device)

    def begin_forward(self, training: bool) -> None:
        """Before a forward pass: end the step or the microbatch of the last pass in training."""
        # a recomputation uses the scales of its first pass, even if optimizers step within the backward pass
        if not in_backward_pass():
            self.prepare(training)
            if training and self._observed_after is not None:
                for spec, history in self._by_spec.items():
                    if spec.update == "microbatch":
                        history.update()
        if training and self._by_spec:
            self._observed_after = _optimizer_steps
            if self.group is not None:
                self.group.enqueue()

    def prepare(self, training: bool) -> None:
        """End the step of the last pass in training, and make loaded histories equal on all ranks."""
        self.follow_optimizer()
        if training and self.group is not None:
            self.group.synchronize()

    def follow_optimizer(self, collective: bool = True) -> None:
        """End the step if an optimizer has stepped since the last forward pass in training.

        Args:
            collective: whether all ranks make this call; else a step that spans ranks does not end.
        """
        if self._observed_after in (None, _optimizer_steps):
            return
        if self.group is None or not spans_ranks(self.group.ranks):
            self.end_step()
        elif collective:
            self.group.end_step()

    def end_step(self) -> None:
        """Update the histories with what this rank has recorded.

        Amaxes that are not finite are left out: the loop has skipped their update, and an Inf would pin the scale for a
        whole window.
        """
        self._observed_after = None
        for history in self:
            with torch.cuda.device_of(history.newest):
                history.newest.masked_fill_(~history.newest.isfinite(), 0.0)
                history.update()

    def loaded(self) -> None:
        """Note a call of ``load_state_dict``, with histories or without."""
        if self.group is not None:
            self.group.stale = True

    @property
    def specs(self) -> list[HistorySpec]:
        """The specs of the histories."""
        return list(self._by_spec)


class HistoryGroup:
    """The layers of a model whose amaxes are the maximum over data-parallel ranks.

    A collective per optimizer step: each rank must step the same optimizers, and run at least one forward pass in
    training before each step. A layer that no rank has run records 0.

    Args:
        ranks: the ranks that hold the same layers; None for all ranks.

    Attributes:
        layers: histories of the layers, in the same order on all ranks.
        stale: whether ranks may hold different histories, at first and after ``load_state_dict``.
    """

    def __init__(self, ranks: dist.ProcessGroup | None = None) -> None:
        self.ranks = ranks
        self.stale = True
        self.layers: list[LayerHistories] = []
        self._queued = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "HistoryGroup":
        copied = memo[id(self)] = HistoryGroup(self.ranks)  # a process group cannot be copied
        copied.layers = deepcopy(self.layers, memo)
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _queued=False, stale=True)

    def enqueue(self) -> None:
        """Let the next optimizer step end this step."""
        if not self._queued:
            self._queued = True
            _queue.append(weakref.ref(self))

    def dequeue(self) -> None:
        """Forget ``enqueue``."""
        self._queued = False

    def end_step(self) -> None:
        """Update all histories, with the maximum over the ranks; collective if these are several."""
        if spans_ranks(self.ranks):
            check_common_step([spec for layer in self.layers for spec in layer.specs], self.ranks)
            self._reduce([history.newest for layer in self.layers for history in layer])
        for layer in self.layers:
            layer.end_step()

    def synchronize(self) -> None:
        """Before a forward pass in training: give stale histories the maximum over the ranks; then collective.

        All ranks must call ``load_state_dict``; a broadcast from rank 0 may have left out the histories of others.
        """
        if self.stale and spans_ranks(self.ranks):
            self.stale = False
            histories = [history for layer in self.layers for history in layer]
            self._reduce([state for history in histories for state in (history.in_effect, history.window)])

    def _reduce(self, amaxes: list[torch.Tensor]) -> None:
        """Replace fp32 tensors by their maxima over the ranks, in one collective."""
        device = max((amax.device for amax in amaxes), key=lambda device: device.type != "cpu")
        ranks = self.ranks or dist.distributed_c10d._get_default_group()
        reduced = max_over(torch.cat([amax.flatten().to(device) for amax in amaxes]), ranks)
        for amax, part in zip(amaxes, reduced.split([amax.numel() for amax in amaxes])):
            amax.copy_(part.view(amax.shape))


_optimizer_steps = 0  # of this process, since the first layer with amax histories was built
_queue: list[weakref.ref[HistoryGroup]] = []  # in the order of their first forward passes, equal on all ranks


def _note_optimizer_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1
    if in_backward_pass():  # not all gradients exist: the next forward pass ends the step
        return
    groups = [group for reference in _queue if (group := reference()) is not None]
    _queue.clear()
    for group in groups:
        group.dequeue()
        # here, not in the next forward pass: a checkpoint may be written by one rank alone
        if spans_ranks(group.ranks):
            group.end_step()


@cache
def _count_optimizer_steps() -> None:
    register_optimizer_step_post_hook(_note_optimizer_step)
