"""FP8 product added to an fp32 matrix, in plain torch: the product in fp32, then the sum."""

import torch


def add_product_(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
    *,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    """``out += a_scale * b_scale * a @ b.T`` in fp32; returns ``out``.

    Args:
        a: FP8 [M, K]; b: FP8 [N, K].
        a_scale, b_scale: fp32 of one entry.
        out: fp32 [M, N].
        fast_accumulation: read by tensor cores alone.
    """
    product = (a.float() @ b.float().t()) * (a_scale.view(()) * b_scale.view(()))
    return out.add_(product)
