"""Checks of ``dispatch_worker.py``: models, recipes and layouts whose tokens cannot travel as codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megatron_lowprec import UserError, get_recipe
from tests.mcore.dispatch_model import FFN, RECIPES, build

REFUSALS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "the all-gather dispatcher",
        "--moe-token-dispatcher-type is allgather",
        {"moe_token_dispatcher_type": "allgather"},
    ),
    (
        "probabilities of the input",
        "moe_apply_probs_on_input",
        {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    ),
    (
        "padding",
        "moe_pad_expert_input_to_capacity",
        {
            "moe_pad_expert_input_to_capacity": True,
            "moe_expert_capacity_factor": 1.0,
            "moe_router_load_balancing_type": "none",
        },
    ),
    (
        "overlap",
        "moe_shared_expert_overlap",
        {"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": FFN},
    ),
]


def refused(reason: str, more: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"--moe-fp8-dispatch .*{reason}"):
        build(RECIPES["mxfp8"], True, **more)


def recipes_refused() -> None:
    with pytest.raises(UserError, match="in recipe fp8_delayed input has a delayed scale per expert"):
        build(get_recipe("fp8_delayed"), True)


def fused_permutation_refused() -> None:
    from megatron_lowprec.mcore.token_dispatch import Fp8Dispatch

    block, _ = build(RECIPES["mxfp8"], False)
    block.layers[0].mlp.config.moe_permute_fusion = True
    with pytest.raises(UserError, match="moe_permute_fusion: TransformerEngine's fused permutation"):
        Fp8Dispatch(RECIPES["mxfp8"]).bind(block.layers[0])


def stock_experts_refused() -> None:
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megatron_lowprec.mcore.token_dispatch import Fp8Dispatch

    block, _ = build(RECIPES["mxfp8"], False)
    experts = block.layers[0].mlp.experts
    experts.__class__ = SequentialMLP
    with pytest.raises(UserError, match="needs this project's experts, which take codes, and found SequentialMLP"):
        Fp8Dispatch(RECIPES["mxfp8"]).bind(block.layers[0])


def one_rank_refused() -> None:
    with _layout(1), pytest.raises(UserError, match="does nothing at --expert-model-parallel-size 1"):
        build(RECIPES["mxfp8"], True, expert_model_parallel_size=1)


def tensor_parallel_experts_refused() -> None:
    """Two tensor-parallel shards of each expert; the check comes before that of the expert-parallel size."""
    with _layout(1, tensor_model_parallel_size=2, expert_tensor_parallel_size=2):
        block, _ = build(
            RECIPES["fp8_blockwise"],
            False,
            expert_model_parallel_size=1,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            moe_ffn_hidden_size=256,
        )
        from megatron_lowprec.mcore.token_dispatch import Fp8Dispatch

        block.layers[0].mlp.token_dispatcher.ep_size = 2
        with pytest.raises(UserError, match="--expert-tensor-parallel-size 2, whose ranks gather tokens"):
            Fp8Dispatch(RECIPES["fp8_blockwise"]).bind(block.layers[0])


@contextmanager
def _layout(expert: int, **sizes: int) -> Iterator[None]:
    """Other process groups for a while."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=expert, **sizes)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2, expert_tensor_parallel_size=1)
