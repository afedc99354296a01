"""Checks of ``worker.py``: linear layers under recipe bf16 are those of Megatron-core, and need a recipe."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lowprec import get_recipe
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from tests.mcore.parallel_layers import BATCH, FFN, HIDDEN, SEED, SEQUENCE, check, config_of, for_each, seeded


def build_linear(kind: str, ours: bool, config: Any, skip_bias_add: bool) -> torch.nn.Module:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from megatron_lowprec.mcore.layers.parallel_linear import LowPrecColumnParallelLinear, LowPrecRowParallelLinear

    model_parallel_cuda_manual_seed(5)
    options = {"config": config, "init_method": torch.nn.init.normal_, "bias": True, "skip_bias_add": skip_bias_add}
    if kind == "column":
        cls: type = LowPrecColumnParallelLinear if ours else ColumnParallelLinear
        return cls(HIDDEN, FFN, gather_output=False, **options)
    cls = LowPrecRowParallelLinear if ours else RowParallelLinear
    return cls(FFN, HIDDEN, input_is_parallel=True, **options)


def bind_alone(layer: Any, kind: str, recipe: str) -> None:
    """What bind_recipe does for a layer inside a transformer layer."""
    layer.linear_gemms = LinearGemms(
        get_recipe(recipe), LinearId(1, "alone", split="O" if kind == "column" else "I"), SEED, AmaxHistory
    )
    layer.accumulates_in_fp32 = False


@for_each(
    *(
        (kind, dtype, sp, skip)
        for kind in ("column", "row")
        for dtype in ("float32", "bfloat16")
        for sp in (False, True)
        for skip in (False, True)
    )
)
def stock(kind: str, dtype_name: str, sequence_parallel: bool, skip_bias_add: bool) -> None:
    """Outputs, input gradients, weight and bias gradients: the same bits."""
    dtype, rank = getattr(torch, dtype_name), dist.get_rank()
    config = config_of(dtype, sequence_parallel)
    tokens = SEQUENCE // 2 if sequence_parallel and kind == "column" else SEQUENCE
    features = HIDDEN if kind == "column" else FFN // 2
    # what ranks hold differs where it is cut
    seed = rank if sequence_parallel or kind == "row" else 0
    found = []
    for ours in (False, True):
        layer = build_linear(kind, ours, config, skip_bias_add)
        if ours:
            bind_alone(layer, kind, "bf16")
        x = seeded(tokens, BATCH, features, dtype=dtype, seed=seed).requires_grad_()
        y, bias = layer(x)
        assert (bias is not None) == skip_bias_add
        same_on_ranks = kind == "row" and not sequence_parallel
        y.backward(seeded(*y.shape, dtype=dtype, seed=17 + (0 if same_on_ranks else rank)))
        # with skip_bias_add the bias is the caller's to add, and has no gradient from here
        found.append((y.detach(), x.grad, layer.weight.detach(), layer.weight.grad, layer.bias.grad))
    for name, stocks, mine in zip(("y", "dx", "w", "dw", "db"), *found):
        assert (stocks is None) == (mine is None), name
        assert stocks is None or torch.equal(stocks, mine), name
    assert found[0][3].abs().max() > 0


@check()
def unbound_layers_say_so() -> None:
    layer = build_linear("column", True, config_of(), True)
    with pytest.raises(RuntimeError, match="bind_recipe"):
        layer(seeded(4, 1, HIDDEN))
