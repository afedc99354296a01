"""LoRA by peft over converted layers: both orders, frozen weights as codes, merging, and saved adapters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lowprec import UserError, convert
from megatron_lowprec.finetuning import FrozenLayer, dequantize_frozen_weights, quantize_frozen_weights
from megatron_lowprec.linear.convert import plan
from megatron_lowprec.linear.lowprec_linear import LowPrecLayer
from tests.linear.test_convert_transformers import build, train

peft = pytest.importorskip("peft", reason="the extra peft is not installed")

TARGETS = {"llama": ["q_proj", "v_proj", "lm_head"], "gpt2": ["c_attn"]}
kinds = pytest.mark.parametrize("kind", list(TARGETS))


def base(kind: str) -> Any:
    return build(kind).bfloat16()


def lora(model: Any, kind: str) -> Any:
    """Adapters in bf16, whose two factors are random."""
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=8, target_modules=TARGETS[kind], init_lora_weights=False, fan_in_fan_out=kind == "gpt2", bias="none"
    )
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False).train()


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


ORDERS: dict[str, Callable[[str, str], Any]] = {
    "convert, peft": lambda kind, recipe: lora(convert(base(kind), recipe), kind),
    "peft, convert": lambda kind, recipe: convert(lora(base(kind), kind), recipe),
    "convert, peft, codes": lambda kind, recipe: quantize_frozen_weights(lora(convert(base(kind), recipe), kind)),
    "peft, convert, codes": lambda kind, recipe: quantize_frozen_weights(convert(lora(base(kind), kind), recipe)),
    "convert, codes, peft": lambda kind, recipe: lora(
        quantize_frozen_weights(frozen(convert(base(kind), recipe))), kind
    ),
}


@kinds
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set:UserWarning")
@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4_all"])
def test_all_orders_have_the_same_losses(kind: str, recipe: str) -> None:
    """Bit for bit, also of draws, whose keys are the layers' paths before peft wraps them."""
    losses = {}
    for order, model_of in ORDERS.items():
        model = model_of(kind, recipe)
        layers = [module for module in model.modules() if isinstance(module, LowPrecLayer)]
        assert len(layers) == {"llama": 14, "gpt2": 8}[kind]
        assert all(isinstance(layer, FrozenLayer) == ("codes" in order) for layer in layers)
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.bfloat16}
        assert {type(m) for name, m in model.named_modules() if ".lora_" in name and hasattr(m, "weight")} == {
            nn.Linear
        }
        losses[order] = train(model, 3)
    assert len(set(map(tuple, losses.values()))) == 1, losses


def test_a_plan_names_adapters_and_the_wrapped_head() -> None:
    found = plan(lora(base("llama"), "llama"), "fp8_current", keep_bf16=["model.layers.0.self_attn.*"])
    reasons = {path.removeprefix("base_model.model."): why.reason for path, why in found.excluded.items()}
    assert reasons["lm_head.base_layer"] == "output head"
    assert reasons["model.layers.1.self_attn.q_proj.lora_A.default"] == "adapter"
    assert reasons["model.layers.0.self_attn.q_proj.base_layer"] == "by keep_bf16"  # the glob of the model without peft
    assert "base_model.model.model.layers.1.self_attn.q_proj.base_layer" in found.converted
    both = plan(lora(base("llama"), "llama"), "fp8_current", filter=lambda path, _: "lora_A.default" in path)
    assert all("lora_A" in path for path in both.converted)


@kinds
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set:UserWarning")
def test_codes_are_merged_after_they_are_dequantized(kind: str, safe: bool) -> None:
    """Refused before; then the merged weights are those of a model that had the values of the codes from the start."""
    model = quantize_frozen_weights(lora(convert(base(kind), "nvfp4_all"), kind))
    with pytest.raises(UserError, match=r"dequantize_frozen_weights\(model\) first"):
        model.merge_and_unload(safe_merge=safe)
    model = quantize_frozen_weights(lora(convert(base(kind), "nvfp4_all"), kind))
    other = lora(base(kind), kind)
    dequantize_frozen_weights(model)
    values = model.state_dict()
    other.load_state_dict({key: values[key] for key in other.state_dict()})
    merged = model.merge_and_unload(safe_merge=safe).state_dict()
    want = other.merge_and_unload(safe_merge=safe).state_dict()
    assert set(want) <= set(merged)
    assert all(torch.equal(merged[key], want[key]) for key in want)


def test_adapters_are_saved_and_loaded_over_codes(tmp_path: Path) -> None:
    model = quantize_frozen_weights(lora(convert(base("llama"), "fp8_current"), "llama"))
    train(model, 2)
    model.save_pretrained(tmp_path)
    assert {key for key, value in model.state_dict().items() if value.dtype == torch.uint8} != set()
    over = quantize_frozen_weights(frozen(convert(base("llama"), "fp8_current")))
    again = peft.PeftModel.from_pretrained(over, tmp_path, is_trainable=True, autocast_adapter_dtype=False)
    assert train(again.train(), 1) == train(model, 1)
