"""LayerNorm and RMSNorm as Megatron-core builds them: fused on a GPU, torch's elsewhere; support sequence
parallelism.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels import dispatch
from megatron_lowprec.kernels.cast_fp8.prologue import norm_output
from megatron_lowprec.kernels.layernorm.reference import Normalized
from megatron_lowprec.linear.layer_tensors import CachedInput, CastFusion
from megatron_lowprec.linear.once_differentiable import once_differentiable
from megatron_lowprec.mcore.fusion import attach_metadata, attach_residual, get_metadata, placeholder_like
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecLinearMixin
from megatron_lowprec.mcore.rng_step import current_rng_step
from megatron_lowprec.quantization.tensor import QuantizedTensor


@once_differentiable("a fused norm")
class _NormFunction(torch.autograd.Function):
    """x to (y, x as a residual): the backward pass receives the gradients of both and returns their sum."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        normalize: Callable[[torch.Tensor], Normalized],
        observes_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.observes_grad = observes_grad
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, mean, rstd = normalize(rows)
        ctx.save_for_backward(rows, weight, mean, rstd)
        ctx.set_materialize_grads(False)
        return y.view(x.shape), x.detach()  # a separate output, not a view of x

    @staticmethod
    def backward(ctx, dy, dresidual):  # type: ignore[no-untyped-def]
        if dy is None:
            return dresidual, None, None, None, None
        rows, weight, mean, rstd = ctx.saved_tensors
        dy_rows = dy.reshape(rows.shape).contiguous()
        dresidual_rows = None if dresidual is None else dresidual.reshape(rows.shape).contiguous()
        whole = ctx.observes_grad and dresidual is not None  # else autograd adds the residual's gradient
        amax = torch.zeros(1, dtype=torch.float32, device=rows.device) if whole else None
        dx, dw, db = dispatch.norm_backward(dy_rows, rows, weight, mean, rstd, dresidual_rows, amax)
        dx = dx.view(dy.shape)
        if amax is not None:
            attach_metadata(dx, amax=amax)
        return dx, dw, db, None, None


def _normalized(
    norm: "LayerNorm | RMSNorm",
    x: torch.Tensor,
    bias: torch.Tensor | None,
    normalize: Callable[[torch.Tensor], Normalized],
) -> torch.Tensor:
    """``normalize`` applied to the rows of x; its gradient includes the residual's."""
    y: torch.Tensor
    found = get_metadata(x)
    observes_grad = found is not None and found.observes_grad
    y, residual = _NormFunction.apply(x, norm.weight, bias, normalize, observes_grad)
    attach_residual(x, y, residual)
    return y


class Consumer:
    """The linear layer that is the only consumer of a norm's output, unchanged.

    Not a module, so that the layer's weights do not become the norm's.
    """

    def __init__(self, layer: LowPrecLinearMixin) -> None:
        self.layer = layer

    def supported_fusion(self, x: torch.Tensor) -> CastFusion:
        """Fusion of the norm of x [..., H] with the layer's casts; "source" only if that records and has a wgrad."""
        linear_gemms, weight = self.layer.bound_gemms, self.layer.weight
        linear_gemms.backends.resolve(weight)
        fusion = linear_gemms.supported_fusion("input", x)
        trained = self.layer.records_amax() and weight.requires_grad
        return None if fusion == "source" and not trained else fusion


