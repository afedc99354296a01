"""Tokens travel to their experts as codes: Megatron-core's all-to-all dispatcher with the bytes of fc1's operand.

DeepSeek-V3 (arXiv 2412.19437, section 3.3.3): activations are quantized before the dispatch to the experts, and so are
gradients before they reach the experts' down-projections. The combination of outputs and of gradients stays in bf16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.once_differentiable import once_differentiable
from megatron_lowprec.mcore.fusion import ExpertChannels, attach_metadata, get_metadata
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecColumnParallelLinear, LowPrecRowParallelLinear
from megatron_lowprec.mcore.layers.sequential_mlp import LowPrecSequentialMLP
from megatron_lowprec.mcore.patches import bind
from megatron_lowprec.mcore.rng_step import current_rng_step
from megatron_lowprec.quantization.token_rows import pack_rows, unpack_rows
from megatron_lowprec.recipe.fp8_dispatch import check_fp8_dispatch, dispatched_bytes, why_not_dispatched
from megatron_lowprec.recipe.recipe import Recipe

# Fields of TransformerConfig that change what the dispatcher sends, or what reads the tokens before fc1.
_REFUSED = {
    "moe_permute_fusion": "TransformerEngine's fused permutation takes no bytes",
    "moe_pad_expert_input_to_capacity": "padding repeats tokens that no expert was given",
    "moe_shared_expert_overlap": "the shared experts read the unquantized tokens within the dispatcher",
    "moe_apply_probs_on_input": "the router's probability would multiply codes",
}


class _Route(NamedTuple):
    """Route of a rank's tokens to their experts and back, in one microbatch.

    Attributes:
        counts: tokens of each expert on this rank from each rank, [ranks, experts]; None with one expert on the rank.
        by_expert, by_rank: orders of these chunks.
        group, sent, received: the expert-parallel ranks, and the tokens to and from each.
        shape: [tokens, hidden] of the rank's tokens.
    """

    counts: torch.Tensor | None
    by_expert: torch.Tensor
    by_rank: torch.Tensor
    group: dist.ProcessGroup
    sent: Any
    received: Any
    shape: torch.Size

    def to_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Permuted rows of this rank's tokens -> rows that its experts receive, sorted by expert."""
        rows = all_to_all(self.group, rows, self.received, self.sent)
        return rows if self.counts is None else sort_chunks_by_idxs(rows, self.counts.ravel(), self.by_expert)[0]

    def from_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of ``to_experts``."""
        if self.counts is not None:
            rows, _ = sort_chunks_by_idxs(rows, self.counts.T.ravel(), self.by_rank)
        returned: torch.Tensor = all_to_all(self.group, rows, self.sent, self.received)
        return returned


@once_differentiable("the dispatch of tokens to experts as codes")
class _Dispatched(torch.autograd.Function):
    """Hidden states -> a placeholder of the tokens that arrived, whose gradients travel back in the compute dtype."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, hidden: torch.Tensor, permutation: torch.Tensor, tokens: int, route: _Route
    ) -> torch.Tensor:
        ctx.save_for_backward(permutation)
        ctx.route, ctx.hidden_shape = route, hidden.shape
        return hidden.new_full((), torch.nan).expand(tokens, hidden.shape[-1])

    @staticmethod
    def backward(ctx, dx):  # type: ignore[no-untyped-def]
        route, (permutation,) = ctx.route, ctx.saved_tensors
        dx = route.from_experts(dx)
        # as autograd's index_select, which adds the copies of a token in this order
        return dx.new_zeros(route.shape).index_add_(0, permutation, dx).view(ctx.hidden_shape), None, None, None


