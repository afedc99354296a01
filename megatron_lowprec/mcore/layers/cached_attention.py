"""Core attention's output saved once, as packed codes, for its own backward pass and for wgrad of linear_proj.

DeepSeek-V3 (arXiv 2412.19437, section 3.3.3). Both backward passes compute with the decoded output; the forward pass
keeps its bits. autograd's hooks replace the output among the tensors that the attention kernel saves, whichever it is.
"""

from collections.abc import Callable

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.formats import Format
from megatron_lowprec.linear.layer_tensors import CachedInput
from megatron_lowprec.mcore.fusion import attach_metadata


class SavedTensor:
    """A tensor that core attention saves for backward: the tensor, or packed codes in its place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # detached: a node that holds its own output is never freed
        self._tensor: torch.Tensor | None = tensor.detach()
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._cached: CachedInput | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in memory."""
        return self._cached.tensors if self._tensor is None else (self._tensor,)  # type: ignore[union-attr]

    def replace(self, out: torch.Tensor, cached: CachedInput) -> None:
        """Hold ``cached`` instead, if the tensor is ``out`` [b, heads, s, e].

        Raises:
            UserError: the kernel saves its output with padded heads, of which ``out`` is a part.
        """
        assert self._tensor is not None
        if self._tensor.data_ptr() != out.data_ptr():
            return
        if self._shape != out.shape:
            raise UserError(
                f"the attention kernel saves its output in heads of {self._shape[-1]} channels, and the model has "
                f"{out.shape[-1]}, so activations.attention_output cannot replace it: give heads a multiple of 8 "
                "channels, or set activations.attention_output=none"
            )
        self._tensor, self._cached = None, cached

    def restore(self) -> torch.Tensor:
        """The tensor with its strides, which kernels check; decoded if it was replaced."""
        if self._tensor is not None:
            return self._tensor
        assert self._cached is not None
        b, heads, s, e = self._shape
        decoded = self._cached.restore(*self._cached.tensors).view(s, b, heads, e).permute(1, 2, 0, 3)
        return torch.empty_strided(self._shape, self._stride, dtype=decoded.dtype, device=decoded.device).copy_(decoded)


def token_major(out: torch.Tensor) -> torch.Tensor:
    """[b, heads, s, e] -> [s, b, heads * e]."""
    return out.permute(2, 0, 1, 3).reshape(out.shape[2], out.shape[0], -1)


def cached_output(attend: Callable[[], torch.Tensor], fmt: Format) -> torch.Tensor:
    """Output [s, b, heads * e] of ``attend``, which returns [b, heads, s, e], with its packed codes attached."""
    saved: list[SavedTensor] = []

    def pack(tensor: torch.Tensor) -> SavedTensor:
        saved.append(SavedTensor(tensor))
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, SavedTensor.restore):
        out = attend()
        x = token_major(out)
    cached = CachedInput.of(x, fmt)
    for each in saved:
        each.replace(out, cached)
    attach_metadata(x, cached_input=cached)
    return x
