"""Operands of the emulated backend's products."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_lowprec.quantization.tensor import QuantizedTensor, block_sizes


class ProductOperand(NamedTuple):
    """Operand of a product: data [R, K], scales of its blocks if not in the data, and the scale of the tensor."""

    data: torch.Tensor
    scale: torch.Tensor | None
    block: tuple[int, int]
    alpha: torch.Tensor | None

    @staticmethod
    def of(operand: QuantizedTensor, columnwise: bool) -> ProductOperand:
        """One direction of a quantized tensor."""
        data, scale = operand.columnwise() if columnwise else operand.rowwise()
        above = operand.columnwise_tensor_scale if columnwise else operand.rowwise_tensor_scale
        spec = operand.spec
        if spec is not None and spec.outer_block is not None:
            assert scale is None, "fast accumulation of operands with outer blocks is not emulated"
            return ProductOperand(data, above, spec.outer_block, None)
        block = (1, 1) if spec is None or scale is None else block_sizes(spec, data)
        return ProductOperand(data, scale, block, above)
