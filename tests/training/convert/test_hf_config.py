"""config.json to options: transformers' defaults for what it lacks, and an error for what no option represents."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_model
from megatron_lowprec.training.convert.hf_config import READ, defaults_taken, from_hf_config, vocabulary_of
from megatron_lowprec.training.convert.hf_weights import from_hf_weights, is_bf16, to_hf_weights
from tests.refusal import refused

NOT_TRANSFORMERS = {
    "num_nextn_predict_layers": "a file that lacks it has no such layers, or their tensors are refused",
    "num_key_value_heads of deepseek_v3": "transformers' 128 is for its own 128 heads",
}


@pytest.mark.parametrize("kind", READ)
def test_missing_keys_have_transformers_defaults(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    form, config = READ[kind], transformers.AutoConfig.for_model(kind)
    variants = {key: allowed[0] for key, allowed in form.variants.items() if hasattr(config, key)}
    for key, value in {**variants, **form.defaults}.items():
        if not {key, f"{key} of {kind}"} & NOT_TRANSFORMERS.keys():
            about = config.to_dict() | (
                {} if kind != "qwen2" else {"head_dim": None}
            )  # it takes one, without a default
            theirs = config.rope_parameters[key] if key == "rope_theta" else about[key]
            # transformers itself fills in the width of a head
            assert theirs == value or (key in ("head_dim", "num_key_value_heads") and value is None), key
    assert type(config).attribute_map == form.aliases


@pytest.mark.parametrize("kind", READ)
def test_a_config_of_nothing_but_its_type_is_that_of_transformers(kind: str) -> None:
    """Every key that is read has a default: none is a KeyError."""
    form = READ[kind]
    needed: dict[str, Any] = {"model_type": kind}
    assert from_hf_config(needed) == from_hf_config(needed | {k: v for k, v in form.defaults.items() if v is not None})
    assert vocabulary_of(needed) == form.defaults["vocab_size"]
    resolve_model(Config(**from_hf_config(needed)))
    taken = defaults_taken(needed | {"initializer_range": 0.1})
    assert taken == {k: v for k, v in form.defaults.items() if v is not None and k != "initializer_range"}


def test_a_window_is_the_longest_sequence_that_does_not_see_it() -> None:
    """Mistral 7B v0.1 attends to 4096 tokens: up to that length to all of them."""
    about = {"model_type": "mistral", "max_position_embeddings": 32768}
    assert [from_hf_config(about)[name] for name in ("seq_length", "max_position_embeddings")] == [4096, 4096]
    assert from_hf_config(about | {"sliding_window": None})["seq_length"] == 32768
    assert from_hf_config(about | {"sliding_window": 10**6})["seq_length"] == 32768
    assert from_hf_config({"model_type": "qwen2", "sliding_window": 4096})["seq_length"] == 32768  # not in use


def test_second_names_of_keys_are_read() -> None:
    """transformers sets n_head by num_attention_heads, so a default in its place would be another model."""
    named = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 3, "max_position_embeddings": 32}
    found = from_hf_config({"model_type": "gpt2", **named})
    assert {key: found[key] for key in named if key != "num_hidden_layers"} | {"num_hidden_layers": 3} == named
    assert defaults_taken({"model_type": "gpt2", **named}).keys().isdisjoint({"n_embd", "n_head", "n_layer"})
    assert from_hf_config({"model_type": "mixtral", "num_experts": 4})["num_experts"] == 4


LENGTH = "original_max_position_embeddings"
MIXTRAL_JSON: dict[str, Any] = {"model_type": "mixtral", "num_attention_heads": 16}


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": {"rope_type": "default"}}], ids=["flat", "nested"])
def test_what_a_mixtral_leaves_out_has_mixtral_s_defaults(rope: dict[str, Any]) -> None:
    """Llama's are rope_theta 10000, rms_norm_eps 1e-6 and a key for each query."""
    options = from_hf_config({**MIXTRAL_JSON, **rope})
    found = {name: options[name] for name in ("rotary_base", "norm_epsilon", "num_query_groups")}
    assert found == {"rotary_base": 1_000_000, "norm_epsilon": 1e-5, "num_query_groups": 8}
    given = from_hf_config({**MIXTRAL_JSON, "rope_theta": 500.0, "num_key_value_heads": None})
    assert (given["rotary_base"], given["num_query_groups"]) == (500, 16)


