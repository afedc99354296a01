"""GPUs that this process was given, and whether torch has them: one that lost its GPUs must not train on the CPU."""

from __future__ import annotations

import ctypes
import os
import re

from megatron_lowprec.errors import UserError

_NAMES_A_GPU = re.compile(r"\d+|(GPU|MIG)-.+")


def given_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES if it names a GPU and the machine has an NVIDIA driver, else None.

    CUDA ends the list at its first invalid name, so that "" and "-1" give none, and neither does Slurm's "NoDevFiles".
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    return names if _NAMES_A_GPU.fullmatch(names.partition(",")[0].strip()) and has_driver() else None


def has_driver() -> bool:
    """Whether the library of NVIDIA's driver can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def lost_gpus(names: str, reason: str = "its count is 0") -> UserError:
    """The error for GPUs that were given and are not found."""
    return UserError(
        f"CUDA_VISIBLE_DEVICES={names} gives this process GPUs, and torch finds none ({reason}); name GPUs that it "
        'reaches, under MPS those of the MPS server, or set CUDA_VISIBLE_DEVICES="" to run on the CPU'
    )


def has_gpus() -> bool:
    """Whether torch has a GPU.

    Raises:
        UserError: the process was given GPUs, and torch has none.
    """
    import torch

    if torch.cuda.is_available():
        return True
    names = given_gpus()
    if names is not None:
        raise lost_gpus(names, _reason())
    return False


def _reason() -> str:
    """CUDA's own reason why there is no GPU, as one line."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the latter from a torch that was built without CUDA
        return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")
    return "CUDA starts and counts no GPU"
