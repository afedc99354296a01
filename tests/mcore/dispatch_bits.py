"""Checks of ``dispatch_worker.py``: layers whose tokens travel as codes compute what those of a bf16 dispatch do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.quantization.quantizer import quantize
from tests.mcore.dispatch_model import (
    BATCH,
    DEVICE,
    EXPERTS,
    RECIPES,
    SEQUENCE,
    TOKENS,
    TOPK,
    build,
    config_of,
    counted,
    route_unevenly,
    steps,
)
from tests.mcore.recomputation import bounded_recomputation


def differing(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    assert got.keys() == want.keys()
    assert len(got) > 8
    for name, value in got.items():
        assert torch.isfinite(value).all(), name
    return [name for name in want if not torch.equal(got[name], want[name])]


@contextmanager
def wgrad_from_codes() -> Iterator[None]:
    """wgrad of experts takes x of fc1 and dy of fc2 as tensors that were rounded to the codes of fprop and dgrad."""
    plain = LinearGemms.wgrad

    def wgrad(gemms: LinearGemms, dy: Any, x: Any, *args: Any, **options: Any) -> torch.Tensor:
        if gemms.linear_id.name.endswith("mlp.experts.linear_fc2") and len(x):
            spec = gemms.recipe.dgrad.grad_output
            assert spec is not None
            assert dy.quantized is None
            dy = replace(dy, matrix=quantize(dy.matrix, spec).dequantize(dy.matrix.dtype))
        if gemms.linear_id.name.endswith("mlp.experts.linear_fc1") and len(x):
            spec = gemms.recipe.fprop.input
            assert spec is not None
            assert isinstance(x, torch.Tensor)
            x = quantize(x, spec).dequantize(x.dtype)
        return plain(gemms, dy, x, *args, **options)

    with patch.object(LinearGemms, "wgrad", wgrad):
        yield


def bits(name: str, grouped: bool, uneven: bool = False, **more: Any) -> None:
    """Output and gradients of x are those of a bf16 dispatch; experts' weight gradients are of dequantized codes."""
    found = []
    for dispatch in (False, True):
        block, runtime = build(RECIPES[name], dispatch, moe_grouped_gemm=grouped, **more)
        if uneven:
            route_unevenly(block)
        found.append(steps(block, runtime))
    differ = differing(found[1], found[0])
    weights = [weight for weight in found[0] if "local_experts" in weight]
    assert len(weights) == more.get("num_moe_experts", EXPERTS)  # two of each expert, half of them on a rank
    used = [weight for weight in weights if found[0][weight].any()]
    assert len(used) == len(weights) - 2 * (uneven and dist.get_rank() == 0)
    assert set(differ) <= set(used)
    spec = RECIPES[name].fprop.input
    assert spec is not None
    # with powers of two both roundings keep the same mantissa bits, but of subnormal codes
    assert differ or spec.power_of_two_scale
    if DEVICE == "cuda":  # native GEMMs save codes along tokens, not x
        return
    with wgrad_from_codes():
        block, runtime = build(RECIPES[name], False, moe_grouped_gemm=grouped, **more)
        if uneven:
            route_unevenly(block)
        assert not differing(found[1], steps(block, runtime))


def layers_in_sequence(**more: Any) -> None:
    """Two layers over two steps, recomputed or not: the bits of bf16 with fc1's weight gradient from the codes."""
    with bounded_recomputation():
        got = steps(*build(RECIPES["mxfp8"], True, num_layers=2, **more), count=2)
        with wgrad_from_codes():
            want = steps(*build(RECIPES["mxfp8"], False, num_layers=2, **more), count=2)
    assert not differing(got, want)


def under_spec() -> None:
    """A GPTModel from ``layer_spec`` sends codes, and has the losses of one that sends bf16."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_lowprec.mcore.layer_spec import layer_spec

    found = []
    tokens = torch.randint(64, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(dist.get_rank()))
    for dispatch in (False, True):
        torch.manual_seed(5)
        model_parallel_cuda_manual_seed(5)
        spec = layer_spec(RECIPES["mxfp8"], seed=1, fp8_dispatch=dispatch)
        model = GPTModel(config_of(), spec, vocab_size=64, max_sequence_length=SEQUENCE).bfloat16()
        with counted() as sent:
            loss = model(tokens, torch.arange(SEQUENCE).expand_as(tokens), None, labels=tokens)
            loss.mean().backward()
        found.append(loss.detach())
        assert sent[torch.uint8, 264] == (2 * TOKENS * TOPK * 264 if dispatch else 0)
    assert torch.equal(*found)


def losses() -> None:
    """Weight gradients of experts differ from those of a bf16 dispatch by less than the rounding of the format."""
    found = {}
    for name in ("fp8_blockwise", "powers of two", "mxfp8"):
        for dispatch in (False, True):
            block, runtime = build(RECIPES[name], dispatch)
            found[name, dispatch] = steps(block, runtime)
        want, got = (
            torch.cat([v.flatten().double() for k, v in found[name, on].items() if "local_experts" in k])
            for on in (False, True)
        )
        assert (got - want).norm() / want.norm() < 0.1, name
