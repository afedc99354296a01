"""What travels with a tensor, past modules of Megatron-core that know tensors alone.

It gets lost where somebody makes another tensor of this one, a view included, and does not count where the tensor was
changed since.
"""

from typing import Any

import torch


def carry(x: torch.Tensor, name: str, what: Any) -> None:
    """Let x, as it is now, carry ``what`` by that name."""
    setattr(x, f"lowprec_{name}", (x._version, what))


def carried(x: torch.Tensor, name: str) -> Any:
    """What x carries by that name, where it is still the same; else None."""
    version, what = getattr(x, f"lowprec_{name}", (None, None))
    return what if version == x._version else None