@once_differentiable("the combination of experts whose gradients travel as codes")
class _Combined(torch.autograd.Function):
    """Combined outputs of the experts, whose gradient travels to linear_fc2 as codes; ``combined`` has no graph."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        expert_output: torch.Tensor,
        combined: torch.Tensor,
        permutation: torch.Tensor,
        route: _Route,
        channels: ExpertChannels,
        fc2: LowPrecRowParallelLinear,
    ) -> torch.Tensor:
        ctx.save_for_backward(permutation)
        ctx.route, ctx.channels, ctx.fc2, ctx.rng_step = route, channels, fc2, current_rng_step()
        return combined

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        gemms, tokens = ctx.fc2.bound_gemms, dy.reshape(-1, dy.shape[-1])
        rows = pack_rows(gemms.quantize_tokens("grad_output", tokens, ctx.fc2.weight, ctx.rng_step))
        rows = ctx.route.to_experts(rows.index_select(0, *ctx.saved_tensors))
        codes = unpack_rows(rows, dy.shape[-1], gemms.recipe.dgrad.grad_output, dy.dtype)
        return ctx.channels.put(codes), None, None, None, None, None


class Fp8TokenDispatcher(MoEAlltoAllTokenDispatcher):
    """``MoEAlltoAllTokenDispatcher`` whose tokens travel as codes and scales, packed in rows of bytes.

    Each rank quantizes its tokens once, before they are copied for their experts. Megatron-core's methods then permute,
    send and sort rows of bytes. The experts get a placeholder with the operand of fc1's fprop attached. The gradient of
    their combined outputs travels likewise if the experts' fc2 have channels for it.

    Args:
        layer: the layer with experts; its dispatcher is Megatron-core's. All of its experts have one recipe.
    """

    def __init__(self, layer: MoELayer) -> None:
        stock = layer.token_dispatcher
        groups = ProcessGroupCollection(ep=stock.ep_group, expt_tp=stock.tp_group, tp_ep=stock.tp_ep_group)
        super().__init__(layer.num_local_experts, layer.local_expert_indices, layer.config, pg_collection=groups)
        expert = layer.experts.local_experts[0]
        self._fc1: LowPrecColumnParallelLinear = expert.linear_fc1
        self._fc2: LowPrecRowParallelLinear = expert.linear_fc2
        self._gemms = self._fc1.bound_gemms, self._fc2.bound_gemms
        # of the call in progress: hidden states that travel as codes, their route, outputs whose gradient does
        self._hidden: torch.Tensor | None = None
        self._route: _Route | None = None
        self._combining: tuple[torch.Tensor, ExpertChannels] | None = None

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [..., h] -> rows of bytes, uint8 [copies, bytes], sorted by expert, and their probabilities."""
        self._hidden = None
        if self._gemms != (self._fc1.bound_gemms, self._fc2.bound_gemms):  # an inspected tensor must be in memory
            return super().dispatch_preprocess(hidden_states, routing_map, probs)
        self._hidden = hidden_states
        tokens = hidden_states.detach().reshape(-1, hidden_states.shape[-1])
        rows = pack_rows(self._gemms[0].quantize_tokens("input", tokens, self._fc1.weight, current_rng_step()))
        dispatched: tuple[torch.Tensor, torch.Tensor] = super().dispatch_preprocess(rows, routing_map, probs)
        # what leaves the experts has the shape of the hidden states
        self.hidden_shape, self.hidden_shape_before_permute = hidden_states.shape, tokens.shape
        return dispatched

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows that arrived -> placeholder [T, h] with the operand of fc1, tokens of each expert, probabilities [T]."""
        rows, tokens_per_expert, probs = super().dispatch_postprocess(global_input_tokens, global_probs)
        hidden = self._hidden
        if hidden is None:
            return rows, tokens_per_expert, probs
        spec = self._gemms[0].recipe.fprop.input
        assert spec is not None
        self._route = _Route(
            self.num_global_tokens_per_local_expert if self.num_local_experts > 1 else None,
            self.sort_input_by_local_experts,
            self.restore_output_by_local_experts,
            self.ep_group,
            self.input_splits,
            self.output_splits,
            self.hidden_shape_before_permute,
        )
        x = _Dispatched.apply(hidden, self.reversed_local_input_permutation_mapping, len(rows), self._route)
        codes = unpack_rows(rows, hidden.shape[-1], spec, hidden.dtype)
        attach_metadata(x, quantized_input=(self._gemms[0], codes))
        return x, tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As Megatron-core's; without autograd if the gradient of the outputs [T, h] travels as codes."""
        found = None if self._hidden is None else get_metadata(hidden_states)
        self._hidden, self._combining = None, None
        if found is not None and found.expert_channels is not None:
            self._combining = hidden_states, found.expert_channels
            hidden_states = hidden_states.detach()
        outputs: torch.Tensor = super().combine_preprocess(hidden_states)
        return outputs

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """As Megatron-core's: outputs of all experts -> the layer's output [..., h]."""
        combined: torch.Tensor = super().combine_postprocess(permutated_local_input_tokens)
        if self._combining is None:
            return combined
        (outputs, channels), self._combining = self._combining, None
        permutation, route = self.reversed_local_input_permutation_mapping, self._route
        whole: torch.Tensor = _Combined.apply(outputs, combined, permutation, route, channels, self._fc2)
        return whole


