"""Megatron-core's parallel linear layers with the three GEMMs of a recipe.

Initialization, gathering, bias and sharded state stay Megatron-core's; only the method through which both layers reach
their GEMMs is replaced. Communication follows the stock layers: gather of the sequence-parallel input, asynchronous
all-reduce or reduce-scatter of the input gradient overlapped with the weight gradient.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue
from megatron_lowprec.linear.layer_tensors import CachedInput, GradOutput, SavedForBackward, backward_gemms
from megatron_lowprec.linear.linear_gemms import Gather, LinearGemms
from megatron_lowprec.linear.once_differentiable import once_differentiable
from megatron_lowprec.mcore.collectives import ReduceScatter, gather_codes, gather_sequence, scatter_sequence
from megatron_lowprec.mcore.fusion import GradOutputChannel, attached_cache, attached_input, cached_amax
from megatron_lowprec.mcore.optim.stored_gradient import added_to_main_grad, writable_main_grad
from megatron_lowprec.mcore.rng_step import StepCounter, current_rng_step
from megatron_lowprec.quantization.amax_history import empty_histories, load_histories
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor


class TensorParallelConfig(NamedTuple):
    """Collectives around a layer's input, by Megatron-core's names."""

    allreduce_dgrad: bool
    sequence_parallel: bool
    tp_group: dist.ProcessGroup


def layer_input(
    x: torch.Tensor, linear_gemms: LinearGemms, tp: TensorParallelConfig
) -> tuple[torch.Tensor | QuantizedTensor, Gather | None]:
    """Input of ``LinearGemms.forward`` for x [..., I]: attached operands, or [tokens, I]; and its ``gather``.

    A sharded input is gathered here, unless the layer gathers its codes.
    """
    gather = partial(gather_codes, group=tp.tp_group) if linear_gemms.gathers == "input" else None
    attached = attached_input(x, linear_gemms)
    if attached is not None:
        return attached, gather
    whole = gather_sequence(x, tp.tp_group)[0] if tp.sequence_parallel and gather is None else x
    return whole.reshape(-1, whole.shape[-1]), gather


def gradients(
    layer: "LowPrecLinearMixin",
    dy: Callable[[], GradOutput],
    saved: SavedForBackward,
    rng_step: RngStep,
    tp: TensorParallelConfig,
    gemms: frozenset[str],
    recompute: "Callable[[], tuple[torch.Tensor | CastPrologue, torch.Tensor | None]] | None" = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x, weight and bias: dgrad and wgrad, with communication overlapped.

    Args:
        dy: quantizes dy; called once the gather of x has started.
        gemms: of ``backward_gemms``; the gradients of others are None.
        recompute: computes x, and its amax if known, if x was not saved for backward.
    """
    linear_gemms, gathering, reducing = layer.bound_gemms, None, None
    dx = dw = None
    if tp.sequence_parallel and recompute is not None and saved.x is None and "wgrad" in gemms:
        tokens, _ = recompute()  # of this rank, which are gathered here
        assert isinstance(tokens, torch.Tensor)
        saved = saved._replace(x=tokens.view(saved.layout.shape))
    if tp.sequence_parallel and saved.x is not None:
        whole, gathering = gather_sequence(saved.x, tp.tp_group, async_op=True)
        saved = saved._replace(x=whole)
    grad = dy()
    if "dgrad" in gemms:
        dx = linear_gemms.dgrad(grad, saved.weight, rng_step, saved.weight_amax).view(-1, *saved.layout.shape[1:])
    if gathering is not None:
        gathering.wait()
    if dx is not None and tp.allreduce_dgrad:
        reducing = dist.all_reduce(dx, group=tp.tp_group, async_op=True)
    elif dx is not None and tp.sequence_parallel:
        dx, reducing = scatter_sequence(dx, tp.tp_group)
    if "wgrad" in gemms:
        x: torch.Tensor | QuantizedTensor | CastPrologue
        if saved.x is None:
            assert recompute is not None
            x, amax = recompute()
        else:
            x, amax = saved.input(), None
        dw = layer.accumulate_wgrad(linear_gemms, grad, x, saved.weight, rng_step, amax, saved.input_amax)
    if reducing is not None:
        reducing.wait()
    return dx, dw, grad.bias


