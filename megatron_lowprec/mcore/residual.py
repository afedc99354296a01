"""The residual of a norm's input: as it leaves the norm, so that its gradient is added where the norm's is computed.

Autograd would add both in a kernel of its own: a third of a norm's backward pass again, twice a layer. A residual that
gets lost on the way (``carried``) costs that.
"""

import weakref

import torch

from megatron_lowprec.mcore.carried import carried, carry


def note_residual(x: torch.Tensor, y: torch.Tensor, residual: torch.Tensor) -> None:
    """Say that ``residual`` is x for whoever adds x to what the norm of x has led to; shares its memory.

    Args:
        x: the norm's input.
        y: its output, as long as which the residual lives. x has a weak reference alone: where x is a leaf (a
            recomputed layer's input, a pipeline stage's), the residual's graph holds x, and autograd's part of such a
            circle is never freed.
        residual: of the norm's function; one of a pass that nobody goes backward through counts for nothing.
    """
    if residual.requires_grad:
        carry(y, "residual_of_input", residual)
        carry(x, "residual", weakref.ref(residual))
    else:
        carry(x, "residual", None)


def residual_of(x: torch.Tensor) -> torch.Tensor:
    """What was noted for x, where x is still the same and the norm's output still there; else x."""
    noted = carried(x, "residual")
    residual: torch.Tensor | None = None if noted is None else noted()
    return x if residual is None else residual
