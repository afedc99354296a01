"""Megatron-core's MLP with its activation in one kernel, or within the casts of the operands around it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowprec.kernels import dispatch
from megatron_lowprec.kernels.activation import BIAS_GELU, SWIGLU, Activation
from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue
from megatron_lowprec.linear.layer_tensors import CachedInput, CastFusion, GradOutput, SavedForBackward, backward_gemms
from megatron_lowprec.linear.once_differentiable import once_differentiable
from megatron_lowprec.mcore.fusion import GradOutputChannel, cached_amax
from megatron_lowprec.mcore.layers.cached_swiglu import CachedSwigluMLP
from megatron_lowprec.mcore.layers.parallel_linear import (
    LowPrecLinearMixin,
    LowPrecRowParallelLinear,
    TensorParallelConfig,
    await_weights,
    gradients,
    layer_input,
)
from megatron_lowprec.mcore.rng_step import current_rng_step


@once_differentiable("a fused activation")
class _ActivationFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, y: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> torch.Tensor:
        rows = y.reshape(-1, y.shape[-1]).contiguous()
        ctx.save_for_backward(rows, bias)
        ctx.activation = activation
        return activation.forward(rows, bias, None).view(*y.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        rows, bias = ctx.saved_tensors
        dout_rows = dout.reshape(-1, dout.shape[-1]).contiguous()
        dy, dbias = ctx.activation.backward(dout_rows, rows, bias, None)
        return dy.view(*dout.shape[:-1], -1), dbias, None


@once_differentiable("a fused MLP")
class _MlpFunction(torch.autograd.Function):
    """fc1, activation, fc2. The activation between the GEMMs is cast to FP8 operands directly, or written with its
    amax if the casts use one; it can be recomputed instead of saved for backward.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        x: torch.Tensor,
        w1: torch.Tensor,
        bias: torch.Tensor | None,
        w2: torch.Tensor,
        mlp: "LowPrecMLP",
        activation: Activation,
        update_amax: bool,
        saves_inputs: tuple[bool, bool],
        fusion: tuple[CastFusion, CastFusion],
        channel: GradOutputChannel | None,
        cached: CachedInput | None,
    ) -> torch.Tensor:
        fc1, fc2 = mlp.linear_fc1, mlp.linear_fc2
        ctx.mlp, ctx.rng_step, ctx.fusion, ctx.channel = mlp, current_rng_step(), fusion, channel
        ctx.activation, ctx.update_amax = activation, update_amax
        tp = _tp_config(fc1)
        amax = None if tp.sequence_parallel else cached_amax(x)
        await_weights(fc1)
        x_TI, gather = layer_input(x, fc1.bound_gemms, tp)
        y, first = fc1.bound_gemms.forward(
            x_TI,
            w1,
            ctx.rng_step,
            update_amax,
            save_input=saves_inputs[0] and not tp.sequence_parallel and cached is None,
            amax=amax,
            layer_input=x,
            gather=gather,
        )
        active, amax = _active(activation, y, bias, fusion[0])
        saves = saves_inputs[1] and not mlp.recompute_gelu
        await_weights(fc2)
        out, second = fc2.bound_gemms.forward(active, w2, ctx.rng_step, update_amax, save_input=saves, amax=amax)
        first = first if saves_inputs[0] and cached is None else first.without_input()
        second = second if saves else second.without_input()
        of_cached, ctx.restore = ((), None) if cached is None else cached
        ctx.save_for_backward(y, bias, *first.tensors(), *second.tensors(), *of_cached)
        ctx.layouts, ctx.cached = (first.layout, second.layout), len(of_cached)
        return out

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        y, bias, *tensors = ctx.saved_tensors
        own = len(tensors) - ctx.cached
        first = SavedForBackward(*tensors[: own // 2], layout=ctx.layouts[0])
        second = SavedForBackward(*tensors[own // 2 : own], layout=ctx.layouts[1])
        fc1, fc2, rng_step, activation = ctx.mlp.linear_fc1, ctx.mlp.linear_fc2, ctx.rng_step, ctx.activation
        input_fusion, grad_output_fusion = ctx.fusion
        needs_x, needs_w1, needs_bias, needs_w2 = ctx.needs_input_grad[:4]
        gemms1 = backward_gemms(needs_x, needs_w1)
        gemms2 = backward_gemms(bool(gemms1) or needs_bias, needs_w2)

        def dy2() -> GradOutput:
            grad = None if ctx.channel is None else ctx.channel.get(dout)
            return grad or fc2.bound_gemms.grad_output(dout, rng_step, update_amax=ctx.update_amax, gemms=gemms2)

        recompute = partial(_active, activation, y, bias, input_fusion) if second.x is None else None
        dactive, dw2, _ = gradients(fc2, dy2, second, rng_step, _alone(fc2), gemms2, recompute)

        def dy1() -> GradOutput:
            nonlocal dactive  # freed as soon as it has been read, as the matrix is once both directions are cast
            of_active, dactive = dactive, None
            if grad_output_fusion == "source":
                computed, sums = activation.grad_source(of_active, y, bias), bias is not None
                return fc1.bound_gemms.grad_output(computed, rng_step, bias=sums, update_amax=ctx.update_amax)
            amax = _room_for_amax(y, grad_output_fusion)
            matrix, dbias = activation.backward(of_active, y, bias, amax)
            del of_active
            grad = fc1.bound_gemms.grad_output(matrix, rng_step, amax=amax, update_amax=ctx.update_amax, gemms=gemms1)
            return replace(grad.without_matrix(), bias=dbias)

        dx = dw1 = dbias = None
        if dactive is not None:
            restore = None if ctx.restore is None else lambda: (ctx.restore(*tensors[own:]), None)
            dx, dw1, dbias = gradients(fc1, dy1, first, rng_step, _tp_config(fc1), gemms1, restore)
        return dx, dw1, dbias, dw2, None, None, None, None, None, None, None


def _active(
    activation: Activation, y: torch.Tensor, bias: torch.Tensor | None, fusion: CastFusion
) -> tuple[torch.Tensor | CastPrologue, torch.Tensor | None]:
    """fc2's input as tensor or cast prologue, with its amax if the casts use one."""
    if fusion == "source":
        return activation.source(y, bias), None
    amax = _room_for_amax(y, fusion)
    return activation.forward(y, bias, amax), amax


def _room_for_amax(y: torch.Tensor, fusion: CastFusion) -> torch.Tensor | None:
    return torch.zeros(1, dtype=torch.float32, device=y.device) if fusion == "amax" else None


def _tp_config(layer: ColumnParallelLinear) -> TensorParallelConfig:
    return TensorParallelConfig(layer.allreduce_dgrad, layer.sequence_parallel, layer.tp_group)


def _alone(layer: LowPrecLinearMixin) -> TensorParallelConfig:
    """Configuration of a layer whose input is sharded over the ranks."""
    return TensorParallelConfig(allreduce_dgrad=False, sequence_parallel=False, tp_group=layer.tp_group)


class LowPrecMLP(CachedSwigluMLP):
    """``MLP``, fused for CUDA tensors where Megatron-core would fuse the activation.

    Attributes:
        recompute_gelu: where fused, save only fc1's output and recompute fc2's input in the backward pass.
    """

    recompute_gelu = False

    @classmethod
    def of(cls, submodules: MLPSubmodules) -> Callable[..., "LowPrecMLP"]:
        """What a layer builds its MLP with.

        Until 0.17 ``TransformerLayer`` passes process groups only to classes that it knows by name, and warns of any
        other in a ModuleSpec. A plain class is simply instantiated, with a config.
        """
        if hasattr(cls, "as_mlp_submodule"):  # from 0.18 on
            return partial(cls.as_mlp_submodule, submodules=submodules)

        class Built(cls):  # type: ignore[misc,valid-type]
            def __init__(self, config: TransformerConfig) -> None:
                group = parallel_state.get_tensor_model_parallel_group()
                super().__init__(config, submodules, ffn_hidden_size=config.ffn_hidden_size, tp_group=group)

        return Built

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[s, b, h] -> [s, b, h] and the bias that the caller must add."""
        output, bias = self._forward(hidden_states, per_token_scale, **kwargs)
        if bias is not None and not torch.is_grad_enabled():
            # Megatron-core's checkpoint returns it from an autograd function. The parameter would become that
            # function's output, and the recomputation's backward pass would recurse into the recomputation.
            bias = bias.detach()
        return output, bias

    def _forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        activation = self.fused_activation()
        if per_token_scale is not None or activation is None or not dispatch.fuses(hidden_states):
            return super().forward(hidden_states, per_token_scale, **kwargs)
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        if isinstance(fc1, LowPrecLinearMixin) and isinstance(fc2, LowPrecRowParallelLinear):
            fusion = self._supported_fusion(hidden_states)
            if any(fusion) or self.recompute_gelu:
                return self._joined(hidden_states, activation, fusion)
        y, bias = fc1(hidden_states)
        return fc2(_ActivationFunction.apply(y, bias, activation))

    def _supported_fusion(self, hidden_states: torch.Tensor) -> tuple[CastFusion, CastFusion]:
        """Fusions that spare a pass over fc2's input and over the gradient of fc1's output."""
        for layer in (self.linear_fc1, self.linear_fc2):
            layer.bound_gemms.backends.resolve(layer.weight)
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        forward: CastFusion = self.linear_fc2.bound_gemms.supported_fusion("input", rows)
        return forward, self.linear_fc1.bound_gemms.supported_fusion("grad_output", rows)

    def _joined(
        self, hidden_states: torch.Tensor, activation: Activation, fusion: tuple[CastFusion, CastFusion]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        w1, w2, with_grad = fc1.weight, fc2.weight, torch.is_grad_enabled()
        saves_inputs = with_grad and w1.requires_grad, with_grad and w2.requires_grad
        channel = fc2.offer_grad_channel(hidden_states)
        y = _MlpFunction.apply(
            hidden_states,
            w1,
            fc1.bias,
            w2,
            self,
            activation,
            fc1.records_amax(),
            saves_inputs,
            fusion,
            channel,
            fc1.cached_input(hidden_states) if saves_inputs[0] else None,
        )
        y = y.view(-1, *hidden_states.shape[1:-1], y.shape[-1])
        return fc2.reduce_output(y, channel), fc2.bias

    def fused_activation(self) -> Activation | None:
        """The activation between both linear layers if one op computes it: GELU with a bias, SwiGLU without one."""
        config = self.config
        if not config.bias_activation_fusion or config.use_te_activation_func or self.swiglu_format is not None:
            return None
        gelu = self.activation_func is F.gelu and not config.gated_linear_unit
        if config.add_bias_linear:
            return BIAS_GELU if gelu else None
        return SWIGLU if self.has_swiglu() else None
