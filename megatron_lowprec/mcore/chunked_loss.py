"""Output layer and cross entropy by chunks of tokens: the logits of a microbatch never exist at once.

The forward pass saves the hidden states only. The backward pass computes the logits of each chunk again, one more GEMM
of the output layer, and its gradients before the next chunk's. A chunk's loss is the model's own, so under tensor
parallelism it has the all-reduces of the whole. No supported release of Megatron-core fuses the two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megatron_lowprec.kernels.gemm.reference import gemm
from megatron_lowprec.linear.once_differentiable import once_differentiable
from megatron_lowprec.mcore.collectives import gather_sequence, scatter_sequence
from megatron_lowprec.mcore.layers.parallel_linear import TensorParallelConfig, await_weights
from megatron_lowprec.mcore.optim.stored_gradient import added_to_main_grad, writable_main_grad

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""labels int64 [1, n], logits [n, 1, V / ranks] -> losses [1, n], as ``GPTModel.compute_language_model_loss``."""


def chunked_losses(model: GPTModel, hidden: torch.Tensor, labels: torch.Tensor, size: int) -> torch.Tensor:
    """Loss of each token [b, s] with the logits of ``size`` tokens in memory, the last chunk's of fewer.

    A token's loss has the bits of the unchunked one if a row of a GEMM has the same bits among fewer rows. The weight
    gradient is a sum over chunks in fp32: in ``main_grad`` if that is fp32, else in memory of its own.

    Args:
        model: the last pipeline stage.
        hidden: [s, b, H], or this rank's [s / ranks, b, H] under sequence parallelism.
        labels: int64 [b, s].
    """
    layer = model.output_layer
    await_weights(layer)
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else layer.weight
    tp = TensorParallelConfig(layer.allreduce_dgrad, layer.sequence_parallel, layer.tp_group)
    losses: torch.Tensor = _ChunkedLoss.apply(hidden, weight, labels, size, model.compute_language_model_loss, tp)
    return losses


@once_differentiable("the loss by chunks of tokens")
class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        size: int,
        loss: Loss,
        tp: TensorParallelConfig,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.size, ctx.loss, ctx.tp = size, loss, tp
        x_TH, ids = _all_tokens(hidden, tp), labels.t().reshape(-1)
        losses = [loss(ids[None, part], (x_TH[part] @ weight.t())[:, None])[0] for part in _parts(ids, size)]
        return torch.cat(losses).view(labels.t().shape).t().contiguous()

    @staticmethod
    def backward(ctx, dlosses):  # type: ignore[no-untyped-def]
        (hidden, weight, labels), tp = ctx.saved_tensors, ctx.tp
        needs_x, needs_w = ctx.needs_input_grad[:2]
        x_TH, ids, dloss = _all_tokens(hidden, tp), labels.t().reshape(-1), dlosses.t().reshape(-1)
        dx = torch.empty_like(x_TH) if needs_x else None
        main_grad = writable_main_grad(weight) if needs_w else None
        accumulates = main_grad is not None and main_grad.dtype == torch.float32
        dw = main_grad if accumulates else torch.zeros_like(weight, dtype=torch.float32) if needs_w else None
        for part in _parts(ids, ctx.size):
            dlogits = _logits_gradient(x_TH[part] @ weight.t(), ids[part], dloss[part], ctx.loss)
            if dx is not None:
                torch.mm(dlogits, weight, out=dx[part])
            if dw is not None:
                gemm(dlogits.t(), x_TH[part].t(), out_dtype=torch.float32, accumulate_into=dw)
            del dlogits  # before the next chunk's
        if dx is not None:
            dx = _reduced(dx.view(-1, *hidden.shape[1:]), tp)
        if dw is not None:
            dw = added_to_main_grad(weight, dense=False) if accumulates else dw.to(weight.dtype)
        return dx, dw, None, None, None, None


def _parts(tokens: torch.Tensor, size: int) -> list[slice]:
    return [slice(first, first + size) for first in range(0, len(tokens), size)]


def _all_tokens(hidden: torch.Tensor, tp: TensorParallelConfig) -> torch.Tensor:
    """[T, H] of all ranks that shard the sequence."""
    whole = gather_sequence(hidden, tp.tp_group)[0] if tp.sequence_parallel else hidden
    return whole.reshape(-1, whole.shape[-1])


def _logits_gradient(logits: torch.Tensor, ids: torch.Tensor, dloss: torch.Tensor, loss: Loss) -> torch.Tensor:
    """[n, V / ranks] from logits [n, V / ranks], which it may overwrite, and the gradients [n] of their losses."""
    with torch.enable_grad():
        losses = loss(ids[None], logits.requires_grad_()[:, None])
    return torch.autograd.grad(losses, logits, dloss[None])[0]


def _reduced(dx: torch.Tensor, tp: TensorParallelConfig) -> torch.Tensor:
    """[s, b, H] summed over the shards of the vocabulary; this rank's tokens under sequence parallelism."""
    if tp.sequence_parallel:
        dx, reducing = scatter_sequence(dx, tp.tp_group)
        if reducing is not None:
            reducing.wait()
    elif tp.allreduce_dgrad:
        dist.all_reduce(dx, group=tp.tp_group)
    return dx
