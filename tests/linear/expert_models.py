"""Small models of Hugging Face transformers with experts, and their training; skips tests where it is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lowprec import convert

transformers = pytest.importorskip("transformers")  # the extra dev has it

VOCABULARY, HIDDEN, FFN, EXPERTS, TOP_K = 32, 64, 64, 4, 2
BOTH = "fp8_mxfp4_rht_sr"  # delayed scales and random draws
KINDS: dict[str, tuple[str, dict[str, int]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS, "intermediate_size": FFN}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": EXPERTS, "moe_intermediate_size": FFN}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": FFN,
            "intermediate_size": FFN,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 64,
            "q_lora_rank": 64,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
    ),
}


def build(kind: str = "mixtral", **options: Any) -> Any:
    """A model of one layer with random weights of seed 0."""
    name, sizes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts_per_tok=TOP_K,
        **sizes,
        **options,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


def experts_of(model: Any) -> Any:
    return model.model.layers[0].mlp.experts


def tokens_of(seed: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(seed))


def only_experts(model: Any, recipe: str = BOTH) -> Any:
    """The model with no other converted layers, which take time."""
    return convert(model, recipe, filter=lambda path, _: ".experts." in path)


def train(model: Any, steps: int, microbatches: int = 1) -> list[float]:
    """Losses of steps on the same batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for _ in range(steps):
        for microbatch in range(microbatches):
            tokens = tokens_of(microbatch)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
