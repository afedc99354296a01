"""Dispatch of ops: a fused Triton kernel where one applies, else the reference.

No other module of the package imports a ``triton.py``, so Triton loads with the first tensor that needs it. An op has
the name and signature of its reference, as has the function in ``triton.py``. Callers that choose once for several
calls (native GEMMs, both directions of an MX cast) ``load`` the module, which saves a call before each launch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.amax_history import reference as amax_history
from megatron_lowprec.kernels.bias import reference as bias
from megatron_lowprec.kernels.cross_entropy import reference as cross_entropy
from megatron_lowprec.kernels.dropout import reference as dropout
from megatron_lowprec.kernels.gelu import reference as gelu
from megatron_lowprec.kernels.gradient_codes import reference as gradient_codes
from megatron_lowprec.kernels.layernorm import reference as layernorm
from megatron_lowprec.kernels.multi_tensor_cast import reference as multi_tensor_cast
from megatron_lowprec.kernels.operand_stats import reference as operand_stats_reference
from megatron_lowprec.kernels.packed_cast import reference as packed_cast_reference
from megatron_lowprec.kernels.partial_cast import reference as partial_cast
from megatron_lowprec.kernels.quantize.rule import MxRule
from megatron_lowprec.kernels.rope import reference as rope_reference
from megatron_lowprec.kernels.scaled_adam import reference as scaled_adam
from megatron_lowprec.kernels.swiglu import reference as swiglu_reference
from megatron_lowprec.kernels.transpose_codes import reference as transpose_codes_reference

P = ParamSpec("P")
R = TypeVar("R")


@lru_cache(maxsize=1)
def have_triton() -> bool:
    """Whether Triton can be imported; it comes with torch's CUDA build."""
    return find_spec("triton") is not None


@lru_cache(maxsize=16)
def arch_of(device: torch.device) -> str:
    """The device's architecture: "cpu", or a GPU's compute capability such as "sm90"."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def arch_here() -> str:
    """``arch_of`` this process's current GPU, or "cpu" where there is none."""
    return arch_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def has_mx_kernel(device: str, rule: MxRule | None) -> bool:
    """Whether ``kernels.quantize.triton`` quantizes by a rule on ``device`` ("cpu" or "cuda"); None for no rule."""
    return device == "cuda" and rule is not None and have_triton()


def fuses_mx(matrix: torch.Tensor, rule: MxRule | None, transform_block: int = 1, codes: bool = False) -> bool:
    """Whether the MX kernel supports a matrix: bf16 or fp32, contiguous in one dimension, whole groups along rows.

    Args:
        matrix: [R, K], contracted dimension last, or a transposed view.
        rule: None for one that the kernel does not have.
        transform_block: block of its Hadamard transform, 1 without one.
        codes: whether codes are asked for, instead of values.
    """
    if not has_mx_kernel(matrix.device.type, rule):
        return False
    assert rule is not None
    if transform_block > 1 and transform_block % rule.block:  # a scale would span two transforms
        return False
    if rule.block_rows > 1 and (codes or transform_block > 1):
        return False
    if matrix.dtype not in (torch.bfloat16, torch.float32) or matrix.numel() == 0:
        return False
    whole = matrix.shape[1] % max(rule.block, transform_block) == 0
    return whole if matrix.stride(1) == 1 else matrix.stride(0) == 1  # the kernel pads columns