def test_a_latent_of_queries_is_absent_only_by_null() -> None:
    """transformers' own default is 1536, and its routing by groups 8, 4 and 2.5."""
    found = from_hf_config({"model_type": "deepseek_v3"})
    router = ("q_lora_rank", "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor")
    assert [found[name] for name in router] == [1536, 8, 4, 2.5]
    assert from_hf_config({"model_type": "deepseek_v3", "q_lora_rank": None})["q_lora_rank"] is None


@pytest.mark.parametrize("kind", ["llama", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize(
    ("rope", "base"),
    [
        ({"rope_theta": 500}, 500),
        ({"rope_theta": 500.0, "rope_scaling": {"rope_type": "default"}}, 500),
        ({"rope_theta": 500.0, "rope_scaling": {"type": "default"}}, 500),
        ({"rope_theta": 500.0, "rope_scaling": None, "partial_rotary_factor": 1.0}, 500),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_theta": 7}, 500),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 500.0}, "rope_parameters": {"rope_theta": 7}}, 500),
    ],
)
def test_the_plain_rope_is_read_in_every_spelling(kind: str, rope: dict[str, Any], base: int) -> None:
    assert from_hf_config({"model_type": kind, **rope})["rotary_base"] == base


LLAMA3 = {"rope_type": "llama3", "factor": 4.0}


@pytest.mark.parametrize(
    ("beside", "inside", "found"),
    [({}, {}, 2048), ({}, {LENGTH: 512}, 512), ({LENGTH: 256}, {LENGTH: 512}, 256), ({LENGTH: 256}, {}, 256)],
)
def test_the_length_before_a_scaling_is_transformers_own(
    beside: dict[str, Any], inside: dict[str, Any], found: int
) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 0.0, **inside}
    about = {"model_type": "llama", "max_position_embeddings": 2048, **beside}
    assert from_hf_config({**about, "rope_scaling": yarn})["yarn_original_max_position_embeddings"] == found
    with refused(f"rope of type 'llama3' with {LENGTH} {found}; Megatron-core's has 8192"):
        from_hf_config({**about, "rope_scaling": {**LLAMA3, **inside}})
    assert from_hf_config({**about, "rope_scaling": LLAMA3, LENGTH: 8192})["rope_scaling_factor"] == 4


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"model_type": "opt"}, "is of a 'opt' model"),
        ({"rope_theta": 100.5}, "rope_theta 100.5; --rotary-base is a whole number"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope of type 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "has factor None in its rope; it must be a positive number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "attention_factor": 1.3}}, "attention_factor 1.3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale_all_dim": 1}}, "mscale_all_dim 1"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 2}},
            "low_freq_factor 2; Megatron-core",
        ),
        (
            {"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn", "factor": 4}},
            "rope of type 'yarn'; this model",
        ),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window True"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias True"),
        ({"rope_scaling": [2.0]}, r"rope options [2.0]"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope options {'full_attention'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"attention_bias": True}, "attention_bias True, which these layers do not have: it must be False"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config (fp8)"),
        ({"hidden_size": "768"}, "hidden_size '768'; it must be a whole number"),
        ({"hidden_size": None}, "hidden_size None; it must be a whole number"),
        ({"num_attention_heads": True}, "num_attention_heads True; it must be a whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers -1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan; it must be a finite number"),
        ({"rope_theta": 10**400}, "it must be a finite number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings 1; it must be true or false"),
        ({"model_type": "gpt2", "resid_pdrop": 0.2, "embd_pdrop": 0.0}, "embd_pdrop 0.0 and resid_pdrop 0.2"),
        ({"model_type": "gpt2", "resid_pdrop": 0.2}, "embd_pdrop 0.1 and resid_pdrop 0.2"),
        ({"model_type": "mixtral", "sliding_window": 4096}, "sliding_window 4096"),
        ({"model_type": "mixtral", "num_experts_per_tok": 1}, "num_experts_per_tok 1"),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}, "num_nextn_predict_layers 1"),
        ({"model_type": "deepseek_v3", "num_mtp_layers": 1}, "num_nextn_predict_layers 1"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 8}, "num_key_value_heads 8"),
    ],
)
def test_fields_without_an_option_are_refused(about: dict[str, Any], words: str) -> None:
    with refused(words):
        from_hf_config({"model_type": "llama", **about})


