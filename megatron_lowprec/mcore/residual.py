"""The residual of a norm's input: as it leaves the norm, so that its gradient is added where the norm's is computed.

Autograd would add both in a kernel of its own: a third of a norm's backward pass again, twice a layer. A residual that
gets lost on the way (``carried``) costs that.
"""

import torch

from megatron_lowprec.mcore.carried import carried, carry


def note_residual(x: torch.Tensor, residual: torch.Tensor) -> None:
    """Say that ``residual`` is x for whoever adds x to what the norm of x has led to; shares its memory."""
    if residual.requires_grad:  # else of a pass that nobody goes backward through: its memory is all it has of x
        carry(x, "residual", residual)


def residual_of(x: torch.Tensor) -> torch.Tensor:
    """What was noted for x, where x is still the same; else x."""
    residual: torch.Tensor | None = carried(x, "residual")
    return x if residual is None else residual
