"""Which implementation of an op runs: a fused Triton kernel where one applies, else the reference."""

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.amax_history import reference as history_reference
from megatron_lowprec.kernels.bias import reference as bias_reference
from megatron_lowprec.kernels.multi_tensor_cast import reference as cast_many_reference
from megatron_lowprec.kernels.scaled_adam import reference as adam_reference
from megatron_lowprec.kernels.scaled_adam.reference import Hyperparameters, Slot


@lru_cache(maxsize=1)
def have_triton() -> bool:
    """Whether Triton can be imported; it comes with torch's CUDA build."""
    return find_spec("triton") is not None


@lru_cache(maxsize=16)
def arch_of(device: torch.device) -> str:
    """ "cpu", or a GPU's compute capability as "sm90"."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def has_mx_kernel(device: str, block: tuple[int, int] | None, scale_format: str) -> bool:
    """Whether ``kernels.quantize.triton`` knows such operands on a ``device`` ("cpu" or "cuda"): MX blocks of 32.

    Args:
        block: (rows, columns) that share a scale; None for rows and tensors.
    """
    return device == "cuda" and block == (1, 32) and scale_format == "e8m0" and have_triton()


def fuses_mx(matrix: torch.Tensor, block: tuple[int, int] | None, scale_format: str, transform_block: int) -> bool:
    """Whether the kernel takes this one: bf16 or fp32, contiguous in one dimension, whole groups along rows.

    Args:
        matrix: [R, K], the contracted dimension last; a transposed view counts as contiguous.
        transform_block: block of its Hadamard transform, 1 without one.
    """
    if not has_mx_kernel(matrix.device.type, block, scale_format):
        return False
    if matrix.dtype not in (torch.bfloat16, torch.float32) or matrix.numel() == 0:
        return False
    whole = matrix.shape[1] % max(32, transform_block) == 0
    return whole if matrix.stride(1) == 1 else matrix.stride(0) == 1  # along columns the kernel pads


def fuses(x: torch.Tensor) -> bool:
    """Whether the Triton kernels of norms, biases, activation and loss take this tensor."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float32) and x.numel() > 0 and have_triton()


def add_bias_(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``y + bias`` in place of y, [T, O]; the bits of torch's own sum."""
    if fuses(y) and y.is_contiguous():
        from megatron_lowprec.kernels.bias import triton

        return triton.add_bias_(y, bias)
    return bias_reference.add_bias_(y, bias)


def update_history_(newest: torch.Tensor, window: torch.Tensor, in_effect: torch.Tensor, take_max: bool) -> None:
    """``history.reference.update_history_``, on a GPU as one kernel."""
    if fuses(window):
        from megatron_lowprec.kernels.amax_history import triton

        return triton.update_history_(newest, window, in_effect, take_max)
    return history_reference.update_history_(newest, window, in_effect, take_max)


def multi_tensor_cast_(
    values: Sequence[torch.Tensor], encode_scale: torch.Tensor, fmt: Format, codes: Sequence[torch.Tensor]
) -> None:
    """``multi_tensor_cast.reference.multi_tensor_cast_``, on a GPU as one kernel."""
    if encode_scale.is_cuda and have_triton():
        from megatron_lowprec.kernels.multi_tensor_cast import triton

        return triton.multi_tensor_cast_(values, encode_scale, fmt, codes)
    return cast_many_reference.multi_tensor_cast_(values, encode_scale, fmt, codes)


def adam_update_amax(slots: Sequence[Slot], step: Hyperparameters) -> torch.Tensor:
    """``scaled_adam.reference.update_amax``, on a GPU as one kernel; all slots have the same dtypes."""
    if slots[0].grad.is_cuda and have_triton():
        from megatron_lowprec.kernels.scaled_adam import triton

        return triton.update_amax(slots, step)
    return adam_reference.update_amax(slots, step)


def adam_update_(slots: Sequence[Slot], step: Hyperparameters, encode_scales: torch.Tensor) -> None:
    """``scaled_adam.reference.update_``, on a GPU as one kernel; all slots have the same dtypes."""
    if slots[0].grad.is_cuda and have_triton():
        from megatron_lowprec.kernels.scaled_adam import triton

        return triton.update_(slots, step, encode_scales)
    return adam_reference.update_(slots, step, encode_scales)
