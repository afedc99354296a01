"""The converter for torchtitan: its models by torchtitan's own builder, beside ``convert`` of the same model."""

import importlib
import json
import pickle
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from megatron_lowprec import UserError, convert
from megatron_lowprec.finetuning import quantize_frozen_weights
from megatron_lowprec.linear.layer_histories import LayerGroup
from megatron_lowprec.linear.lowprec_linear import LowPrecLayer, LowPrecLinear

pytest.importorskip("torchtitan", reason="the extra torchtitan is not installed")

from torchtitan.components.lora import LoRAConverter
from torchtitan.config.manager import ConfigManager
from torchtitan.config.override import apply_overrides
from torchtitan.distributed.pipeline_parallel import _split_module
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

from megatron_lowprec.torchtitan import LowPrecConverter

LAYERS = 2


def spec_of(*converters: Any) -> Any:
    """Llama's debug model of two layers, with the attention that runs on a CPU, behind converters."""
    spec = model_registry("debugmodel")
    del spec.model.layers[LAYERS:]
    for _, _, parent, name in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    for converter in converters:
        spec.model = converter.build().convert(spec.model)
    return spec


def built(config: Any) -> Any:
    """As torchtitan's trainer builds a model: on meta, then its weights on the device."""
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    return model


def train(model: nn.Module, steps: int = 3) -> list[float]:
    tokens = torch.randint(2048, (2, 33), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(32).expand(2, -1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(steps):
        logits = model(tokens[:, :-1], positions)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def converted(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, LowPrecLayer)]


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "mxfp4_rht_sr"])
def test_losses_are_those_of_convert(recipe: str) -> None:
    """Bit for bit; the layers, their names in rules and keys of draws are the same."""
    model, want = built(spec_of(LowPrecConverter.Config(recipe=recipe)).model), convert(built(spec_of().model), recipe)
    assert converted(model) == converted(want)
    assert len(converted(model)) == 5 * LAYERS
    assert set(model.state_dict()) == set(want.state_dict())
    assert all(isinstance(layer, LowPrecLinear) for layer in model.layers["0"].feed_forward.children())
    losses = train(model)
    assert losses == train(want)
    assert losses != train(built(spec_of().model))


def test_the_override_of_the_command_line_converts_the_same_layers() -> None:
    """``--override.imports`` by torchtitan's own parser, applied as its trainer does before it builds the model."""
    options = '{"recipe": "fp8_current", "keep_bf16": ["layers.[1-5].*"]}'
    words = ["--module", "llama3", "--config", "llama3_debugmodel", "--override.imports"]
    config = ConfigManager().parse_args([*words, f"megatron_lowprec.torchtitan.lowprec={options}"])
    assert len(apply_overrides(config.override, config)) == 1
    with torch.device("meta"):
        model = config.model_spec.model.build()
    assert len(converted(model)) == 5
    assert {path.split(".")[1] for path in converted(model)} == {"0"}
    json.dumps(config.to_dict())  # the trainer logs it


@pytest.mark.parametrize(("family", "layers"), [("qwen3", 40), ("deepseek_v3", 42), ("gpt_oss", 4)])
def test_other_models_build_with_converted_layers(family: str, layers: int) -> None:
    """Attention, dense MLPs and shared experts; routers, the head and torchtitan's own kinds of linear layers stay."""
    model_registry = importlib.import_module(f"torchtitan.models.{family}").model_registry
    spec = model_registry("debugmodel", converters=[LowPrecConverter.Config(recipe="fp8_current")])
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    paths = converted(model)
    assert len(paths) == layers
    assert not [path for path in paths if "router" in path or path == "lm_head"]


def test_layers_without_a_configuration_are_named() -> None:
    """The vision encoder of this model builds linear layers from configurations of other names."""
    model_registry = importlib.import_module("torchtitan.models.kimi_k2_7").model_registry
    given = [LowPrecConverter.Config(recipe="fp8_current", keep_bf16=["vision_encoder.*"])]
    assert model_registry("debugmodel", converters=given).model is not None
    with pytest.raises(UserError, match=r"the model builds vision_encoder\.layers\.0\.attn\.wk, .*by keep_bf16"):
        model_registry("debugmodel", converters=[LowPrecConverter.Config(recipe="fp8_current")])


def test_lora_of_torchtitan_wraps_converted_layers() -> None:
    """The base layer follows the recipe and is frozen, both factors are torchtitan's in the compute dtype."""
    lora = LoRAConverter.Config(rank=4, target_modules=["w1", "wo"])
    model = built(spec_of(LowPrecConverter.Config(recipe="fp8_current"), lora).model)
    layer = model.layers["0"].feed_forward.w1
    assert isinstance(layer, LowPrecLayer)
    assert {name for name, p in layer.named_parameters() if p.requires_grad} == {"lora_a.weight", "lora_b.weight"}
    assert len(converted(model)) == 5 * LAYERS
    alone = LowPrecLinear(256, 768, bias=False, recipe="fp8_current")
    alone.load_state_dict({"weight": layer.weight})
    x = torch.randn(8, 256)
    assert torch.equal(layer(x), alone(x))  # the second factor is 0 at first
    codes = built(spec_of(LowPrecConverter.Config(recipe="fp8_current"), lora).model)
    losses = train(quantize_frozen_weights(codes))
    assert losses == train(model)
    assert losses != train(built(spec_of(lora).model))


@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp4_rht_sr"])
def test_state_is_refused_in_stages_of_a_pipeline(recipe: str) -> None:
    """By torchtitan's own split, before the collective of the first pass; the whole model passes."""
    x, several = torch.randn(8, 256), patch.object(LayerGroup, "_spans_ranks", True)
    model = built(spec_of(LowPrecConverter.Config(recipe=recipe)).model)
    stages = [_split_module(model, names) for names in (["tok_embeddings", "layers.0"], ["layers.1", "lm_head"])]
    for number, stage in enumerate(stages):
        layer = stage.layers[str(number)].feed_forward.w1
        with several, pytest.raises(UserError, match="found 5 of a model's 10 layers in this process"):
            layer(x)
        layer(x)  # in one process
    with several, patch.object(LayerGroup, "_reduce") as reduces:
        model.layers["0"].feed_forward.w1(x)
    assert reduces.called == (recipe == "fp8_delayed")


def test_models_pickle_and_nothing_to_convert_is_an_error() -> None:
    model = built(spec_of(LowPrecConverter.Config(recipe="fp8_delayed")).model)
    layer = model.layers["0"].feed_forward.w1
    assert pickle.loads(pickle.dumps(layer)).linear_gemms.recipe == layer.linear_gemms.recipe
    with pytest.raises(UserError, match=r"recipe fp8_current converts no layer: not converted: .*by keep_bf16"):
        spec_of(LowPrecConverter.Config(recipe="fp8_current", keep_bf16=["layers.*"]))