def _fused(norm: "LayerNorm | RMSNorm", x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The norm by one kernel, which also computes the operands or the amax that its consumer supports."""
    weight, eps = norm.weight, norm.eps
    assert eps is not None
    # a forward hook must see the real output
    consumer = None if norm._forward_hooks else norm.consumer
    fusion = None if consumer is None else consumer.supported_fusion(x)
    if consumer is not None and fusion == "source":
        linear_gemms, operands = consumer.layer.bound_gemms, list[QuantizedTensor]()

        def cast(rows: torch.Tensor) -> Normalized:
            rstd, *mean = statistics = dispatch.norm_statistics(rows, eps, bias is not None)
            output = norm_output(rows, weight, bias, statistics)
            operands.append(linear_gemms.quantize_input(output, current_rng_step()))
            return Normalized(placeholder_like(rows), mean[0] if mean else None, rstd)

        y = _normalized(norm, x, bias, cast)
        attach_metadata(y, quantized_input=(linear_gemms, operands[0]))
        return y
    amax = torch.zeros(1, dtype=torch.float32, device=x.device) if fusion == "amax" else None
    y = _normalized(norm, x, bias, lambda rows: dispatch.norm(rows, weight, bias, eps, amax))
    if amax is not None:
        attach_metadata(y, amax=amax)
    if norm.computes_again and x.is_contiguous() and not norm._forward_hooks:
        attach_metadata(y, cached_input=_computed_again(x, weight, bias, eps))
    return y


def _computed_again(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> CachedInput:
    """The norm's output [T, H] from what its backward pass saves in any case, with the same bits."""

    def restore(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return dispatch.norm(rows, weight, bias, eps, None).y

    saved = (x.detach().view(-1, x.shape[-1]), weight.detach())
    return CachedInput(saved if bias is None else (*saved, bias.detach()), restore)


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` with a weight and a bias.

    Attributes:
        consumer: the only consumer of the output, if there is one; used on a GPU. In training under delayed scaling the
            output is then a NaN placeholder with the layer's operands attached, else it may have its amax attached.
        computes_again: the linear layer behind may compute the output in its backward pass instead of saving it.
    """

    consumer: Consumer | None = None
    computes_again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H] in the dtype of x."""
        return _fused(self, x, self.bias) if dispatch.fuses(x) else super().forward(x)


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` with a weight; ``consumer`` and ``computes_again`` as ``LayerNorm``."""

    consumer: Consumer | None = None
    computes_again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H] in the dtype of x."""
        return _fused(self, x, None) if dispatch.fuses(x) else super().forward(x)


class Norm:
    """Builds a ``LayerNorm`` or an ``RMSNorm``, according to ``config.normalization``.

    Megatron-core's wrapper of torch's norms refuses sequence parallelism: their gradients would not be summed over the
    ranks. ``finalize_model_grads`` sums them if the parameters are marked ``sequence_parallel``.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:  # type: ignore[misc]
        if config.layernorm_zero_centered_gamma:
            raise UserError(
                "--apply-layernorm-1p needs TransformerEngine's norm, which this build does not use; leave it out"
            )
        kinds: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
        if config.normalization not in kinds:
            raise UserError(f"--normalization {config.normalization} is not available; use LayerNorm or RMSNorm")
        norm = kinds[config.normalization](hidden_size, eps=eps, dtype=torch.float32)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm.to(config.params_dtype)


def link_norms(layer: TransformerLayer, save_memory: bool = False) -> None:
    """Link each norm to the linear layer that is the only consumer of its output, if there is one.

    ``save_memory``: a quantized layer that would save the output for its backward pass computes it again.
    """
    # recomputation reads the norm's output from the saved tensors, without attached metadata
    behind = (
        (layer.input_layernorm, layer.self_attention, "linear_qkv", layer.recompute_input_layernorm),
        (layer.pre_mlp_layernorm, layer.mlp, "linear_fc1", layer.recompute_pre_mlp_layernorm or layer.recompute_mlp),
    )
    for norm, part, name, run_again in behind:
        linear = getattr(part, name, None)
        if isinstance(linear, LowPrecLinearMixin) and isinstance(norm, LayerNorm | RMSNorm):
            # sequence parallelism gathers first, unless it gathers codes; the amax of a shard is no amax of the whole
            whole = not linear.config.sequence_parallel or linear.bound_gemms.gathers == "input"
            alone = not run_again and whole
            norm.consumer = Consumer(linear) if alone else None
            norm.computes_again = save_memory and not run_again and linear.bound_gemms.recipe.quantized
