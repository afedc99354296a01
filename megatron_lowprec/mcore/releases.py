"""Differences between the supported releases of Megatron-core, 0.15 to 0.17; pyproject.toml has the range."""

from inspect import signature
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.transformer.moe import experts
from megatron.core.transformer.transformer_config import TransformerConfig

GROUPED_EXPERTS: type | None = getattr(experts, "GroupedMLP", None)
"""Experts of local specs in one GEMM, until 0.16."""

# From 0.17 on the default writer needs nvidia-resiliency-ext.
ASYNC_SAVE: dict[str, Any] = {"async_sharded_save": True} | (
    {"async_strategy": "mcore"} if "async_strategy" in signature(dist_checkpointing.save).parameters else {}
)
"""Options of ``dist_checkpointing.save`` for an asynchronous save by Megatron-core's own writer."""


def qk_l2_norm(config: TransformerConfig) -> bool:
    """Whether queries and keys have L2 norms; a field of the config from 0.16 on."""
    return bool(getattr(config, "qk_l2_norm", False))
