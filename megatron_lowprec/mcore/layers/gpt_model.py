"""Megatron-core's GPTModel with a fused cross entropy that does not save the softmax."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import nn

from megatron_lowprec.kernels import dispatch
from megatron_lowprec.linear.once_differentiable import once_differentiable
from megatron_lowprec.mcore.chunked_loss import chunked_losses
from megatron_lowprec.mcore.patches import bind


@once_differentiable("the fused cross entropy")
class _CrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        logits, flat = logits.contiguous(), targets.reshape(-1).contiguous()
        width = logits.shape[-1]
        first = group.rank() * width
        maximum, total, target = dispatch.logit_sums(logits.view(-1, width), flat, first)
        if group.size() > 1:
            highest = maximum.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            both = torch.stack((total * (maximum - highest).exp(), target))
            dist.all_reduce(both, group=group)
            maximum, (total, target) = highest, both.unbind(0)
        log_total = total.log() + maximum
        ctx.save_for_backward(logits, flat, log_total)
        ctx.first = first
        return (log_total - target).view(targets.shape)

    @staticmethod
    def backward(ctx, dloss):  # type: ignore[no-untyped-def]
        logits, flat, log_total = ctx.saved_tensors
        rows = logits.view(-1, logits.shape[-1])
        gradient = dispatch.logits_gradient_(rows, flat, ctx.first, log_total, dloss.reshape(-1).float().contiguous())
        # autograd cannot see the write: a second backward pass over these logits must fail, not read gradients
        torch.autograd.graph.increment_version(logits)
        return gradient.view(logits.shape), None, None


def vocab_parallel_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Loss of each token in nats, fp32, the same on all ranks. The backward pass overwrites ``logits`` in place.

    Args:
        logits: [..., V / ranks], this rank's shard of the vocabulary; no other backward pass may need them.
        targets: int64 [...], token ids in the whole vocabulary.
        group: the tensor-parallel ranks.
    """
    return _CrossEntropyFunction.apply(logits, targets, group)


class LowPrecGPTModel(GPTModel):
    """``GPTModel`` with a loss that is fused on a GPU if ``config.cross_entropy_loss_fusion`` is set.

    Attributes:
        output_layer_chunk_size: tokens whose logits exist at once in a call with labels; None for all.
    """

    output_layer_chunk_size: int | None = None

    def _postprocess(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        size, labels = self.output_layer_chunk_size, options["labels"]
        if size is None or labels is None or not self.post_process:
            found: torch.Tensor = super()._postprocess(hidden_states, **options)
            return found
        return chunked_losses(self, hidden_states, labels, size)

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """labels int64 [b, s], logits [s, b, V / ranks] -> loss of each token [b, s]."""
        return _language_model_loss(self, super().compute_language_model_loss, labels, logits)


def fuse_loss(model: nn.Module) -> None:
    """Give a ``GPTModel`` that was built elsewhere the loss of ``LowPrecGPTModel``."""
    if isinstance(model, GPTModel) and model.config.cross_entropy_fusion_impl == "native":
        fused = partial(_language_model_loss, model, model.compute_language_model_loss)
        bind("fused_loss", model, compute_language_model_loss=fused)


def _language_model_loss(
    model: GPTModel,
    unfused: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    labels: torch.Tensor,
    logits: torch.Tensor,
) -> torch.Tensor:
    if not model.config.cross_entropy_loss_fusion or not dispatch.fuses(logits):
        return unfused(labels, logits)
    losses = vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous(), model.pg_collection.tp)
    return losses.transpose(0, 1).contiguous()
