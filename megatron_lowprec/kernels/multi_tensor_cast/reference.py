"""FP8 codes of many tensors, each by a scale of its own."""

from collections.abc import Sequence

import torch

from megatron_lowprec.formats import Format

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def fp8_codes(values: torch.Tensor, encode_scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """uint8 codes of fp32 ``values``, any shape, by torch's conversion: nearest even, saturated, NaN of either sign.

    Args:
        encode_scale: fp32 [1], what values are multiplied by before rounding.
    """
    return (values * encode_scale).clamp_(-fmt.max, fmt.max).to(DTYPES[fmt.name]).view(torch.uint8)


def multi_tensor_cast_(
    values: Sequence[torch.Tensor], encode_scale: torch.Tensor, fmt: Format, codes: Sequence[torch.Tensor]
) -> None:
    """Codes of each of ``values`` into the one of ``codes`` at its place.

    Args:
        values: fp32, contiguous, any number of any size.
        encode_scale: fp32 [len(values)], what each is multiplied by before rounding.
        codes: uint8, contiguous, each as large as its values.
    """
    for value, scale, code in zip(values, encode_scale.split(1), codes, strict=True):
        code.copy_(fp8_codes(value, scale, fmt))