def fuses(x: torch.Tensor) -> bool:
    """Whether the Triton kernels support a tensor: on a GPU, bf16 or fp32, not empty."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float32) and x.numel() > 0 and have_triton()


@cache
def load(op: str) -> Any:
    """The Triton module of an op's folder; check ``fuses`` or ``fuses_mx`` first.

    Cached, since an import statement costs the host more than the rest of a dispatch.
    """
    return import_module(f"megatron_lowprec.kernels.{op}.triton")


def _op(reference: Callable[P, R], fused: Callable[..., bool] | None = None) -> Callable[P, R]:
    """The dispatching op of a ``reference``.

    Args:
        fused: whether the Triton kernel supports the arguments; None for ``fuses`` of the first one. Callers pass the
            arguments that it reads by position.
    """
    folder, name = reference.__module__.split(".")[-2], reference.__name__

    @wraps(reference)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        if fuses(args[0]) if fused is None else fused(*args):  # type: ignore[arg-type]
            result: R = getattr(load(folder), name)(*args, **kwargs)
            return result
        return reference(*args, **kwargs)

    return op


def _fuses_operand_stats(
    x: torch.Tensor,
    _data: torch.Tensor,
    scale: torch.Tensor | None,
    _fmt: Format | None,
    block: tuple[int, int] = (1, 1),
    _headroom: float = 1.0,
    signs: torch.Tensor | None = None,
) -> bool:
    fits = signs is None or signs.numel() < 256 or x.dtype != torch.float32  # the matrix fits into shared memory
    # a tile's columns are a power of two, and the 8 of a cell share a scale
    one_a_cell = scale is None or scale.shape[1] == 1 or (block[1] >= 8 and block[1].bit_count() == 1)
    return fits and one_a_cell and fuses(x)


def _fuses_bias(y: torch.Tensor, *_: Any) -> bool:
    """A dispatch mode may keep y, which the kernel overwrites: selective checkpoints keep results of ``aten.mm``."""
    return fuses(y) and y.is_contiguous() and not torch._C._len_torch_dispatch_stack()


def _on_gpu(slots: Any, *_: Any) -> bool:
    return slots[0].grad.is_cuda and have_triton()


norm = _op(layernorm.norm)
norm_statistics = _op(layernorm.statistics)
norm_backward = _op(layernorm.norm_backward)
bias_gelu = _op(gelu.bias_gelu)
bias_gelu_backward = _op(gelu.bias_gelu_backward)
rope = _op(rope_reference.rope)
rope_backward = _op(rope_reference.rope_backward)
swiglu = _op(swiglu_reference.swiglu)
swiglu_backward = _op(swiglu_reference.swiglu_backward)
weighted_swiglu_backward = _op(swiglu_reference.weighted_swiglu_backward)
bias_dropout_add = _op(dropout.bias_dropout_add)
bias_dropout_add_backward = _op(dropout.bias_dropout_add_backward)
add_bias = _op(bias.add_bias, _fuses_bias)
logit_sums = _op(cross_entropy.logit_sums)
logits_gradient_ = _op(cross_entropy.logits_gradient_)
operand_stats = _op(operand_stats_reference.operand_stats, _fuses_operand_stats)
packed_cast = _op(packed_cast_reference.packed_cast)
packed_decode = _op(
    packed_cast_reference.packed_decode, lambda codes, *_: codes.is_cuda and codes.numel() > 0 and have_triton()
)
update_history_ = _op(amax_history.update_history_)
multi_tensor_cast_ = _op(
    multi_tensor_cast.multi_tensor_cast_, lambda _, encode_scale, *__: encode_scale.is_cuda and have_triton()
)
gradient_scale = _op(gradient_codes.gradient_scale)
cast_gradient_ = _op(gradient_codes.cast_gradient_)
count_saturated = _op(gradient_codes.count_saturated, lambda codes, *_: codes.is_cuda and have_triton())
requantize_ = _op(gradient_codes.requantize_, lambda codes, *_: codes.is_cuda and have_triton())
sum_codes_ = _op(gradient_codes.sum_codes_, lambda received, *_: received.is_cuda and have_triton())
partial_amax = _op(partial_cast.partial_amax, lambda shards, *_: shards[0].values.is_cuda and have_triton())
partial_cast_ = _op(partial_cast.partial_cast_, lambda _, encode_scale, *__: encode_scale.is_cuda and have_triton())
adam_update_amax = _op(scaled_adam.update_amax, _on_gpu)
"""All slots have the same dtypes."""
adam_update_ = _op(scaled_adam.update_, _on_gpu)
"""All slots have the same dtypes."""
transpose_codes = _op(
    transpose_codes_reference.transpose_codes, lambda codes, *_: codes.is_cuda and codes.numel() > 0 and have_triton()
)
transpose_groups = _op(transpose_codes_reference.transpose_groups, lambda codes: codes[0].is_cuda and have_triton())
