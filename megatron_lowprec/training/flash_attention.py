"""Which FlashAttention torch's scaled_dot_product_attention takes, for the whole process.

Without a choice torch takes cuDNN's kernels on Hopper and FlashAttention 2 elsewhere. Versions 3 and 4 are packages of
their own, which ``torch.nn.attention`` registers as prototypes. torch 2.13 expects of flash-attn-4 the two results that
its releases up to 4.0.0b18 give.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron_lowprec.errors import UserError

_PACKAGES = {3: "flash_attn_interface (FlashAttention 3, built from source)", 4: "flash-attn-4"}
_CAPABILITIES = {2: (8, 9, 10, 11, 12), 3: (9,), 4: (9, 10)}
"""Version -> major compute capabilities that torch takes it on."""


def use_flash_attention(version: int, dropout: float, channels: int) -> None:
    """Take FlashAttention ``version`` for causal attention in bf16 without a mask, after one small attention by it.

    Args:
        version: 2, 3 or 4.
        dropout: of attention, as a probability; versions 3 and 4 have none.
        channels: of a head's queries, keys and values.

    Raises:
        UserError: the GPU, torch or what is installed does not have it, or version 3 or 4 is to drop out.
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
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # prototypes of two projects, whose releases fit each other or fail in any way
        package = f" and the package {_PACKAGES[version]} of a release that it takes" if version in _PACKAGES else ""
        raise UserError(
            f"{asked} needs a torch that has it, now {torch.__version__},{package} for heads of {channels} channels; "
            f"a small attention failed with {type(error).__name__}: {error}. Install one, or leave the option out"
        ) from error


def _attend(channels: int) -> None:
    """Forward and backward by FlashAttention alone, with two heads in a group."""
    q, k = (torch.zeros(1, n, 128, channels, dtype=torch.bfloat16, device="cuda", requires_grad=True) for n in (2, 1))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        y = scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    y.sum().backward()
