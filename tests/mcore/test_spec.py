"""Layers by ``gpt_block_spec`` are those of Megatron-core's local spec, for each config that it takes."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch

from megatron_lowprec import UserError, get_recipe
from tests.mcore.spec_loop import UNFUSED

pytestmark = pytest.mark.usefixtures("world")

SEQUENCE, BATCH, HIDDEN, LAYERS = 8, 2, 64, 4
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 128, "add_bias_linear": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "llama": {"normalization": "RMSNorm", "gated_linear_unit": True, "num_query_groups": 2, "add_bias_linear": False},
    "norms of queries and keys": {"qk_layernorm": True},
    "RMS norms of queries and keys": {"qk_layernorm": True, "normalization": "RMSNorm", "num_query_groups": 2},
    "L2 norms of queries and keys": {"qk_l2_norm": True},
    "both": {"qk_layernorm": True, "qk_l2_norm": True},
    "gated attention": {"attention_output_gate": True},
    "experts": EXPERTS,
    "shared experts": {"moe_shared_expert_intermediate_size": 64, **EXPERTS},
    "grouped experts": {"moe_grouped_gemm": True, **EXPERTS},
    "gated and grouped experts": {"moe_grouped_gemm": True, "gated_linear_unit": True, **EXPERTS},
    "experts in every second layer": {"moe_layer_freq": 2, **EXPERTS},
    "experts by a list": {"moe_layer_freq": [0, 1, 1, 0], "qk_layernorm": True, **EXPERTS},
}


def config_of(**options: Any) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if "kv_lora_rank" in options else TransformerConfig
    unknown = options.keys() - {field.name for field in fields(kind)}
    if unknown:
        pytest.skip(f"this Megatron-core has no {', '.join(sorted(unknown))}")
    shared = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "ffn_hidden_size": 192,
        **UNFUSED,
    }
    return kind(**{**shared, **options})


def block_of(config: Any, spec: Any) -> Any:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_block import TransformerBlock

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    return TransformerBlock(config, spec)


def results(block: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator, requires_grad=True)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    y = block(hidden_states=x, attention_mask=mask)
    y.backward(torch.randn(y.shape, generator=generator))
    return {"y": y, "dx": x.grad, **{name: weight.grad for name, weight in block.named_parameters()}}


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_the_layers_are_megatron_core_s(options: dict[str, Any]) -> None:
    """The same weights, and of them the same bits; in the first layers too, where experts are only in some."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_lowprec.mcore.layers.gpt_spec import gpt_block_spec
    from megatron_lowprec.mcore.runtime import bind_recipe

    config = config_of(**options)
    stock = get_gpt_decoder_block_spec(
        config_of(**{**options, "moe_grouped_gemm": False}),
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=options.get("qk_l2_norm", False),
    )
    theirs, ours = block_of(config, stock), block_of(config, gpt_block_spec(config, attention_backend="local"))
    bind_recipe([ours], get_recipe("bf16"), num_layers=LAYERS, seed=1, accumulate_wgrad=False)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    assert [isinstance(layer.mlp, MoELayer) for layer in ours.layers] == [
        isinstance(layer.mlp, MoELayer) for layer in theirs.layers
    ]
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other += 0.1 * torch.randn(other.shape, generator=generator)  # norms begin as ones, biases as zeros
            mine.copy_(other)
    got, want = results(ours), results(theirs)
    for name in want:
        assert (got[name] is None) == (want[name] is None), name
        assert want[name] is None or torch.equal(got[name], want[name]), name


# Megatron-core builds it with TransformerEngine alone: tests/training/convert compares it with transformers.
LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 32,
    "rope_type": "rope",
    "qk_layernorm": True,
    "add_bias_linear": False,
}


