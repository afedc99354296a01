"""torch's dtypes of formats, by ``Format.dtype``; ``formats`` itself loads without torch."""

import torch

from megatron_lowprec.formats import FORMATS

DTYPES: dict[str, torch.dtype] = {fmt.name: getattr(torch, fmt.dtype) for fmt in FORMATS.values() if fmt.dtype}
"""Format -> dtype of its codes, where torch has one."""
