"""Weights of a whole GPT by the names that Megatron-core's GPTModel uses on one rank. Needs only torch.

Every conversion goes through these names: ``decoder.layers.0.input_layernorm.weight``,
``decoder.layers.0.self_attention.linear_qkv.weight``, …. Checkpoints name the same tensors differently:
TransformerEngine fuses norms (``linear_qkv.layer_norm_weight``), and a distributed checkpoint stacks all layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

from megatron_lowprec.errors import UserError

Weights = dict[str, torch.Tensor]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PREFIXES = ("embedding.", "decoder.", "output_layer.")
_NORMS = (
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)
_LAYER = re.compile(r"^decoder\.layers\.(?!\d)")
_EXPERTS = ".mlp.experts.experts."


def is_weight(name: str) -> bool:
    """Whether a checkpoint's entry is a weight of the model, not optimizer state, amax history or extra state."""
    return name.startswith(_PREFIXES) and ".amax." not in name and "_extra_state" not in name


def check_values(weights: Mapping[str, torch.Tensor], where: str) -> None:
    """Reject weights that are codes of a quantization, or not finite.

    Raises:
        UserError: with the first such tensor.
    """
    for name, tensor in weights.items():
        if tensor.dtype not in _DTYPES:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{where}: {name} is {dtype}; weights must be values in bfloat16, float16 or float32")
        count = tensor.numel() - int(tensor.isfinite().sum())
        if count:
            raise UserError(f"{where}: {name} has {count:,} NaN or Inf among {tensor.numel():,} values")


def canonical(found: Mapping[str, torch.Tensor]) -> Weights:
    """Weights under GPTModel's own names; stacked layers and experts are split (views)."""
    return {
        _rename(whole): tensor
        for name, stack in found.items()
        for layer, stacked in _layers(name, stack)
        for whole, tensor in _experts(layer, stacked)
    }


def _rename(name: str) -> str:
    for theirs, ours in _NORMS:
        name = name.replace(theirs, ours)
    return name


def _layers(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if not _LAYER.match(name):
        yield name, tensor
        return
    for number, layer in enumerate(tensor):
        yield _LAYER.sub(f"decoder.layers.{number}.", name), layer


def _experts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if _EXPERTS not in name:
        yield name, tensor
        return
    for number, expert in enumerate(tensor):
        yield name.replace(_EXPERTS, f".mlp.experts.local_experts.{number}."), expert
