"""FP8 codes of many tensors, each with its own scale."""

from collections.abc import Sequence

import torch

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.format_dtypes import DTYPES


def fp8_codes(values: torch.Tensor, encode_scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """uint8 codes of fp32 ``values``, any shape, by torch's conversion: nearest even, saturated, NaN of either sign.

    Args:
        encode_scale: fp32 [1], multiplies values before rounding.
    """
    return (values * encode_scale).clamp_(-fmt.max, fmt.max).to(DTYPES[fmt.name]).view(torch.uint8)


def multi_tensor_cast_(
    values: Sequence[torch.Tensor], encode_scale: torch.Tensor, fmt: Format, codes: Sequence[torch.Tensor]
) -> None:
    """Write the codes of each tensor of ``values`` to the tensor of ``codes`` at the same index.

    Args:
        values: fp32, contiguous, any number of any size.
        encode_scale: fp32 [len(values)], multiplies each tensor before rounding.
        codes: uint8, contiguous, with the sizes of ``values``.
    """
    for value, scale, code in zip(values, encode_scale.split(1), codes, strict=True):
        code.copy_(fp8_codes(value, scale, fmt))
