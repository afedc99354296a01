"""Megatron-core's parallel linear layers with the three GEMMs of a recipe.

Initialization, gathering, bias and sharded state stay Megatron-core's; what is replaced is the one method through
which both layers reach their GEMMs. The communication around them is the stock layers': gather of the
sequence-parallel input, asynchronous all-reduce or reduce-scatter of the input gradient under the weight gradient.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_lowprec.kernels.contract.native import ScaledOperand
from megatron_lowprec.linear import GradOutput, Kept, LinearNumerics
from megatron_lowprec.mcore.collectives import gather_sequence, scatter_sequence
from megatron_lowprec.mcore.moment import current_moment
from megatron_lowprec.quantization.random_stream import Moment


class _ParallelLinearFunction(torch.autograd.Function):
    """Communication and gradient accumulation around a layer's fprop, dgrad and wgrad."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: "LowPrecLinearMixin",
        observe: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.layer, ctx.moment, ctx.use_bias = layer, current_moment(), bias is not None
        ctx.allreduce_dgrad, ctx.sequence_parallel, ctx.tp_group = allreduce_dgrad, sequence_parallel, tp_group
        total = gather_sequence(x, tp_group)[0] if sequence_parallel else x
        flat = total.reshape(-1, total.shape[-1])
        # under sequence parallelism a rank keeps its part of x alone, and gathers again
        keep = observe and not sequence_parallel
        y, kept = layer.bound_numerics.forward(flat, weight, ctx.moment, observe, bias, keep=keep)
        ctx.save_for_backward(weight, *kept.saved(x))
        ctx.tile, ctx.x_shape = kept.tile, x.shape
        return y

    @staticmethod
    def backward(ctx, dy_TO):  # type: ignore[no-untyped-def]
        weight, x, scale, weight_amax = ctx.saved_tensors
        numerics: LinearNumerics = ctx.layer.bound_numerics
        total, gathering, reducing = x, None, None
        if ctx.sequence_parallel:
            total, gathering = gather_sequence(x, ctx.tp_group, async_op=True)
        dy = numerics.grad_output(dy_TO, ctx.moment, bias=ctx.use_bias)
        dx = numerics.dgrad(dy, weight, ctx.moment, weight_amax).view(-1, *ctx.x_shape[1:])
        if gathering is not None:
            gathering.wait()
        if ctx.allreduce_dgrad:
            reducing = dist.all_reduce(dx, group=ctx.tp_group, async_op=True)
        elif ctx.sequence_parallel:
            dx, reducing = scatter_sequence(dx, ctx.tp_group)
        kept = total.reshape(-1, total.shape[-1]) if scale is None else Kept.restored(x, scale, ctx.tile)
        dw = ctx.layer.accumulate_wgrad(numerics, dy, kept, weight, ctx.moment)
        if reducing is not None:
            reducing.wait()
        return dx, dw, dy.bias, None, None, None, None, None


class LowPrecLinearMixin:
    """What both parallel layers share; ``bind_recipe`` gives each its numerics."""

    weight: torch.nn.Parameter
    tp_group: dist.ProcessGroup
    config: TransformerConfig
    numerics: LinearNumerics | None = None
    accumulates_in_fp32 = True

    @property
    def bound_numerics(self) -> LinearNumerics:
        """The layer's numerics; RuntimeError before ``mcore.runtime.bind_recipe``."""
        if self.numerics is None:
            raise RuntimeError(
                "this linear layer has no recipe: call megatron_lowprec.mcore.runtime.bind_recipe(model, recipe, …)"
            )
        return self.numerics

    def accumulate_wgrad(
        self,
        numerics: LinearNumerics,
        dy: GradOutput,
        x: torch.Tensor | ScaledOperand,
        weight: torch.Tensor,
        moment: Moment,
    ) -> torch.Tensor:
        """The weight gradient, or, added to an fp32 ``main_grad`` already, a dummy that DDP's hook drops."""
        main_grad = getattr(weight, "main_grad", None)
        if not self.accumulates_in_fp32 or main_grad is None or main_grad.dtype != torch.float32:
            return numerics.wgrad(dy, x, moment)
        numerics.wgrad(dy, x, moment, accumulate_into=main_grad)
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.empty_like(weight)

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        training = torch.is_grad_enabled() and weight.requires_grad
        y = _ParallelLinearFunction.apply(
            input,
            weight,
            bias,
            self,
            training,
            options["allreduce_dgrad"],
            options["sequence_parallel"],
            options["tp_group"],
        )
        # outside of the function: autograd forbids to change a view that a function returns
        return y.view(-1, *input.shape[1:-1], y.shape[-1])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The stock layer's, and the amax history of each tensor under delayed scaling, alike on all ranks."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        histories = self.numerics.histories if self.numerics is not None else {}
        amax = {f"amax.{operand}": history.state(slot) for operand, (history, slot) in histories.items()}
        if amax:
            state |= make_sharded_tensors_for_checkpoint(
                amax,
                prefix,
                {},
                sharded_offsets,
                tp_group=self.tp_group,
                dp_cp_group=(metadata or {})["dp_cp_group"],
            )
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.numerics is not None:
            self.numerics.load_histories(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


class LowPrecColumnParallelLinear(LowPrecLinearMixin, ColumnParallelLinear):
    """ColumnParallelLinear under a recipe; weight [out / tensor-parallel ranks, in]."""


class LowPrecRowParallelLinear(LowPrecLinearMixin, RowParallelLinear):
    """RowParallelLinear under a recipe; weight [out, in / tensor-parallel ranks]."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As Megatron-core's; an expert's output is no view, for its bias is added to it in place."""
        output, bias = super().forward(input_)
        return (output.clone() if self.is_expert and bias is not None else output), bias
