"""An amax that travels with its tensor, from the kernel that wrote the tensor to the layer that casts it.

Modules of Megatron-core lie between both and know tensors alone. A hint that got lost, because somebody made another
tensor of this one, costs a pass over it; one of a tensor that was changed since does not count.
"""

import torch


def note_amax(x: torch.Tensor, amax: torch.Tensor) -> None:
    """Say that ``amax``, fp32 [1], is that of x as it is now."""
    x.lowprec_amax = (x._version, amax)  # type: ignore[attr-defined]


def known_amax(x: torch.Tensor) -> torch.Tensor | None:
    """The amax of x, where it was noted and x is still the same."""
    version, amax = getattr(x, "lowprec_amax", (None, None))
    return amax if version == x._version else None