@pytest.mark.parametrize("options", [*CONFIGS.values(), LATENT], ids=[*CONFIGS, "latent attention"])
def test_every_linear_layer_has_a_recipe(options: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP

    from megatron_lowprec.mcore.layers.cached_swiglu import CachedSwigluMLP
    from megatron_lowprec.mcore.layers.gpt_spec import gpt_block_spec
    from megatron_lowprec.mcore.runtime import bind_recipe

    config = config_of(**options)
    block = block_of(config, gpt_block_spec(config))
    runtime = bind_recipe([block], get_recipe("mxfp4_rht_sr"), num_layers=LAYERS, seed=1)
    linears = [module for module in block.modules() if isinstance(module, ColumnParallelLinear | RowParallelLinear)]
    assert len({id(module.linear_gemms) for module in linears}) == len(linears) == len(runtime.layers)
    assert all(isinstance(module, CachedSwigluMLP) for module in block.modules() if isinstance(module, MLP))
    if options is LATENT:
        names = {layer.linear_id.name.removeprefix("self_attention.") for layer in runtime.layers}
        projections = {f"linear_{side}_{way}_proj" for side in ("q", "kv") for way in ("down", "up")}
        assert names == {*projections, "linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"}
        assert all(value is None or value.isfinite().all() for value in results(block).values())


def test_a_pipeline_stage_has_its_own_part_of_the_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_lowprec.mcore.layers.gpt_spec import gpt_block_spec

    config = config_of(
        moe_layer_freq=[0, 1, 1, 1], pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, **EXPERTS
    )
    found = []
    for rank in range(2):
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda rank=rank: rank)
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 2)
        specs = gpt_block_spec(config).layer_specs
        mlps = [spec.submodules.mlp for spec in specs]
        # from Megatron-core 0.18 on a spec of an MLP is a partial
        found.append([MoELayer in (getattr(mlp, "module", None), getattr(mlp, "func", None)) for mlp in mlps])
    assert found == [[False, True], [True, True]]


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("experimental_attention_variant", "gated_delta_net", "experimental attention"),
        ("heterogeneous_block_specs", True, "different architectures"),
        ("mtp_num_layers", 1, "multi-token prediction"),
        ("use_kitchen", True, "Kitchen"),
        ("use_kitchen_attention", True, "Kitchen"),
        ("quant_recipe", object(), "by Megatron-core"),
        ("fp8", "hybrid", "TransformerEngine"),
        ("fp4", "e2m1", "TransformerEngine"),
        ("use_mup", True, "maximal update parametrization"),
        ("use_grouped_gemm_for_shared_expert", True, "fused shared experts"),
    ],
)
def test_options_of_another_model_are_refused(field: str, value: Any, what: str) -> None:
    from megatron_lowprec.mcore.layers.gpt_spec import gpt_block_spec

    config = config_of()
    setattr(config, field, value)
    with pytest.raises(UserError, match=rf"TransformerConfig\.{field} is .*{what}.*leave it at its default"):
        gpt_block_spec(config)


def test_grouped_experts_of_a_spec_become_this_project_s() -> None:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    from megatron_lowprec.mcore.layers.gpt_spec import low_precision
    from megatron_lowprec.mcore.layers.grouped_mlp import LowPrecGroupedMLP
    from megatron_lowprec.mcore.releases import GROUPED_EXPERTS

    def experts_of(spec: Any) -> Any:
        submodules = spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules  # from 0.19 on
        experts = submodules.experts
        return experts.func if isinstance(experts, partial) else experts.module  # partial from 0.17 on

    sequential = get_moe_module_spec(use_te=False, num_experts=4)
    assert experts_of(low_precision(sequential, moe_grouped_gemm=True)) is LowPrecGroupedMLP
    with pytest.raises(UserError, match="leave it or --moe-grouped-gemm out"):
        low_precision(sequential, moe_grouped_gemm=True, no_lowprec_linears=True)
    if GROUPED_EXPERTS is not None:
        grouped = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=True)
        assert experts_of(low_precision(grouped)) is LowPrecGroupedMLP
