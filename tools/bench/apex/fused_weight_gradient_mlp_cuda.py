"""Stands in for Apex's module of this name where its folder is on the path.

With TransformerEngine, Megatron-LM adds weight gradients in GEMMs; its output layer asks Apex for that.
"""

import torch


def wgrad_gemm_accum_fp32(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add dy^T x, bf16 of [tokens, out] and [tokens, in], to fp32 [out, in]."""
    torch.addmm(main_grad, dy.t(), x, out_dtype=torch.float32, out=main_grad)
