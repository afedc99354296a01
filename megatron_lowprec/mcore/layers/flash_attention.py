"""Which FlashAttention torch's scaled_dot_product_attention takes, for the whole process.

By itself torch takes cuDNN's kernels on Hopper and FlashAttention 2 elsewhere. Versions 3 and 4 are packages of their
own, which ``torch.nn.attention`` registers as prototypes.
"""

import torch

from megatron_lowprec.errors import UserError

_PACKAGES = {3: "flash_attn_interface (FlashAttention 3, built from source)", 4: "flash-attn-4"}
_CAPABILITIES = {2: (8, 9, 10, 11, 12), 3: (9,), 4: (9, 10)}
"""Version -> major compute capabilities that torch takes it on."""


def use_flash_attention(version: int, dropout: float) -> None:
    """Take FlashAttention ``version`` for causal attention without a mask.

    Args:
        version: 2, 3 or 4.
        dropout: of attention, as a probability; versions 3 and 4 have none.

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
    if version > 2:
        if dropout > 0.0:
            raise UserError(f"{asked} has no dropout: set --attention-dropout 0, now {dropout:g}, or leave it out")
        _activate(version, asked)
    torch.backends.cuda.enable_cudnn_sdp(False)  # which torch would prefer


def _activate(version: int, asked: str) -> None:
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate is None:
        raise UserError(
            f"{asked} needs a torch with torch.nn.attention.activate_flash_attention_impl: {torch.__version__}"
        )
    try:
        activate(f"FA{version}")
    except (ImportError, RuntimeError, ValueError) as error:
        raise UserError(f"{asked} needs the package {_PACKAGES[version]}: {error}") from error
