"""Amax histories of delayed scaling, the only state of any recipe.

The update is TransformerEngine's. At the end of a step its amax enters the window, unless it is 0: a tensor that was
not recorded keeps its window. The window's maximum (or newest entry) is in effect from the next step on; if it is 0,
Inf or NaN, the previous value stays in effect. The scale is a pure function of the amax in effect, so one history
serves every format that a tensor is cast to.

Under the rule ``held`` the window takes an amax only when it has none, so that one in ``length`` updates counts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from megatron_lowprec.kernels.dispatch import update_history_
from megatron_lowprec.recipe.schema import HistorySpec, LinearRecipe

AMAX = "amax"
"""A layer's state dict holds the history of each tensor as ``amax.<tensor>``, ``AmaxHistory.state``."""


class AmaxHistory:
    """Amax windows of N tensors, updated together.

    Args:
        remembered: length and rule of the windows. The caller decides how often to update.

    Attributes:
        newest: fp32 [N], largest amax since the last update.
        window: fp32 [length, N], newest entry first; zeros before the first update.
        in_effect: fp32 [N], 0 before the first valid update.
        recorded: whether ``newest`` may hold an amax, on this host's account: it has given ``cells`` since the last
            update. A replay of a CUDA graph does not count.
    """

    recorded = True

    def __init__(self, remembered: HistorySpec, device: torch.device | str = "cpu") -> None:
        self.length, self.rule = remembered.length, remembered.rule
        self._cells: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._filled: list[bool] = []  # whether in_effect was above 0 when it was last read
        self._unread = False  # whether in_effect has been written since
        self.newest = torch.zeros(0, device=device)
        self.window = torch.zeros(self.length, 0, device=device)
        self.in_effect = torch.zeros(0, device=device)

    def add_tensor(self) -> int:
        """Append a tensor and return its slot."""
        return self.add_tensors(1)[0]

    def add_tensors(self, count: int) -> range:
        """Append tensors and return their slots."""
        first = self.newest.numel()
        self.newest = torch.cat((self.newest, self.newest.new_zeros(count)))
        self.window = torch.cat((self.window, self.window.new_zeros(self.length, count)), dim=1)
        self.in_effect = torch.cat((self.in_effect, self.in_effect.new_zeros(count)))
        self._cells.clear()
        self._filled += [False] * count
        self._unread = True
        return range(first, first + count)

    def __getstate__(self) -> dict[str, Any]:
        """Without ``cells``, which a pickle would store as tensors of their own."""
        return {**self.__dict__, "_cells": {}}

    def to(self, device: torch.device) -> None:
        """Move to another device."""
        with torch.inference_mode(False):  # training could not update tensors of inference mode
            self.newest, self.window, self.in_effect = (
                tensor.to(device) for tensor in (self.newest, self.window, self.in_effect)
            )
        self._cells.clear()

    def cells(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a tensor's ``in_effect`` and ``newest``, fp32 [1] each, for kernels and CUDA graphs."""
        self.recorded = True
        found = self._cells.get(slot)
        if found is None:
            found = self._cells[slot] = self.in_effect[slot : slot + 1], self.newest[slot : slot + 1]
        return found

    def update_amax(self, slot: int, amax: torch.Tensor) -> None:
        """Raise ``newest`` of a tensor to ``amax``. NaN is recorded as Inf, which a maximum over ranks preserves."""
        amax, self.recorded = amax.view(()).nan_to_num(nan=torch.inf, posinf=torch.inf), True
        self.newest[slot] = torch.maximum(self.newest[slot], amax)

    def update(self, reduce_max: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """Move ``newest`` into the window, at the end of a step or of a microbatch.

        Args:
            reduce_max: returns the maximum of ``newest`` over the ranks that hold parts or copies of the tensors.
        """
        if reduce_max is not None:
            self.newest.copy_(reduce_max(self.newest))
        # in place: a captured graph keeps the addresses
        self._update_(self.newest, self.window, self.in_effect)
        self._unread, self.recorded = True, False

    def _update_(self, newest: torch.Tensor, window: torch.Tensor, in_effect: torch.Tensor) -> None:
        update_history_(newest, window, in_effect, self.rule == "max", self.rule == "held")

    def drop_not_finite(self) -> None:
        """Forget newest amaxes that are Inf: of a microbatch whose update the loop skips."""
        self.newest.nan_to_num_(nan=0.0, posinf=0.0)

    @property
    def any_in_effect(self) -> bool:
        """Whether a tensor had an amax in effect when that was last read."""
        return True in self._filled

    def is_empty(self, slot: int) -> bool:
        """Whether a tensor has no amax in effect. Waits for the device, once after an update, while that is so."""
        if self._unread and not self._filled[slot]:
            self._filled, self._unread = (self.in_effect > 0).tolist(), False
        return not self._filled[slot]

    def upcoming(self) -> torch.Tensor:
        """fp32 [N]: ``in_effect`` after the next ``update``; ``newest`` must already be equal on all ranks."""
        in_effect = self.in_effect.clone()
        self._update_(self.newest.clone(), self.window.clone(), in_effect)
        return in_effect

    def state(self, slot: int) -> torch.Tensor:
        """fp32 [length + 1] of one tensor: its amax in effect, then its window."""
        return torch.cat((self.in_effect[slot : slot + 1], self.window[:, slot]))

    def load_state(self, slot: int, state: torch.Tensor | None) -> None:
        """Restore the result of ``state``, None for an empty one; of a window of another length, its newest entries.

        An amax recorded since the last update is dropped.
        """
        for tensor in (self.newest, self.window, self.in_effect):
            tensor[..., slot] = 0
        if state is not None:
            kept = min(self.length, state.numel() - 1)
            self.in_effect[slot] = state[0]
            self.window[:kept, slot] = state[1 : 1 + kept].to(self.window.device)
        self._filled[slot], self._unread = False, True

    def copy_(self, other: "AmaxHistory") -> None:
        """Take over the windows of a history of the same tensors, on any device."""
        for mine, theirs in zip((self.window, self.in_effect), (other.window, other.in_effect), strict=True):
            mine.copy_(theirs)
        self.newest.zero_()
        self._filled, self._unread = [False] * len(self._filled), True

    def rescale(self, slot: int, factor: float) -> None:
        """Multiply all recorded values of one tensor by ``factor``."""
        self.in_effect[slot] *= factor
        self.window[:, slot] *= factor


def cells_of(histories: Sequence[tuple[AmaxHistory, int]]) -> tuple[Any, Any]:
    """``AmaxHistory.cells`` of tensors in slots: all ``in_effect`` and all ``newest``.

    Each is one view [tensors] if a history has the tensors at equal distances, else a sequence of views [1].
    """
    (history, first), (_, second) = histories[0], histories[min(1, len(histories) - 1)]
    step = max(1, second - first)
    slots = range(first, first + len(histories) * step, step)
    if all(other is history and slot == at for at, (other, slot) in zip(slots, histories, strict=True)):
        own, history.recorded = slice(first, slots.stop, step), True
        return history.in_effect[own], history.newest[own]
    in_effect, newest = zip(*(history.cells(slot) for history, slot in histories), strict=True)
    return in_effect, newest


def raise_newest(histories: Sequence[tuple[AmaxHistory, int]], amax: torch.Tensor) -> None:
    """``AmaxHistory.update_amax`` of tensors in slots, from their amaxes, fp32 [tensors]."""
    newest = [history.cells(slot)[1] for history, slot in histories]
    torch._foreach_maximum_(newest, amax.nan_to_num(nan=torch.inf, posinf=torch.inf).split(1))


def update_together(histories: Iterable[AmaxHistory]) -> None:
    """``drop_not_finite`` and ``update`` of each, in a few launches for all of one rule, length and device."""
    kinds = dict[tuple[Any, ...], list[AmaxHistory]]()
    for history in histories:
        kinds.setdefault((history.newest.device, history.length, history.rule), []).append(history)
    for same in kinds.values():
        states = [(history.newest, history.window, history.in_effect) for history in same]
        newest, window, in_effect = whole = [torch.cat(tensors, dim=-1) for tensors in zip(*states, strict=True)]
        newest.nan_to_num_(nan=0.0, posinf=0.0)
        with torch.cuda.device_of(newest):
            same[0]._update_(newest, window, in_effect)
        sizes = [history.newest.numel() for history in same]
        for parts, updated in zip(zip(*states, strict=True), whole, strict=True):
            torch._foreach_copy_(parts, updated.split(sizes, dim=-1))
        for history in same:
            history._unread, history.recorded = True, False


def add_tensors(
    delayed: Mapping[str, HistorySpec], history_of: Callable[[HistorySpec], AmaxHistory]
) -> dict[str, tuple[AmaxHistory, int]]:
    """Tensor -> its history and slot, new and empty, of each of a layer's ``delayed_operands``.

    Args:
        history_of: returns the history that the tensors of a ``HistorySpec`` share; called once per tensor.
    """
    found = {tensor: history_of(remembered) for tensor, remembered in delayed.items()}
    return {tensor: (history, history.add_tensor()) for tensor, history in found.items()}


def empty_histories(
    recipe: LinearRecipe, histories: Mapping[str, tuple[AmaxHistory, int]], *, gradients: bool
) -> frozenset[str]:
    """The tensors with delayed scales of a layer that have no amax in effect.

    Args:
        recipe: of the layer.
        histories: tensor -> its history and slot; also of tensors that the layer does not quantize.
        gradients: include ``grad_output``.
    """
    used = [tensor for tensor in recipe.delayed_operands() if gradients or tensor != "grad_output"]
    return frozenset(tensor for tensor in used if histories[tensor][0].is_empty(histories[tensor][1]))


def load_histories(
    histories: Mapping[str, tuple[AmaxHistory, int]],
    state_dict: dict[str, torch.Tensor],
    prefix: str,
    errors: list[str],
) -> None:
    """Pop ``{prefix}amax.<tensor>`` from a state dict and load it. Those missing beside a weight start empty.

    Args:
        histories: tensor -> its history and slot.
        errors: gets a line for a state of other experts, or none; windows may have another length.
    """
    for tensor, (history, slot) in histories.items():
        key = f"{prefix}{AMAX}.{tensor}"
        state = state_dict.pop(key, None)
        if state is not None:
            here = history.state(slot).shape
            if state.dim() != len(here) or state.shape[:-1] != here[:-1] or not state.shape[-1]:
                shapes = f"shape {state.shape} from checkpoint, the shape in current model is {here}"
                errors.append(f"size mismatch for {key}: copying amaxes with {shapes}.")
                continue
        if state is not None or f"{prefix}weight" in state_dict:
            history.load_state(slot, state)
