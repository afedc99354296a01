"""Weight gradients of embedding and output layer, added to an fp32 ``main_grad`` as linear layers add theirs.

Megatron-core rounds each to the compute dtype, [V, H], and adds it in a pass of its own: 12 bytes an entry in bf16.
Here the output layer moves 8, and the embedding only the rows of the microbatch's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from torch import nn

from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.linear.once_differentiable import once_differentiable
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecLinearMixin
from megatron_lowprec.mcore.optim.stored_gradient import added_to_main_grad, writable_main_grad
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.recipe.schema import LinearRecipe


def accumulate_vocabulary_gradients(chunks: Iterable[nn.Module]) -> list[str]:
    """Let the embedding and the output layer of untied models add their gradients; a note about each that does not.

    A tied weight has one gradient for both, of which autograd is given the sum. Call it on GPUs, before training.
    """
    reasons: dict[str, str | None] = {}
    for model in (module for chunk in chunks for module in chunk.modules() if isinstance(module, GPTModel)):
        if model.share_embeddings_and_output_weights:
            continue
        # of a pipeline stage; for multi-token prediction the last one has an embedding as well
        if hasattr(model, "embedding"):
            reasons["embedding"] = _replace_embedding(model.embedding.word_embeddings)
        if hasattr(model, "output_layer"):
            reasons["output layer"] = _replace_output_layer(model.output_layer)
    rounded = "its weight gradient passes through the compute dtype on its way to main_grad"
    return [f"{name}: {rounded}, since {reason}" for name, reason in reasons.items() if reason is not None]


def _replace_embedding(words: Any) -> str | None:
    """Why it stays Megatron-core's; None if it does not."""
    if type(words) is not VocabParallelEmbedding:
        return f"its class is {type(words).__name__}"
    if words.tp_group.size() > 1 or words.reduce_scatter_embeddings:
        return "tensor-parallel ranks share it"
    words.__class__ = AccumulatingEmbedding  # GPTModel builds its own
    return None


def _replace_output_layer(output: Any) -> str | None:
    """As ``_replace_embedding``."""
    if type(output) is not ColumnParallelLinear:
        return f"its class is {type(output).__name__}"
    if output.bias is not None:
        return "it has a bias"
    if output.config.defer_embedding_wgrad_compute:
        return "defer_embedding_wgrad_compute leaves it until the pipeline is empty"
    output.__class__ = AccumulatingOutputLayer
    output.gemms = _UnquantizedGemms(output.tp_group)
    return None


class _UnquantizedGemms(LowPrecLinearMixin):
    """The GEMMs of a parallel layer that no recipe reaches; no module, so that nothing takes it for a layer."""

    training = True
    dense_dummy = False  # which would be as large as the weight, beside the logits

    def __init__(self, tp_group: dist.ProcessGroup) -> None:
        recipe = LinearRecipe("bf16", "in the compute dtype")
        self.linear_gemms = LinearGemms(recipe, LinearId(0, "output_layer"), 0, AmaxHistory)
        self.tp_group = tp_group


class AccumulatingOutputLayer(ColumnParallelLinear):
    """``ColumnParallelLinear`` that adds its gradient to an fp32 ``main_grad``."""

    gemms: _UnquantizedGemms

    def _forward_impl(self, *args: Any, **options: Any) -> torch.Tensor:
        return self.gemms._forward_impl(*args, **options)


class AccumulatingEmbedding(VocabParallelEmbedding):
    """``VocabParallelEmbedding`` on one tensor-parallel rank, which adds its gradient to an fp32 ``main_grad``."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> [..., H]"""
        main_grad = getattr(self.weight, "main_grad", None)
        adds = main_grad is not None and main_grad.dtype == torch.float32 and self.weight.requires_grad
        if not (adds and torch.is_grad_enabled()):
            found: torch.Tensor = super().forward(input_)
            return found
        looked_up: torch.Tensor = _Lookup.apply(self.weight, input_)
        return looked_up


@once_differentiable("an embedding that adds to main_grad")
class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        rows, main_grad = dy.reshape(-1, dy.shape[-1]), writable_main_grad(weight, False)
        assert main_grad is not None
        # sorts the ids and adds rows of one id in a fixed order
        main_grad.index_put_((ids.reshape(-1),), rows.float(), accumulate=True)
        return added_to_main_grad(weight, dense=False), None
