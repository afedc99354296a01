"""Which FlashAttention torch's scaled_dot_product_attention takes, for the whole process.

By itself torch takes cuDNN's kernels on Hopper and FlashAttention 2 elsewhere. Versions 3 and 4 are packages of their
own, which ``torch.nn.attention`` registers as prototypes. torch 2.13 expects of flash-attn-4 the two results that its
releases up to 4.0.0b18 give.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_lowprec.errors import UserError

_PACKAGES = {3: "flash_attn_interface (FlashAttention 3, built from source)", 4: "flash-attn-4"}
_CAPABILITIES = {2: (8, 9, 10, 11, 12), 3: (9,), 4: (9, 10)}
"""Version -> major compute capabilities that torch takes it on."""


def use_flash_attention(version: int, dropout: float, channels: int) -> None:
    """Take FlashAttention ``version`` for causal attention without a mask, after one small attention by it.

    Args:
        version: 2, 3 or 4.
        dropout: of attention, as a probability; versions 3 and 4 have none.
        channels: of a head.

    Raises:
        UserError: the GPU, torch or what is installed does not have it, or dropout is asked of version 3 or 4.
    """
    asked = f"--flash-attention-version {version}"
    if not torch.cuda.is_available():
        raise UserError(f"{asked} needs a GPU, and this process has none: leave it out")
    major, minor = torch.cuda.get_device_capability()
    if major not in _CAPABILITIES[version]:
        wanted = " or ".join(f"{each}.x" for each in _CAPABILITIES[version])
        raise UserError(
            f"{asked} needs a GPU of compute capability {wanted}, this one has {major}.{minor}: leave it out"
        )
    if version > 2 and dropout > 0.0:
        raise UserError(f"{asked} has no dropout: set --attention-dropout 0, now {dropout:g}, or leave it out")
    torch.backends.cuda.enable_cudnn_sdp(False)  # which torch would prefer
    try:
        if version > 2:
            torch.nn.attention.activate_flash_attention_impl(f"FA{version}")
        _attend(channels)
    except Exception as error:  # prototypes of two projects, whose releases fit each other or fail in any way
        package = f", and the package {_PACKAGES[version]} of a release that it takes" if version in _PACKAGES else ""
        raise UserError(
            f"{asked} needs a torch that has it, now {torch.__version__}{package}; a small attention failed: "
            f"{type(error).__name__}: {error}"
        ) from error


def _attend(channels: int) -> None:
    """Forward and backward, as the layers call it."""
    q = torch.zeros(1, 1, 128, channels, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
