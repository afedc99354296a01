"""Gradient of one weight, fp32 while it is written and FP8 codes afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron_lowprec.comm.gradient_codes import GradientCodes
from megatron_lowprec.mcore.debug.finite import all_finite


class StoredGradient:
    """The attribute ``stored_gradient`` of a weight, and the states of its ``main_grad``.

    ``main_grad`` is fp32 from ``begin_write`` to ``cast``, and again after ``expose``; else a placeholder.

    Args:
        weight: the weight, which DistributedDataParallel has given a ``main_grad``.
        codes: codes of its bucket.
        index: the weight's tensor in ``codes``.
        more_microbatches: returns whether the step has microbatches after the present one; None if gradients are cast
            after each microbatch.

    Attributes:
        weight, codes, index: the arguments.
    """

    def __init__(
        self, weight: nn.Parameter, codes: GradientCodes, index: int, more_microbatches: Callable[[], bool] | None
    ) -> None:
        self.weight = weight
        self.codes, self.index, self._more_microbatches = codes, index, more_microbatches
        self._placeholder = torch.full((), torch.nan, device=codes.codes.device).expand(weight.shape)
        self.reset()

    def reset(self) -> None:
        """Drop the gradient, at the beginning of a step."""
        self._writable = self._cast = self._exposed = self._replayed = False
        self.main_grad = self._placeholder

    @property
    def main_grad(self) -> torch.Tensor:
        """``main_grad`` of the weight."""
        found: torch.Tensor = self.weight.main_grad  # type: ignore[attr-defined]
        return found

    @main_grad.setter
    def main_grad(self, value: torch.Tensor) -> None:
        self.weight.main_grad = value  # type: ignore[attr-defined]

    def register_hooks(self) -> None:
        """Prepare and cast ``main_grad`` around Megatron-core's hook, which adds the gradient of autograd to it."""
        self.weight.stored_gradient = self  # type: ignore[attr-defined]
        self.weight.register_hook(self.begin_write)
        # Megatron-core keeps the node, whose hooks run in the order of their registration. Kept here as well, it would
        # never be freed: it has the weight, in a way that Python's garbage collector cannot see.
        view: Any = self.weight.expand_as(self.weight)
        view.grad_fn.next_functions[0][0].register_hook(self.end_write)

    def begin_write(self, *_: Any, overwrites: bool = False) -> None:
        """Make ``main_grad`` fp32, of the weight's shape, with the sum of the microbatches so far.

        Args:
            overwrites: whether the caller writes all entries if this is the first gradient of a step; they are
                undefined then instead of 0.

        Raises:
            RuntimeError: the gradient was reduced already, or was cast before the last microbatch although the recipe
                accumulates in fp32.
        """
        if self._writable or self._replayed:
            return
        if self.codes.reduced:
            raise RuntimeError("a weight has a second gradient in a step after its gradient was reduced over ranks")
        if self._cast and self._more_microbatches is not None:
            raise RuntimeError(
                "a weight has another gradient after its step's last microbatch: run all microbatches but the last "
                "in DistributedDataParallel.no_sync(), or set gradients.accumulation=format"
            )
        if overwrites and not self.codes.is_filled(self.index):
            self.main_grad = torch.empty(self.weight.shape, device=self._placeholder.device)
        else:
            self.main_grad = self.codes.local(self.index).view(self.weight.shape)
        self._writable = True

    def end_write(self, *_: Any) -> None:
        """Cast ``main_grad`` and free it, unless it stays fp32 for the next microbatch."""
        if self._more_microbatches is None or not self._more_microbatches():
            self.cast()
        self._replayed = False

    def capture(self, grad: torch.Tensor | None) -> None:
        """Finish a microbatch's gradient within a CUDA graph, whose replays call no hooks: add ``grad``, then cast.

        Args:
            grad: gradient of autograd; None if it is in ``main_grad`` already.
        """
        if grad is not None:
            self.begin_write()
            self.main_grad.add_(grad)  # as Megatron-core's hook does, which a graph replaces
        self.cast()

    def replayed(self) -> None:
        """State that a graph has written the codes; the hooks of this microbatch have nothing to do."""
        self.codes.fill(self.index)
        self._cast = self._replayed = True

    def cast(self) -> None:
        """Cast ``main_grad``, if it is being written, and free it."""
        if self._writable:
            self.codes.cast(self.index, self.main_grad)
            self.main_grad = self._placeholder
            self._writable, self._cast = False, True

    def expose(self, start: int, end: int) -> None:
        """Make ``main_grad`` the reduced gradient in fp32, zero outside of this rank's part, until ``release``.

        Args:
            start, end: entries of the weight in this rank's part; equal if there are none.
        """
        main_grad = torch.zeros(self.weight.shape, device=self._placeholder.device)
        if start < end:
            main_grad.view(-1)[start:end] = self.codes.part(self.index, start, end)
        self.main_grad, self._exposed = main_grad, True

    def release(self) -> None:
        """Free an exposed gradient, after the update."""
        if self._exposed:
            self.main_grad, self._exposed = self._placeholder, False

    def part(self, start: int, end: int, decoded: Callable[[int, int, int], torch.Tensor]) -> torch.Tensor:
        """Entries ``start`` to ``end`` of the reduced gradient, which lie in this rank's part: fp32 [entries].

        Args:
            decoded: ``parts()`` of ``codes``.
        """
        return self.main_grad.view(-1)[start:end] if self._exposed else decoded(self.index, start, end)

    def scale_exposed_(self, factor: float | torch.Tensor) -> None:
        """Multiply the gradient by ``factor`` if it is exposed; the codes of a bucket have their own scales."""
        if self._exposed:
            self.main_grad.mul_(factor)

    def is_finite(self) -> bool:
        """Whether the reduced gradient is finite on all ranks; synchronizes with the device."""
        return self.codes.is_finite(self.index)


def writable_main_grad(weight: torch.Tensor, overwrites: bool = False) -> torch.Tensor | None:
    """``main_grad`` of a weight, ready to be written; None without one. Call it before a weight gradient is added.

    Args:
        overwrites: whether the first gradient of a step is written instead of added, to all entries.
    """
    stored: StoredGradient | None = getattr(weight, "stored_gradient", None)
    if stored is not None:
        stored.begin_write(overwrites=overwrites)
        return stored.main_grad  # the weight may be a copy of the layer's own for a capture
    return getattr(weight, "main_grad", None)


def added_to_main_grad(weight: torch.Tensor, dense: bool = True) -> torch.Tensor:
    """Tell DDP's hook that ``main_grad`` has the weight's gradient; the dummy for autograd, of the weight's shape.

    Args:
        dense: True for undefined entries, which the hook drops. False for sparse zeros, which take no memory and may be
            added: a weight that two layers use has Megatron-core's ``zero_out_wgrad``, and the hook adds its dummy.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if dense:
        assert not getattr(weight, "zero_out_wgrad", False), "the hook would add undefined entries"
        return torch.empty_like(weight)
    return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device, layout=torch.sparse_coo)


def has_finite_gradient(weight: torch.Tensor) -> bool:
    """Whether the reduced gradient of a weight is finite; True without one. Synchronizes with the device."""
    stored: StoredGradient | None = getattr(weight, "stored_gradient", None)
    if stored is not None:
        return stored.is_finite()
    main_grad = getattr(weight, "main_grad", None)
    return main_grad is None or bool(all_finite(main_grad))
