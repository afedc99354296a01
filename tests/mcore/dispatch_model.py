"""Layers with experts on two ranks: how they are built, routed and run, and the bytes that they send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_lowprec import get_recipe
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import QuantSpec

HIDDEN, FFN, SEQUENCE, BATCH, EXPERTS, TOPK = 256, 128, 12, 2, 4, 2
TOKENS = SEQUENCE * BATCH
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# experts of each token, by rank: all to the other rank's; of this rank one gets a single token, another none
UNEVEN = {0: [(2, 3)] * (TOKENS - 1) + [(1, 2)], 1: [(1, 3)] * (TOKENS - 5) + [(2, 3)] * 5}


def with_input(name: str, **fields: Any) -> Recipe:
    """A recipe with these fields of fc1's operands x."""
    recipe = get_recipe(name)
    gemms = {
        gemm: replace(found, input=replace(found.input, **fields))
        for gemm, found in recipe.gemms.items()
        if isinstance(found.input, QuantSpec)
    }
    return replace(recipe, name=f"{name}, other input", **gemms)


RECIPES = {
    "fp8_blockwise": get_recipe("fp8_blockwise"),
    "fp8_rowwise": get_recipe("fp8_rowwise"),
    "mxfp8": get_recipe("mxfp8"),
    "powers of two": with_input("fp8_blockwise", scale_rule="amax_pow2"),
    "mxfp4": with_input("mxfp8_ocp", format="e2m1", headroom=0.75),
    "mxfp6": with_input("mxfp8", format="e2m3"),
}


def config_of(**more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    options: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "num_attention_heads": 2,
        "expert_model_parallel_size": 2,
        "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": FFN,
        "moe_router_topk": TOPK,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**(options | more))


def build(recipe: Recipe, dispatch: bool, **more: Any) -> tuple[Any, Any]:
    """A block of layers with experts, and its runtime; the same weights on each call."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_block import TransformerBlock

    from megatron_lowprec.mcore.layers.gpt_spec import gpt_block_spec
    from megatron_lowprec.mcore.runtime import bind_recipe

    config = config_of(**more)
    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(6)
    block = TransformerBlock(config, gpt_block_spec(config)).to(DEVICE, config.params_dtype)
    block.train()
    layers = config.num_layers
    return block, bind_recipe([block], recipe, num_layers=layers, seed=1, fp8_dispatch=dispatch)


@contextmanager
def counted() -> Iterator[Counter[tuple[torch.dtype, int]]]:
    """Bytes that this rank gives to all-to-alls: (dtype, bytes a row) -> bytes."""
    sent: Counter[tuple[torch.dtype, int]] = Counter()
    plain = dist.all_to_all_single

    def all_to_all_single(output: torch.Tensor, input: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent[input.dtype, input[:1].nbytes if input.dim() > 1 else input.element_size()] += input.nbytes
        return plain(output, input, *args, **options)

    with patch.object(dist, "all_to_all_single", all_to_all_single):
        yield sent


def route_unevenly(block: Any) -> None:
    """Experts of ``UNEVEN`` instead of the router's, with its first probabilities."""

    def route(_: Any, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        best = output[0].topk(TOPK, dim=1).values
        chosen = torch.tensor(UNEVEN[dist.get_rank()], device=DEVICE)
        probs = torch.zeros_like(output[0]).scatter(1, chosen, best)
        return probs, torch.zeros_like(output[1]).scatter(1, chosen, True)

    for layer in block.layers:
        layer.mlp.router.register_forward_hook(route)


def steps(block: Any, runtime: Any, count: int = 1) -> dict[str, torch.Tensor]:
    """Outputs and all gradients of ``count`` steps of two microbatches; weights follow their gradients."""
    generator, found = torch.Generator().manual_seed(10 + dist.get_rank()), {}
    for step in range(count):
        runtime.begin_step(step)
        block.zero_grad()
        for microbatch in range(2):
            runtime.begin_microbatch(microbatch)
            x = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).bfloat16().to(DEVICE).requires_grad_()
            y = block(hidden_states=x, attention_mask=None)
            y.backward(torch.randn(y.shape, generator=generator).bfloat16().to(DEVICE))
            assert x.grad is not None
            found |= {f"y {step} {microbatch}": y.detach(), f"dx {step} {microbatch}": x.grad}
        runtime.end_step()
        with torch.no_grad():
            for name, weight in block.named_parameters():
                if weight.grad is not None:
                    found[f"{name} {step}"] = weight.grad.clone()
                    weight -= 0.01 * weight.grad
    return found
