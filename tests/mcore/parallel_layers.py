"""Layers cut over two ranks: how they are built and run, and ``CHECKS``, where the checks of ``worker.py`` register."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

SEED = 99
SEQUENCE, BATCH, HIDDEN, FFN, HEADS = 64, 2, 256, 512, 4  # per rank, all sizes are multiples of 128 but the heads
CHECKS: dict[str, Callable[[], None]] = {}


def check(*arguments: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(function: Callable[..., None]) -> Callable[..., None]:
        name = "-".join([function.__name__, *map(str, arguments)])
        CHECKS[name] = lambda: function(*arguments)
        return function

    return register


def for_each(*cases: tuple[Any, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(function: Callable[..., None]) -> Callable[..., None]:
        for case in cases:
            check(*case)(function)
        return function

    return register


def config_of(dtype: torch.dtype = torch.float32, sequence_parallel: bool = False, **more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        **more,
    )


def whole(shard: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(shard) for _ in range(2)]
    dist.all_gather(parts, shard.contiguous())
    return torch.cat(parts, dim)


def seeded(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def block_of(recipe: Any, config: Any, seed: int = SEED, **options: Any) -> tuple[Any, Any]:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_block import TransformerBlock

    from megatron_lowprec.mcore.layers.gpt_spec import gpt_block_spec
    from megatron_lowprec.mcore.runtime import bind_recipe

    model_parallel_cuda_manual_seed(6)
    block = TransformerBlock(config, gpt_block_spec(config)).to(config.params_dtype)
    block.train()
    return block, bind_recipe([block], recipe, num_layers=2, seed=seed, **options)


def run_block(block: Any, config: Any, seed: int = 0) -> torch.Tensor:
    """Output of one microbatch; every rank holds the same tokens, or its half under sequence parallelism."""
    x = seeded(SEQUENCE, BATCH, HIDDEN, dtype=config.params_dtype, seed=seed)
    if config.sequence_parallel:
        x = x.chunk(2)[dist.get_rank()]
    return block(hidden_states=x.requires_grad_(), attention_mask=None)


def back(y: torch.Tensor, config: Any, seed: int = 1) -> None:
    dy = seeded(SEQUENCE, BATCH, HIDDEN, dtype=config.params_dtype, seed=seed)
    y.backward(dy.chunk(2)[dist.get_rank()] if config.sequence_parallel else dy)