def title(linear_gemms: LinearGemms) -> str:
    """The layer as errors name it."""
    return f"{linear_gemms.linear_id.path} under recipe {linear_gemms.recipe.name}"


def await_weights(module: torch.nn.Module) -> None:
    """Run the module's forward pre-hooks, in which --overlap-param-gather waits for the weights."""
    for hook in module._forward_pre_hooks.values():
        hook(module, ())


@once_differentiable(lambda ctx: title(ctx.layer.bound_gemms))
class _ParallelLinearFunction(torch.autograd.Function):
    """Communication and gradient accumulation around a layer's fprop, dgrad and wgrad."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: "LowPrecLinearMixin",
        update_amax: bool,
        saves_input: bool,
        tp: TensorParallelConfig,
        amax: torch.Tensor | None,
        channel: GradOutputChannel | None,
        cached: CachedInput | None,
    ) -> torch.Tensor:
        ctx.layer, ctx.rng_step, ctx.update_amax, ctx.tp = layer, current_rng_step(), update_amax, tp
        ctx.channel, ctx.restore = channel, None if cached is None else cached.restore
        linear_gemms = layer.bound_gemms
        x_TI, gather = layer_input(x, linear_gemms, tp)
        # under sequence parallelism a rank saves only its shard of x and gathers it again in the backward pass
        y, saved = linear_gemms.forward(
            x_TI,
            weight,
            ctx.rng_step,
            update_amax,
            bias,
            save_input=saves_input and not tp.sequence_parallel and cached is None,
            amax=amax,
            layer_input=x,
            gather=gather,
        )
        if cached is not None or not saves_input:
            saved = saved.without_input()
        of_cached = () if cached is None else cached.tensors
        ctx.save_for_backward(*saved.tensors(), *of_cached)
        ctx.layout, ctx.cached = saved.layout, len(of_cached)
        return y

    @staticmethod
    def backward(ctx, dy_TO):  # type: ignore[no-untyped-def]
        tensors = ctx.saved_tensors
        own = len(tensors) - ctx.cached
        saved, cached = SavedForBackward(*tensors[:own], layout=ctx.layout), tensors[own:]
        linear_gemms: LinearGemms = ctx.layer.bound_gemms
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        gemms = backward_gemms(needs_x, needs_w)

        def dy() -> GradOutput:
            grad = None if ctx.channel is None else ctx.channel.get(dy_TO)
            return grad or linear_gemms.grad_output(
                dy_TO, ctx.rng_step, bias=needs_bias, update_amax=ctx.update_amax, gemms=gemms
            )

        def restored() -> tuple[torch.Tensor, None]:
            return ctx.restore(*cached), None

        recompute = None if ctx.restore is None else restored
        found = gradients(ctx.layer, dy, saved, ctx.rng_step, ctx.tp, gemms, recompute)
        return *found, None, None, None, None, None, None, None


class LowPrecLinearMixin:
    """Common part of both parallel layers; ``bind_recipe`` binds the GEMMs of each."""

    weight: torch.nn.Parameter
    training: bool
    tp_group: dist.ProcessGroup
    config: TransformerConfig
    sequence_parallel: bool
    linear_gemms: LinearGemms | None = None
    step_counter: StepCounter | None = None
    accumulates_in_fp32 = dense_dummy = True
    channel: GradOutputChannel | None = None  # of the call in progress

    @property
    def bound_gemms(self) -> LinearGemms:
        """The layer's GEMMs; RuntimeError before ``mcore.runtime.bind_recipe``.

        In evaluation without recorded amaxes, such as of another recipe's checkpoint, they scale by current ones.
        """
        if self.linear_gemms is None:
            raise RuntimeError(
                "this linear layer has no recipe: call megatron_lowprec.mcore.runtime.bind_recipe(model, recipe, …)"
            )
        recipe, histories = self.linear_gemms.recipe, self.linear_gemms.histories
        current = empty_histories(recipe, histories, gradients=False) if histories and not self.training else None
        if not current:
            return self.linear_gemms
        warnings.warn(f"{recipe.name} scales by current amaxes: no step in training has recorded any yet", stacklevel=2)
        return self.linear_gemms.unrecorded(current)

    def records_amax(self) -> bool:
        """Whether a call records amaxes of delayed scaling: once a microbatch in training, trained weight or not.

        The first pass of an activation recomputation has no gradients; the recomputation records.
        """
        return self.training and torch.is_grad_enabled()

    def can_use_channel(self) -> bool:
        """Whether a call may have a backward pass with a NaN placeholder for dy; resolves the layer's backends."""
        if not (self.records_amax() and self.weight.requires_grad) or torch.is_anomaly_enabled():
            return False  # anomaly detection rejects any NaN
        self.bound_gemms.backends.resolve(self.weight)
        return True

    def fp32_main_grad(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The fp32 ``main_grad`` to which wgrad adds, [O, I]; None if autograd receives the weight gradient."""
        overwrites = self.accumulates_in_fp32 and self.bound_gemms.main_grad_is_zero
        main_grad = writable_main_grad(weight, overwrites)
        accumulates = self.accumulates_in_fp32 and main_grad is not None and main_grad.dtype == torch.float32
        return main_grad if accumulates else None

    def accumulate_wgrad(
        self,
        linear_gemms: LinearGemms,
        dy: GradOutput,
        x: torch.Tensor | QuantizedTensor | CastPrologue,
        weight: torch.Tensor,
        rng_step: RngStep,
        amax: torch.Tensor | None = None,
        input_amax: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The weight gradient; or, once accumulated into an fp32 ``main_grad``, a dummy that DDP's hook drops."""
        main_grad = self.fp32_main_grad(weight)
        dw = linear_gemms.wgrad(dy, x, rng_step, accumulate_into=main_grad, amax=amax, input_amax=input_amax)
        return dw if main_grad is None else added_to_main_grad(weight, self.dense_dummy)

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        saves_input = torch.is_grad_enabled() and weight.requires_grad
        tp = TensorParallelConfig(options["allreduce_dgrad"], options["sequence_parallel"], options["tp_group"])
        amax = None if tp.sequence_parallel else cached_amax(input)
        cached = self.cached_input(input) if saves_input else None
        y = _ParallelLinearFunction.apply(
            input, weight, bias, self, self.records_amax(), saves_input, tp, amax, self.channel, cached
        )
        # outside of the function: autograd forbids in-place changes of a view that a function returns
        return y.view(-1, *input.shape[1:-1], y.shape[-1])

    def cached_input(self, x: torch.Tensor) -> CachedInput | None:
        """The codes saved for backward in place of the input x [..., I]; None to save x, or the codes of its GEMMs."""
        return None

    def get_extra_state(self) -> dict[str, torch.Tensor] | None:
        """Amax histories, operand -> fp32 [length + 1], and counts of ``step_counter``, on the CPU; None without."""
        if self.linear_gemms is None:
            return None
        state = {operand: history.state(slot).cpu() for operand, (history, slot) in self.linear_gemms.histories.items()}
        counts = {} if self.step_counter is None else self.step_counter.counts(self.linear_gemms)
        return state | counts or None

    def set_extra_state(self, state: dict[str, torch.Tensor] | None) -> None:
        """Load ``get_extra_state``'s result; histories that it lacks start anew, others are dropped."""
        if self.linear_gemms is None or not isinstance(state, dict):
            return
        for operand, (history, slot) in self.linear_gemms.histories.items():
            if operand in state:
                history.load_state(slot, state[operand])
        if self.step_counter is not None:
            self.step_counter.resume(state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # the driver's checkpoints hold histories as tensors
        if self.linear_gemms is not None:
            load_histories(self.linear_gemms.histories, state_dict, prefix, args[-1])
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


class LowPrecColumnParallelLinear(LowPrecLinearMixin, ColumnParallelLinear):
    """ColumnParallelLinear under a recipe; weight [out / tensor-parallel ranks, in]."""

    def cached_input(self, x: torch.Tensor) -> CachedInput | None:
        """What the norm in front attached, where the layer would save x in the compute dtype."""
        attached, linear_gemms = attached_cache(x), self.bound_gemms
        if attached is None or linear_gemms.gathers == "input":
            return None
        linear_gemms.backends.resolve(self.weight)
        codes = not self.sequence_parallel and linear_gemms.saves_codes(x)
        return None if codes else attached

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.tp_group.size() == 1:
            # else the input passes through an autograd function for other ranks, which drops attached metadata
            self.disable_grad_reduce = True

    def offer_grad_channel(self, x: torch.Tensor) -> GradOutputChannel | None:
        """Channel for dy as operands quantized from split gradients, for a call on x [..., I]; None if unsupported.

        The caller that sets ``channel`` for that call must be the only consumer of the output. Under sequence
        parallelism x is a shard of the layer's input; dy is whole.
        """
        if not self.can_use_channel() or not self.bound_gemms.accepts_split_input(x):
            return None
        return GradOutputChannel(self.bound_gemms, current_rng_step(), "source")


class LowPrecRowParallelLinear(LowPrecLinearMixin, RowParallelLinear):
    """RowParallelLinear under a recipe; weight [out, in / tensor-parallel ranks].

    Attributes:
        input_format: format of the input saved for backward; None for the compute dtype, or the codes of its GEMMs.
        casts_again: save the input, which its producer saves as well, and cast it for wgrad in the backward pass.
        receives_codes: of an expert: the token dispatcher may put codes of dy.
    """

    input_format: Format | None = None
    casts_again = False
    receives_codes = False

    def cached_input(self, x: torch.Tensor) -> CachedInput | None:
        """The codes that x's producer attached, else codes in ``input_format`` if there is one, or x as it is."""
        attached = attached_cache(x)
        if attached is None and self.input_format is not None:
            return CachedInput.of(x, self.input_format)
        if attached is None and self.casts_again:
            return CachedInput((x.detach(),), lambda x: x.reshape(-1, x.shape[-1]))
        return attached

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As Megatron-core's; an expert's output is not a view, since its bias is added in place."""
        channel = self.channel = self.offer_grad_channel(input_)
        if channel is not None and channel.shard:
            y = self._forward_impl(
                input_, self.weight, None, allreduce_dgrad=False, sequence_parallel=False, tp_group=self.tp_group
            )
            output, bias = self.reduce_output(y, channel), self.bias
            if bias is not None and not self.skip_bias_add:
                output, bias = output + bias, None
        else:
            output, bias = super().forward(input_)
            if channel is not None:
                channel.attach(output)
        self.channel = None
        return (output.clone() if self.is_expert and bias is not None else output), bias

    def reduce_output(self, y: torch.Tensor, channel: GradOutputChannel | None) -> torch.Tensor:
        """Sum of y [s, b, O] over the ranks, of this rank's tokens under sequence parallelism, with its channel."""
        if channel is not None and channel.shard:
            output: torch.Tensor = ReduceScatter.apply(y, channel, self.tp_group)
        elif self.sequence_parallel:
            output = reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
        else:
            output = reduce_from_tensor_model_parallel_region(y, group=self.tp_group)
        if channel is not None and channel.fusion is not None:
            channel.attach(output)
        return output

    def offer_grad_channel(self, x: torch.Tensor) -> GradOutputChannel | None:
        """Channel for dy as operands, for a call on x [..., I]; else None. An expert's is the token dispatcher's.

        A consumer may put operands if dy is the gradient of the layer's output. It is not if ranks reduce-scatter the
        output and gather dy in the compute dtype, nor if the layer adds a bias to it. If ranks gather codes of dy, the
        layer's reduce-scatter puts them; the consumer may put codes where there is no bias, whose gradient a fused cast
        would sum in another order than without the gather.
        """
        if (self.is_expert and not self.receives_codes) or not self.can_use_channel():
            return None
        linear_gemms = self.bound_gemms
        if self.is_expert:
            return GradOutputChannel(linear_gemms, current_rng_step(), None)
        shard = linear_gemms.gathers == "grad_output"
        untouched = self.bias is None if shard else not self.sequence_parallel and self.skip_bias_add
        fusion = linear_gemms.supported_fusion("grad_output", x) if untouched else None
        return GradOutputChannel(linear_gemms, current_rng_step(), fusion, shard) if fusion or shard else None
