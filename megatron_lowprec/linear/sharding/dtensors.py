"""What tells a DTensor, and a tensor that a collective of DTensor still writes, from others."""

from typing import Any

import torch

UNFINISHED = "AsyncCollectiveTensor"
"""Class of a tensor that a collective writes; views of it do not wait."""


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is a DTensor; by name, because its import takes longer than a conversion."""
    return type(tensor).__name__ == "DTensor"


def waited(tensor: Any) -> Any:
    """What a collective of DTensor writes, after its end: a kernel would get the address 0. A copy under autograd."""
    if type(tensor).__name__ != UNFINISHED:
        return tensor
    return tensor.clone() if torch.is_grad_enabled() else tensor.wait()
