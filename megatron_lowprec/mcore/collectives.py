"""Collectives of the linear layers: of sequences under torch's old and new names, and of amaxes."""

from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_lowprec.comm.maximum import max_over
from megatron_lowprec.linear.once_differentiable import once_differentiable
from megatron_lowprec.mcore.fusion import GradOutputChannel
from megatron_lowprec.quantization.tensor import QuantizedTensor

# torch 2.13 renamed both and deprecates the old names; torch 2.11 has only the old ones
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Work = dist.Work | None


def gather_sequence(x: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False) -> tuple[torch.Tensor, Work]:
    """[s / ranks, ...] of each rank -> [s, ...] and, if ``async_op``, the handle to wait for."""
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    wire, into = x.contiguous(), out
    if x.element_size() == 1:  # gloo knows no FP8 dtype
        wire, into = wire.view(torch.uint8), out.view(torch.uint8)
    return out, _all_gather(into, wire, group=group, async_op=async_op)


def gather_codes(codes: QuantizedTensor, group: dist.ProcessGroup) -> QuantizedTensor:
    """Rowwise FP8 codes [T / ranks, K] of each rank -> [T, K], a byte an entry; ranks hold the same scale [1, 1]."""
    data, scale = codes.rowwise()
    whole, _ = gather_sequence(data, group)
    return QuantizedTensor(whole.shape, codes.dtype, codes.spec, whole, scale)


def scatter_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Work]:
    """[s, ...] summed over the ranks -> this rank's [s / ranks, ...], and the handle to wait for."""
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    return out, _reduce_scatter(out, x.contiguous(), group=group, async_op=True)


@once_differentiable("a reduce-scatter whose gradient is gathered as codes")
class ReduceScatter(torch.autograd.Function):
    """Sums a row-parallel layer's output over the ranks, each of which keeps its tokens; gathers dy as FP8 codes."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, y: torch.Tensor, channel: GradOutputChannel, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.channel, ctx.group, ctx.y_shape = channel, group, y.shape
        shard, reducing = scatter_sequence(y, group)
        if reducing is not None:
            reducing.wait()
        return shard

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        channel, linear_gemms = ctx.channel, ctx.channel.linear_gemms
        shard = channel.get(dy)
        if shard is None:
            shard = linear_gemms.grad_output(dy.reshape(-1, dy.shape[-1]), channel.rng_step, shard=True)
        grad = linear_gemms.gathered_grad_output(shard, partial(gather_codes, group=ctx.group))
        return channel.put(grad).view(ctx.y_shape), None, None


def reduce_over_holders(amax: torch.Tensor, expert: bool) -> torch.Tensor:
    """Maximum over the ranks with shards (tensor-parallel) or replicas (data-parallel) of the tensors."""
    if not expert:
        return max_over(amax, parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
    groups = parallel_state.get_expert_tensor_parallel_group(), parallel_state.get_expert_data_parallel_group()
    return max_over(amax, *groups)
