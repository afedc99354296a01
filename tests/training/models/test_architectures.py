"""Which architecture options select, and what another one has to provide."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models import architectures
from megatron_lowprec.training.models.architectures import architecture_of, model_options
from megatron_lowprec.training.models.common import attention
from megatron_lowprec.training.models.gpt2.architecture import GPT2
from megatron_lowprec.training.models.sizes import has_experts, num_parameters
from tests.training.conftest import Drive
from tests.training.convert.models import LLAMA as LLAMA_OPTIONS
from tests.training.helpers import argv

LLAMA = {name: value for name, value in LLAMA_OPTIONS.items() if name in Config.__dataclass_fields__}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "gpt2"),
        ({"swiglu": True}, "gpt2"),
        (LLAMA, "llama"),
        ({**LLAMA, "num_experts": 4}, "moe"),
        ({"num_experts": 4}, "moe"),
    ],
)
def test_options_select_an_architecture(options: dict[str, Any], name: str) -> None:
    config = Config(**options)
    assert architecture_of(config).name == name
    assert has_experts(config) == (name == "moe") == ("moe_router_topk" in model_options(config))
    assert "attention_backend" not in model_options(config)


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
