"""A linear layer's forward and backward pass under a recipe, in plain torch: where to start reading.

``linear/linear_gemms.py`` gives these results with kernels, caches and tensor parallelism, which change no bit of an
operand. T are tokens, I input and O output features; [R, K] is an operand, its contracted dimension last.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.quantize.reference import fp32_encode_scale, round_to_format, scale_blocks
from megatron_lowprec.quantization.quantizer import quantize
from megatron_lowprec.quantization.random_stream import Purpose, RandomStream, RngStep, stream_key
from megatron_lowprec.quantization.tensor import block_sizes
from megatron_lowprec.recipe.schema import GemmSpec, QuantSpec, Recipe


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
    """fp32 data [R, K] and scales [R, K], constant along ``block`` entries of K; None if multiplied into the data."""

    data: Tensor
    scale: Tensor | None
    block: int


def three_gemms(
    recipe: Recipe, x_TI: Tensor, w_OI: Tensor, dy_TO: Tensor, draws: Draws, amaxes: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """y_TO, dx_TI and dw_OI, in the dtype of the tensors: bf16 or fp32.

    Delayed scaling reads ``amaxes``: "input", "weight", "grad_output" -> fp32 scalar of earlier steps; 0 if missing.
    """
    y_TO = gemm("fprop", recipe.fprop, {"input": x_TI, "weight": w_OI}, draws, amaxes)
    dx_TI = gemm("dgrad", recipe.dgrad, {"grad_output": dy_TO, "weight": w_OI.t()}, draws, amaxes)
    dw_OI = gemm("wgrad", recipe.wgrad, {"grad_output": dy_TO.t(), "input": x_TI.t()}, draws, amaxes)
    return y_TO, dx_TI, dw_OI


def gemm(name: str, spec: GemmSpec, tensors: dict[str, Tensor], draws: Draws, amaxes: dict[str, Tensor]) -> Tensor:
    """``a @ b.T`` of two tensors [R, K], each transformed and quantized."""
    operands, headroom = [], 1.0
    for tensor, x in tensors.items():
        operand, quant = x.float(), getattr(spec, tensor)
        if spec.hadamard is not None:  # orthogonal, and the same for both operands: it cancels in the product
            block, random = spec.hadamard.block, spec.hadamard.signs == "random"
            signs = draws.stream("sign", name).signs(block, x.device) if random else torch.ones(block, device=x.device)
            operand = hadamard_transform(pad(operand, (0, -x.shape[1] % block)), signs)
        stream, amax = draws.stream("rounding", name, tensor), amaxes.get(tensor, torch.zeros(()))
        operands.append(quantize_operand(operand, quant, stream, amax))
        headroom *= quant.headroom if quant else 1.0
    return product(operands[0], operands[1], 1.0 / headroom, x.dtype)


def quantize_operand(x: Tensor, spec: QuantSpec | None, stream: RandomStream, amax: Tensor) -> Operand:
    """Elements on the format's grid and decode scales of x, fp32 [R, K]."""
    if spec is None:
        return Operand(x, None, x.shape[1])
    if spec.scaling == "current":
        quantized = quantize(x, spec, random=stream)
        elements, scale = quantized.elements, quantized.decode_scale
    else:
        encode_scale = fp32_encode_scale(amax, FORMATS[spec.format], spec.scale_rule, spec.amax_floor, spec.margin)
        u = stream.uniform(x.shape[1], spec.random_bits, x.device)(slice(0, len(x)))
        elements = round_to_format(x * encode_scale * spec.headroom, FORMATS[spec.format], spec.rounding, u)
        scale = (1.0 / encode_scale).view(1, 1)
    block = block_sizes(spec, x)
    if spec.power_of_two_scale:  # exact in the data, also in bf16
        return Operand(scale_blocks(elements, scale, block), None, x.shape[1])
    return Operand(elements, scale_blocks(torch.ones_like(x), scale, block), block[1])


def product(a: Operand, b: Operand, alpha: float, dtype: torch.dtype) -> Tensor:
    """``alpha * (a.data * a.scale) @ (b.data * b.scale).T``: fp32 sums over blocks, scaled, added, rounded."""
    a_data, b_data = a.data.to(dtype), b.data.to(dtype)
    if a.scale is b.scale is None and alpha == 1.0:
        return a_data @ b_data.t()
    total, block = torch.zeros(()), min(a.block, b.block)
    for k in range(0, a_data.shape[1], block):
        part = a_data[:, k : k + block].float() @ b_data[:, k : k + block].float().t()
        part = part if a.scale is None else part * a.scale[:, k, None]
        total = total + (part if b.scale is None else part * b.scale[:, k])
    return (total * alpha).to(dtype)
