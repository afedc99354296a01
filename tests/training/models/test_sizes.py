"""Counts that follow from sizes are those of the model that Megatron-core builds."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model
from megatron_lowprec.training.models.sizes import (
    flops_per_sample,
    linear_sites,
    num_non_embedding_parameters,
    num_parameters,
)
from tests.training.conftest import Drive
from tests.training.helpers import LLAMA, argv

LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "position_embedding_type": "rope",
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        LLAMA,
        {"num_experts": 4, "disable_bias_linear": True},
        {"disable_bias_linear": True, "add_qkv_bias": True},
        LATENT,
    ],
    ids=["gpt", "llama", "experts", "extras", "latent"],
)
def test_parameters_and_linear_layers(drive: Drive, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from megatron_lowprec.training import loop

    seen: list[Any] = []
    monkeypatch.setattr(loop, "train", lambda run: seen.append(run))
    drive(argv(save="out", **changes))
    (run,) = seen
    model = run.trainer.chunks[0]
    assert sum(p.numel() for p in model.parameters()) == num_parameters(run.config, 256)
    sites = {(s.layer_number, s.name): (s.in_features, s.out_features) for s in linear_sites(run.config)}
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and ".layers." in name:
            layer, inner = name.split(".layers.")[1].split(".", 1)
            inner = inner.replace("local_experts.0.", "")
            if "local_experts" not in inner:
                found[int(layer) + 1, inner] = (module.weight.shape[1], module.weight.shape[0])
    assert sites == found


def test_parameters_without_embeddings_are_those_of_the_published_ladder() -> None:
    """N of the smallest Llama in megatron_lowprec/data/quartet2-runs.csv."""
    sizes = ["--num-layers", "6", "--hidden-size", "640", "--ffn-hidden-size", "1792", "--num-attention-heads", "5"]
    llama = ["--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope"]
    length = ["--seq-length", "512"]
    for embeddings in ([], ["--untie-embeddings-and-output-weights"]):
        config = resolve_model(parse([*sizes, *llama, *length, *embeddings])[0])
        assert num_non_embedding_parameters(config) == 6 * (4 * 640**2 + 3 * 640 * 1792) + 13 * 640 == 30_482_560
    learned = resolve_model(parse([*sizes, *llama[:4], *length])[0])
    assert num_parameters(learned, 1000) == num_non_embedding_parameters(learned) + (1000 + 512) * 640


def test_flops_of_a_known_model() -> None:
    path = SHIPPED / "configs/models/gpt_345m.yaml"
    config = resolve_model(parse(["--config", str(path)])[0])
    # A token costs 6 x (12 hidden^2 a layer and the logits), and causal attention 6 x layers x hidden x sequence.
    tokens, hidden, layers = 2048, 1024, 24
    expected = tokens * (6 * (12 * hidden**2 * layers + hidden * 50304) + 6 * layers * hidden * tokens)
    assert flops_per_sample(config, 50304) == expected
