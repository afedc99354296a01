"""A linear layer's forward and backward pass under a recipe, in plain torch: where to start reading.

``linear/linear_gemms.py`` gives these results with kernels, caches and tensor parallelism, which change no bit of an
operand. T are tokens, I input and O output features; [R, K] is an operand, its contracted dimension last.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.quantize.reference import scale_blocks
from megatron_lowprec.quantization.quantizer import quantize_by_reference
from megatron_lowprec.quantization.random_stream import Purpose, RandomStream, RngStep, stream_key
from megatron_lowprec.quantization.tensor import QuantizedTensor, as_numbers, block_sizes
from megatron_lowprec.recipe.schema import LinearRecipe, QuantSpec


class Draws(NamedTuple):
    """Identity of a layer's random draws in one microbatch."""

    seed: int = 0
    layer: int = 1
    linear: str = "linear"
    rng_step: RngStep = RngStep(0, 0)

    def stream(self, purpose: Purpose, gemm: str, operand: str = "") -> RandomStream:
        """The Philox key is constant in a run; the counter is row, column, step and microbatch."""
        key = stream_key(self.seed, purpose, layer=self.layer, linear=self.linear, gemm=gemm, operand=operand)
        return RandomStream(key, self.rng_step)


class Operand(NamedTuple):
    """fp32 data and their scales [R, K], one along ``block`` of K, None if in the data; and a factor of the product."""

    data: Tensor
    scale: Tensor | None
    block: int
    alpha: float | Tensor


def three_gemms(
    recipe: LinearRecipe, x_TI: Tensor, w_OI: Tensor, dy_TO: Tensor, draws: Draws, amaxes: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """y_TO, dx_TI and dw_OI, in the dtype of the tensors: bf16 or fp32.

    ``amaxes`` of earlier steps, for delayed scales: "input", "weight", "grad_output" -> fp32 scalar; 0 if missing."""
    y_TO = gemm("fprop", recipe, {"input": x_TI, "weight": w_OI}, draws, amaxes)
    dx_TI = gemm("dgrad", recipe, {"grad_output": dy_TO, "weight": w_OI.t()}, draws, amaxes)
    dw_OI = gemm("wgrad", recipe, {"grad_output": dy_TO.t(), "input": x_TI.t()}, draws, amaxes)
    return y_TO, dx_TI, dw_OI


def gemm(name: str, recipe: LinearRecipe, pair: dict[str, Tensor], draws: Draws, amaxes: dict[str, Tensor]) -> Tensor:
    """``a @ b.T`` of two tensors [R, K], each transformed and quantized."""
    gemm_spec, operands, group = recipe.gemms[name], [], None
    for tensor, x in pair.items():
        spec, amax, operand = getattr(gemm_spec, tensor), amaxes.get(tensor, torch.zeros(())), x.float()
        if spec is not None and spec.source == "fprop":  # instead of the original tensor
            stream = draws.stream("rounding", "fprop", tensor)
            operand = quantized(operand.t(), getattr(recipe.fprop, tensor), stream, amax, None).dequantize().t()
        if gemm_spec.hadamard is not None:  # orthogonal, and the same for both operands: it cancels in the product
            group, fixed = gemm_spec.hadamard.block, gemm_spec.hadamard.fixed_signs
            signs = draws.stream("sign", name).signs(group, x.device) if fixed is None else x.new_tensor(fixed).float()
            operand = hadamard_transform(torch.nn.functional.pad(operand, (0, -x.shape[1] % group)), signs)
            operand = operand.to(x.dtype).float() if gemm_spec.hadamard.output == "operand" else operand
        operands.append(as_operand(operand, spec, draws.stream("rounding", name, tensor), amax, group))
    return product(operands[0], operands[1], x.dtype)


def quantized(x: Tensor, spec: QuantSpec, stream: RandomStream, amax: Tensor, group: int | None) -> QuantizedTensor:
    """x, fp32 [R, K], transformed in groups of entries, as elements on the format's grid and decode scales."""
    made = quantize_by_reference(x, spec, stream, tensor_amax=amax if spec.scaling == "delayed" else None, group=group)
    return QuantizedTensor(x.shape, x.dtype, spec, made.data, made.scale, rowwise_tensor_scale=made.tensor_scale)


def as_operand(x: Tensor, spec: QuantSpec | None, stream: RandomStream, amax: Tensor, group: int | None) -> Operand:
    """The operand of a product."""
    if spec is None:
        return Operand(x, None, x.shape[1], 1.0)
    made, inner, outer = quantized(x, spec, stream, amax, group), block_sizes(spec, x), spec.outer_block
    scale, above, folds = as_numbers(made.scale, spec.scale_format), made.rowwise_tensor_scale, spec.folds_scale
    alpha = (1.0 if above is None or outer else above) / spec.headroom
    data = scale_blocks(made.elements, scale, inner) if folds else made.elements  # exact, also in bf16
    kept, block = (above if outer else None, outer or (1, x.shape[1])) if folds else (scale, inner)
    return Operand(data, None if kept is None else scale_blocks(torch.ones_like(x), kept, block), block[1], alpha)


def product(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """``alpha * (a.data * a.scale) @ (b.data * b.scale).T``: fp32 sums over blocks, scaled, added, rounded."""
    a_data, b_data, alpha = a.data.to(dtype), b.data.to(dtype), a.alpha * b.alpha
    if a.scale is b.scale is None and isinstance(alpha, float) and alpha == 1.0:
        return a_data @ b_data.t()
    total, block = torch.zeros(()), min(a.block, b.block)
    for k in range(0, a_data.shape[1], block):
        part = a_data[:, k : k + block].float() @ b_data[:, k : k + block].float().t()
        part = part if a.scale is None else part * a.scale[:, k, None]
        total = total + (part if b.scale is None else part * b.scale[:, k])
    return (total * alpha).to(dtype)
