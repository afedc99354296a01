"""GPT-2 and Llama in plain torch, from Hugging Face's own description of them: config.json and safetensors to logits.

Written for these tests, in fp32 and with nothing fused; it shares no code with the conversions. Other models run in
transformers itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """[batch, sequence, vocabulary] in fp32 of a model's folder."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] not in ("gpt2", "llama") or "rope_scaling" in config:
        return by_transformers(folder, ids)
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    return {"gpt2": gpt2, "llama": llama}[config["model_type"]](config, tensors, ids)


def by_transformers(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """As ``logits``, by the package that the files are written for."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        found: torch.Tensor = model.eval()(ids).logits
    return found


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of [batch, heads, sequence, channels]."""
    length = q.shape[2]
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


def merge(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


def gpt2(config: dict[str, Any], w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    eps = config["layer_norm_epsilon"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][: ids.shape[1]]
    for layer in range(config["n_layer"]):
        at = f"transformer.h.{layer}"
        q, k, v = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = (heads(part, config["n_head"]) for part in (q, k, v))
        x = x + linear(merge(attend(q, k, v)), f"{at}.attn.c_proj")
        wide = linear(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc")
        wide = 0.5 * wide * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)))
        x = x + linear(wide, f"{at}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ w.get("lm_head.weight", w["transformer.wte.weight"]).t()


def llama(config: dict[str, Any], w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    half = config["head_dim"] // 2
    rates = config["rope_theta"] ** -(torch.arange(half) / half)
    angles = torch.outer(torch.arange(ids.shape[1]).float(), rates)

    def turn(x: torch.Tensor) -> torch.Tensor:
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

    x = w["model.embed_tokens.weight"][ids]
    groups = config["num_key_value_heads"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        y = norm(x, f"{at}.input_layernorm")
        q = turn(heads(y @ w[f"{at}.self_attn.q_proj.weight"].t(), config["num_attention_heads"]))
        k = turn(heads(y @ w[f"{at}.self_attn.k_proj.weight"].t(), groups))
        v = heads(y @ w[f"{at}.self_attn.v_proj.weight"].t(), groups)
        each = config["num_attention_heads"] // groups
        attended = attend(q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1))
        x = x + merge(attended) @ w[f"{at}.self_attn.o_proj.weight"].t()
        y = norm(x, f"{at}.post_attention_layernorm")
        gate = y @ w[f"{at}.mlp.gate_proj.weight"].t()
        wide = gate * torch.sigmoid(gate) * (y @ w[f"{at}.mlp.up_proj.weight"].t())
        x = x + wide @ w[f"{at}.mlp.down_proj.weight"].t()
    return norm(x, "model.norm") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).t()