# ---- weights
def tiny(**changes: Any) -> Config:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4}
    return resolve_model(Config(**{**sizes, "untie_embeddings_and_output_weights": False, **changes}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"transformer.wte.weight": torch.ones(6, 8)}, "wte.weight has 6 rows, and config.json has vocab_size 5"),
        ({"transformer.wte.weight": torch.ones(4, 8)}, "wte.weight has 4 rows, and config.json has vocab_size 5"),
        ({"lm_head.weight": torch.zeros(5, 8)}, "lm_head.weight is not transformer.wte.weight"),
        ({"transformer.ln_f.bias": torch.full((8,), torch.nan)}, "ln_f.bias has 8 NaN or Inf among 8 values"),
        ({"ln_f.bias": torch.tensor([0.0, torch.inf])}, "transformer.ln_f.bias has 1 NaN or Inf among 2 values"),
        (
            {"transformer.ln_f.bias": torch.ones(8).to(torch.float8_e4m3fn)},
            "ln_f.bias is float8_e4m3fn; weights must be values",
        ),
        ({"transformer.ln_f.bias": torch.ones(8, dtype=torch.int8)}, "ln_f.bias is int8"),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused(change: dict[str, torch.Tensor], words: str) -> None:
    tensors = {"transformer.wte.weight": torch.ones(5, 8), **change}
    with refused(words):
        from_hf_weights(tiny(), tensors, 5, 5)


def weights_of_tiny() -> dict[str, torch.Tensor]:
    hf = {"transformer.wte.weight": torch.ones(5, 8), "transformer.wpe.weight": torch.ones(4, 8)}
    for norm in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        hf |= {f"transformer.{norm}.{part}": torch.ones(8) for part in ("weight", "bias")}
    for name, width, out in (("attn.c_attn", 8, 24), ("attn.c_proj", 8, 8), ("mlp.c_fc", 8, 32), ("mlp.c_proj", 32, 8)):
        hf |= {
            f"transformer.h.0.{name}.weight": torch.ones(width, out),
            f"transformer.h.0.{name}.bias": torch.ones(out),
        }
    return hf


def test_weights_of_other_heads_are_refused() -> None:
    name = "transformer.h.0.attn.c_attn.weight"
    with refused(f"{name} has shape (8, 25), which config.json's heads and sizes do not give"):
        from_hf_weights(tiny(), weights_of_tiny() | {name: torch.ones(8, 25)}, 5, 5)


def test_values_beyond_the_written_dtype_are_refused() -> None:
    """Half precision ends at 65504."""
    config, hf = tiny(), weights_of_tiny()
    weights = from_hf_weights(config, hf, 5, 5)
    assert all(torch.equal(t, hf[name].half()) for name, t in to_hf_weights(config, weights, 5, torch.float16).items())
    weights["decoder.final_layernorm.bias"][3] = 70000
    with pytest.raises(UserError, match=r"in float16: transformer\.ln_f\.bias has 1 NaN or Inf among 8 values"):
        to_hf_weights(config, weights, 5, torch.float16)


def test_a_balancing_bias_in_fp32_leaves_the_model_bf16() -> None:
    options = from_hf_config({"model_type": "deepseek_v3", "num_hidden_layers": 4})
    bias, weight = "model.layers.3.mlp.gate.e_score_correction_bias", "model.layers.3.mlp.gate.weight"
    config = resolve_model(Config(**options))
    assert is_bf16(config, {bias: torch.ones(2), weight: torch.ones(2, dtype=torch.bfloat16)})
    assert not is_bf16(config, {bias: torch.ones(2), weight: torch.ones(2)})
