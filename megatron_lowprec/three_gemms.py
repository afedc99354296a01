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
from megatron_lowprec.recipe.schema import HadamardSpec, LinearRecipe, QuantSpec


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
    gemm_spec = recipe.gemms[name]
    hadamard = gemm_spec.hadamard
    operands = []
    for tensor, x in pair.items():
        spec = getattr(gemm_spec, tensor)
        amax = amaxes.get(tensor, torch.zeros(()))
        operand = x.float()
        if spec is not None and spec.source == "fprop":  # instead of the original tensor
            stream = draws.stream("rounding", "fprop", tensor)
            operand = quantized(operand.t(), getattr(recipe.fprop, tensor), stream, amax, None).dequantize().t()
        if hadamard is not None:
            operand = transformed(operand, hadamard, draws.stream("sign", name))
            if hadamard.output == "operand":
                operand = operand.to(x.dtype).float()
        group = None if hadamard is None else hadamard.block
        operands.append(as_operand(operand, spec, draws.stream("rounding", name, tensor), amax, group))
    a, b = operands
    return product(a, b, x.dtype)


def transformed(x: Tensor, hadamard: HadamardSpec, stream: RandomStream) -> Tensor:
    """x [R, K], K filled up to blocks; orthogonal and the same for both operands, so it cancels in their product."""
    block, fixed = hadamard.block, hadamard.fixed_signs
    signs = stream.signs(block, x.device) if fixed is None else x.new_tensor(fixed)
    return hadamard_transform(torch.nn.functional.pad(x, (0, -x.shape[1] % block)), signs)


def quantized(x: Tensor, spec: QuantSpec, stream: RandomStream, amax: Tensor, group: int | None) -> QuantizedTensor:
    """x, fp32 [R, K], transformed in groups of entries, as elements on the format's grid and decode scales."""
    delayed = amax if spec.scaling == "delayed" else None
    found = quantize_by_reference(x, spec, stream, tensor_amax=delayed, group=group)
    return QuantizedTensor(x.shape, x.dtype, spec, found.data, found.scale, rowwise_tensor_scale=found.tensor_scale)


def as_operand(x: Tensor, spec: QuantSpec | None, stream: RandomStream, amax: Tensor, group: int | None) -> Operand:
    """The operand of a product; a scale is in the data, applied to sums over its blocks, or a factor of the product."""
    if spec is None:
        return Operand(x, None, x.shape[1], 1.0)
    found = quantized(x, spec, stream, amax, group)
    block, scale = block_sizes(spec, x), as_numbers(found.scale, spec.scale_format)
    above = found.rowwise_tensor_scale  # of the tensor, or of outer blocks
    alpha = (1.0 if above is None or spec.outer_block else above) / spec.headroom
    if not spec.folds_scale:
        return Operand(found.elements, scale_blocks(torch.ones_like(x), scale, block), block[1], alpha)
    data = scale_blocks(found.elements, scale, block)  # exact, also in bf16
    if above is not None and spec.outer_block:
        outer = scale_blocks(torch.ones_like(x), above, spec.outer_block)
        return Operand(data, outer, spec.outer_block[1], alpha)
    return Operand(data, None, x.shape[1], alpha)


def product(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """``alpha * (a.data * a.scale) @ (b.data * b.scale).T``: fp32 sums over blocks, scaled, added, rounded."""
    a_data, b_data, alpha = a.data.to(dtype), b.data.to(dtype), a.alpha * b.alpha
    if a.scale is b.scale is None and isinstance(alpha, float) and alpha == 1.0:
        return a_data @ b_data.t()
    total, block = torch.zeros(()), min(a.block, b.block)
    for k in range(0, a_data.shape[1], block):
        part = a_data[:, k : k + block].float() @ b_data[:, k : k + block].float().t()
        if a.scale is not None:
            part = part * a.scale[:, k, None]
        if b.scale is not None:
            part = part * b.scale[:, k]
        total = total + part
    return (total * alpha).to(dtype)
