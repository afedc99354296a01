"""Adds a bias to a product, in place where nothing else holds the product."""

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from megatron_lowprec.kernels.dispatch import add_bias_


def plus_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``y + bias``, each sum rounded once, for a new y [T, O] and bias [O].

    A dispatch mode may keep y: selective checkpoints do with results of ``aten.mm``, to return them in the backward
    pass, and a kernel's writes escape autograd's count of versions.
    """
    if bias is None:
        return y
    return add_bias_(y, bias) if _get_current_dispatch_mode() is None else y + bias
