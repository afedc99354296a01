"""--cuda-graph-impl under --spec: what cannot be captured is refused in a line, and no call is captured wrongly."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowprec import UserError, get_recipe
from megatron_lowprec.mcore.graphs import graph_support
from megatron_lowprec.mcore.graphs.captured_layer import Call
from megatron_lowprec.mcore.graphs.graph_support import asks_for_graphs, check_graphs

CHOOSE = "leave one of the two out"
UNFUSED = {"attention_backend": AttnBackend.unfused}
OBSTACLES: list[tuple[dict[str, Any], dict[str, Any], str, str, str]] = [
    ({"cuda_graph_impl": "transformer_engine"}, {}, "mxfp8", "captured one by one", "give --cuda-graph-impl local"),
    ({"num_moe_experts": 4}, {}, "mxfp8", "the sizes of --num-experts 4 follow the router", CHOOSE),
    (
        {"pipeline_model_parallel_size": 2},
        {},
        "mxfp8",
        "has several microbatches on their way, and graphs hold the activations of one",
        CHOOSE,
    ),
    ({"recompute_granularity": "selective"}, {}, "mxfp8", "selective runs layers twice", CHOOSE),
    ({}, {}, "fp8_lm_o2", "recipe fp8_lm_o2 stores gradients in FP8", CHOOSE),
    ({"variable_seq_lengths": True}, {}, "mxfp8", "the length of sequences varies", CHOOSE),
    ({"cpu_offloading": True}, {}, "mxfp8", "activations are offloaded", CHOOSE),
    ({}, {"use_torch_fsdp2": True}, "mxfp8", "weights are sharded by FSDP", CHOOSE),
    (
        UNFUSED,
        {"create_attention_mask_in_dataloader": True},
        "mxfp8",
        "--attention-backend unfused reads a mask of each microbatch",
        "add --no-create-attention-mask-in-dataloader",
    ),
    (
        {"tensor_model_parallel_size": 2},
        {"distributed_backend": "gloo"},
        "mxfp8",
        "runs tensor-parallel collectives on the host",
        "use nccl",
    ),
    (
        {},
        {},
        "deepseek_v3",
        "recipe deepseek_v3 saves activations in formats of its own",
        "add activations.attention_output=none activations.swiglu_input=none behind the recipe's name in --spec",
    ),
    ({}, {}, "mxfp8", "torch sees no GPU", "leave it out"),
]


def config(**changes: Any) -> TransformerConfig:
    """A config whose fields have changed since: some changes Megatron-core would itself refuse or complete."""
    found = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=2, cuda_graph_impl="local")
    for name, value in changes.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize("case", OBSTACLES, ids=lambda case: case[3])
def test_reasons_against_capture(
    monkeypatch: pytest.MonkeyPatch, case: tuple[dict[str, Any], dict[str, Any], str, str, str]
) -> None:
    changes, args, recipe, reason, remedy = case
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wanted = f"^--cuda-graph-impl {changes.get('cuda_graph_impl', 'local')} was given, but .*{reason}.*; {remedy}$"
    with pytest.raises(UserError, match=wanted):
        check_graphs(config(**changes), get_recipe(recipe), SimpleNamespace(**args))


@pytest.mark.parametrize("name", ["attn", "mlp"])
def test_parts_of_a_layer_are_refused(name: str) -> None:
    field = "cuda_graph_modules" if hasattr(TransformerConfig, "cuda_graph_modules") else "cuda_graph_scope"
    asked = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=2, cuda_graph_impl="local", **{field: [name]}
    )
    with pytest.raises(UserError, match=f"captured whole, not in the parts {name}; leave the parts out"):
        check_graphs(asked, get_recipe("bf16"))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "mxfp4_rht_sr"])
def test_a_dense_model_is_captured_with_generators_that_graphs_can_hold(
    monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(graph_support, "get_cuda_rng_tracker", lambda: SimpleNamespace(use_cudagraphable_rng=True))
    check_graphs(config(), get_recipe(recipe))
    assert asks_for_graphs(config())
    assert not asks_for_graphs(config(cuda_graph_impl="none"))
    monkeypatch.setattr(graph_support, "get_cuda_rng_tracker", lambda: SimpleNamespace())
    with pytest.raises(UserError, match=re.escape("call model_parallel_cuda_manual_seed(seed, use_cudagraphable_rng")):
        check_graphs(config(), get_recipe(recipe))


def test_a_call_that_graphs_do_not_serve_is_described() -> None:
    positions, shape, form = torch.zeros(1), torch.Size([8, 2, 64]), torch.bfloat16
    call = Call(shape, form, (), {"attention_mask": None, "rotary_pos_emb": positions})
    assert call.difference(Call(shape, form, (), {"attention_mask": None, "rotary_pos_emb": positions})) is None
    shorter = call._replace(shape=torch.Size([4, 2, 64]))
    assert call.difference(shorter) == "hidden states [4, 2, 64] of torch.bfloat16, not [8, 2, 64] of torch.bfloat16"
    masked = call._replace(kwargs={"attention_mask": torch.ones(1), "rotary_pos_emb": positions.clone()})
    assert call.difference(masked) == "another attention_mask, rotary_pos_emb"
    assert call.difference(call._replace(kwargs=call.kwargs | {"packed_seq_params": object()})) == (
        "another packed_seq_params"
    )
