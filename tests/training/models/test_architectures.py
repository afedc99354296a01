"""Which architecture options select, and what another one has to provide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models import architectures
from megatron_lowprec.training.models.architectures import architecture_of, model_options
from megatron_lowprec.training.models.common import attention
from megatron_lowprec.training.models.common.layer_pattern import canonical_pattern, layers_with_experts
from megatron_lowprec.training.models.gpt2.architecture import GPT2
from megatron_lowprec.training.models.sizes import has_experts, num_parameters
from tests.training.conftest import Drive
from tests.training.convert.models import LLAMA as LLAMA_OPTIONS
from tests.training.helpers import argv, losses

LLAMA = {name: value for name, value in LLAMA_OPTIONS.items() if name in Config.__dataclass_fields__}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "gpt2"),
        ({"swiglu": True}, "gpt2"),
        (LLAMA, "llama"),
        ({**LLAMA, "use_rope_scaling": True}, "llama"),
        ({**LLAMA, "rope_type": "yarn"}, "llama"),
        ({**LLAMA, "add_qkv_bias": True}, "qwen2"),
        ({**LLAMA, "qk_layernorm": True}, "qwen3"),
        ({**LLAMA, "qk_layernorm": True, "add_qkv_bias": True}, "gpt2"),
        ({**LLAMA, "num_experts": 4}, "moe"),
        ({"num_experts": 4}, "moe"),
        ({"num_experts": 4, "multi_latent_attention": True}, "deepseek"),
        ({"multi_latent_attention": True}, "dense latent attention"),
    ],
)
def test_options_select_an_architecture(options: dict[str, Any], name: str) -> None:
    config = Config(**options)
    assert architecture_of(config).name == name
    assert has_experts(config) == (name in ("moe", "deepseek")) == ("moe_router_topk" in model_options(config))
    assert config.multi_latent_attention == ("kv_lora_rank" in model_options(config))
    assert "attention_backend" not in model_options(config)


@pytest.mark.parametrize(
    ("asked", "layers"),
    [
        ("1", [True] * 4),
        ("2", [True, False, True, False]),
        ("([0]*1+[1]*3)", [False, True, True, True]),
        ("[0, 1]*2", [False, True] * 2),
        ("[0,1,1,0]", [False, True, True, False]),
    ],
)
def test_layers_with_experts(asked: str, layers: list[bool]) -> None:
    """Megatron-LM evaluates the same text as Python, and takes a number as every Nth layer."""
    config = Config(num_layers=4, hidden_size=8, num_attention_heads=1, seq_length=8, moe_layer_freq=asked)
    assert layers_with_experts(config) == tuple(layers)
    assert layers_with_experts(replace(config, moe_layer_freq=canonical_pattern(config))) == tuple(layers)
    if asked not in ("1", "2"):
        assert [bool(number) for number in eval(asked)] == layers


@pytest.mark.parametrize("asked", ["0", "x", "[0]*3", "[1]*9999999999999", "[2]*4", "__import__('os')"])
def test_other_patterns_are_refused(asked: str) -> None:
    with pytest.raises(UserError, match=r"--moe-layer-freq .*--num-layers 4 .*\(\[0\]\*1\+\[1\]\*3\)"):
        layers_with_experts(
            Config(num_layers=4, hidden_size=8, num_attention_heads=1, seq_length=8, moe_layer_freq=asked)
        )


def test_experts_of_swiglu_with_biases_train(drive: Drive) -> None:
    """Megatron-core has no fused kernel of them."""
    drive(argv(swiglu=True, num_experts=4, train_iters=1, save="out"))
    assert len(losses(Path("out"))) == 1


def test_another_architecture_needs_its_parts_alone(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 with norms of queries and keys: one other part, and the driver builds, counts and trains it."""
    from megatron_lowprec.training import loop

    def transformer_fields(config: Config) -> dict[str, Any]:
        return attention.transformer_fields(config) | {"qk_layernorm": True}

    def other_weights(config: Config, layer: int) -> int:
        assert config.kv_channels is not None
        return 4 * config.kv_channels  # a scale and a shift for queries, and for keys

    part: Any = SimpleNamespace(
        **{**vars(attention), "transformer_fields": transformer_fields, "other_weights": other_weights}
    )
    with_norms = replace(GPT2, name="gpt2 with norms", attention=part)
    monkeypatch.setattr(architectures, "ARCHITECTURES", (with_norms,))
    seen: list[Any] = []
    train = loop.train
    monkeypatch.setattr(loop, "train", lambda run: (seen.append(run), train(run))[1])
    drive(argv(save="out", no_save=True))
    (run,) = seen
    parameters = dict(run.trainer.chunks[0].named_parameters())
    assert any("q_layernorm" in name for name in parameters)
    assert sum(p.numel() for p in parameters.values()) == num_parameters(run.config, 256)
