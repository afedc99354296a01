"""An amax that travels with its tensor, from the kernel that wrote the tensor to the layer that casts it.

A hint that got lost on the way (``carried``) costs a pass over the tensor.
"""

import torch

from megatron_lowprec.mcore.carried import carried, carry


def note_amax(x: torch.Tensor, amax: torch.Tensor) -> None:
    """Say that ``amax``, fp32 [1], is that of x as it is now."""
    carry(x, "amax", amax)


def known_amax(x: torch.Tensor) -> torch.Tensor | None:
    """The amax of x, where it was noted and x is still the same."""
    amax: torch.Tensor | None = carried(x, "amax")
    return amax