class Fp8Dispatch:
    """--moe-fp8-dispatch in a model: binds its layers and reports them.

    Args:
        recipe: of the model.

    Raises:
        UserError: no layer of the recipe can send codes.
    """

    def __init__(self, recipe: Recipe) -> None:
        check_fp8_dispatch(recipe)
        self._layers = self._dispatched = self._combined = 0
        self._bytes = ""

    def bind(self, layer: TransformerLayer) -> None:
        """Let the experts of a transformer layer get codes, unless the recipe leaves their fc1 in the compute dtype.

        Raises:
            UserError: the dispatcher, the layout or an option cannot send codes, or the model has no experts.
        """
        if not layer.config.num_moe_experts:
            raise UserError("--moe-fp8-dispatch sends tokens to experts, and this model has none; leave the flag out")
        for module in layer.modules():
            if isinstance(module, MoELayer):
                self._check(module)
                self._layers += 1
                fc1 = module.experts.local_experts[0].linear_fc1
                hidden = module.config.hidden_size
                if why_not_dispatched(fc1.bound_gemms.recipe) is None:
                    bind("token_dispatcher", module, token_dispatcher=Fp8TokenDispatcher(module))
                    self._dispatched += 1
                    sent = dispatched_bytes(fc1.bound_gemms.recipe.fprop.input, hidden)
                    self._bytes = f"; {sent} bytes a token and expert instead of {hidden * fc1.weight.element_size()}"
                    self._bind_gradients(module)

    def _bind_gradients(self, layer: MoELayer) -> None:
        """Let the experts' linear_fc2 get dy as codes, if its dgrad takes such codes and it has no bias to sum."""
        experts = layer.experts.local_experts
        fc2 = experts[0].linear_fc2
        if fc2.bias is None and why_not_dispatched(fc2.bound_gemms.recipe, "grad_output") is None:
            self._combined += 1
            for expert in experts:
                expert.linear_fc2.receives_codes = True

    def header(self) -> str:
        """Header line: layers of this stage whose tokens and gradients travel as codes, and the bytes of tokens."""
        return (
            f"--moe-fp8-dispatch: tokens travel to experts as codes in {self._dispatched}, gradients to linear_fc2 in "
            f"{self._combined} of {self._layers} layers with experts on this stage{self._bytes}; what experts return "
            "is in the compute dtype"
        )

    def _check(self, layer: MoELayer) -> None:
        config: TransformerConfig = layer.config
        dispatcher = layer.token_dispatcher
        if not isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
            raise UserError(
                f"--moe-fp8-dispatch sends codes in an all-to-all, and --moe-token-dispatcher-type is "
                f"{config.moe_token_dispatcher_type}: use alltoall, or leave the flag out"
            )
        if dispatcher.ep_size == 1:
            raise UserError(
                "--moe-fp8-dispatch does nothing at --expert-model-parallel-size 1, where no token travels: raise the "
                "size, or leave the flag out"
            )
        if dispatcher.tp_size > 1:
            raise UserError(
                f"--moe-fp8-dispatch was asked with --expert-tensor-parallel-size {dispatcher.tp_size}, whose ranks "
                "gather tokens in the compute dtype: set it to 1, or leave the flag out"
            )
        for field, reason in _REFUSED.items():
            if getattr(config, field, False):
                raise UserError(
                    f"--moe-fp8-dispatch cannot run with TransformerConfig.{field}: {reason}; leave one of the two out"
                )
        if not isinstance(layer.experts, LowPrecSequentialMLP):
            raise UserError(
                f"--moe-fp8-dispatch needs this project's experts, which take codes, and found "
                f"{type(layer.experts).__name__}: build the spec by low_precision, or leave the flag out"
            )
