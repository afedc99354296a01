"""Stands in for Apex's module of this name, by TransformerEngine's product that adds to its output.

Megatron-LM asks for it to add an output layer's weight gradient within the product. Its folder on
PYTHONPATH stands for an installed Apex.
"""

import torch
from transformer_engine.pytorch.cpp_extensions import general_gemm


def wgrad_gemm_accum_fp32(inputs: torch.Tensor, grads: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add ``grads.T @ inputs`` to ``main_grad``: bf16 [tokens, in] and [tokens, out] to fp32 [out, in]."""
    general_gemm(inputs, grads, layout="NT", out=main_grad, out_dtype=main_grad.dtype, accumulate=True, grad=True)
