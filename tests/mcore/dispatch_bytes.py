"""Checks of ``dispatch_worker.py``: what travels, and is saved, as codes, and what as bf16."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from megatron_lowprec import get_recipe
from megatron_lowprec.linear.backends.emulated.dense import EmulatedGemms
from megatron_lowprec.recipe.fp8_dispatch import dispatched_bytes
from megatron_lowprec.recipe.recipe import Recipe
from tests.mcore.dispatch_model import BATCH, FFN, HIDDEN, RECIPES, SEQUENCE, TOKENS, TOPK, build, counted, steps


def bytes_on_the_wire(name: str) -> None:
    """Rows of tokens, and of gradients for fc2, have the bytes of the formula; both are combined in bf16."""
    recipe = RECIPES[name]
    assert recipe.fprop.input is not None
    assert recipe.dgrad.grad_output is not None
    bf16 = 2 * HIDDEN
    width, back = (dispatched_bytes(spec, HIDDEN) for spec in (recipe.fprop.input, recipe.dgrad.grad_output))
    expected = {
        "fp8_blockwise": HIDDEN + 2 * 4,
        "fp8_rowwise": HIDDEN + 1,
        "mxfp8": HIDDEN + 8,
        "powers of two": HIDDEN + 2,
        "mxfp4": HIDDEN // 2 + 8,
        "mxfp6": HIDDEN + 8,
    }
    assert width == expected[name]
    assert max(width, back) <= 0.55 * bf16
    rows = 2 * TOKENS * TOPK  # of two microbatches
    for dispatch in (False, True):
        block, runtime = build(recipe, dispatch)
        got: list[int] = []  # tokens of the experts on this rank, in each microbatch
        experts = block.layers[0].mlp.experts
        experts.register_forward_pre_hook(lambda _, inputs, got=got: got.append(len(inputs[0])))
        with counted() as sent:
            steps(block, runtime)
        probabilities = {key: sent.pop(key) for key in list(sent) if key[1] <= 4}
        assert probabilities
        want: Counter[tuple[torch.dtype, int]] = Counter()
        for size in (width, back):
            want[(torch.uint8, size) if dispatch else (torch.bfloat16, bf16)] += rows * (size if dispatch else bf16)
        # what a rank gives to combine outputs and gradients of tokens is what it got
        want[torch.bfloat16, bf16] += sum(got) * 2 * bf16
        assert sent == want


def quantized_once(grouped: bool) -> None:
    """Operands of fc1's fprop and fc2's dgrad are quantized before tokens are copied, and not again."""
    calls: list[tuple[str, tuple[int, ...]]] = []
    plain = EmulatedGemms.quantize

    def quantizing(gemms: EmulatedGemms, tensor: str, matrix: Any, rng_step: Any, request: Any, *amax: Any) -> Any:
        if request.rowwise:
            calls.append((tensor, tuple(matrix.shape)))
        return plain(gemms, tensor, matrix, rng_step, request, *amax)

    block, runtime = build(RECIPES["fp8_blockwise"], True, moe_grouped_gemm=grouped)
    runtime.begin_step(0)
    with patch.object(EmulatedGemms, "quantize", quantizing):
        y = block(hidden_states=torch.randn(SEQUENCE, BATCH, HIDDEN).bfloat16(), attention_mask=None)
        y.backward(torch.randn(y.shape).bfloat16())
    inputs, gradients = ([shape for found, shape in calls if found == tensor] for tensor in ("input", "grad_output"))
    # linear_qkv and linear_proj, the tokens of this rank, and linear_fc2 of two experts
    assert [shape[1] for shape in inputs] == [HIDDEN, HIDDEN, HIDDEN, FFN, FFN]
    assert inputs[2] == (TOKENS, HIDDEN)
    # dy of the tokens of this rank, linear_fc1 of two experts, linear_proj and linear_qkv
    assert [shape[1] for shape in gradients] == [HIDDEN, 2 * FFN, 2 * FFN, HIDDEN, 3 * HIDDEN]
    assert gradients[0] == (TOKENS, HIDDEN)


def saved_codes() -> None:
    """The backward pass of fc1 saves codes and scales, not bf16."""
    saved: list[torch.Tensor] = []
    block, runtime = build(RECIPES["fp8_blockwise"], True, moe_grouped_gemm=True)
    runtime.begin_step(0)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN).bfloat16().requires_grad_()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(hidden_states=x, attention_mask=None)
    codes = [tensor for tensor in saved if tensor.dtype == torch.float8_e4m3fn]
    assert [tensor.shape[1] for tensor in codes] == [HIDDEN]


def inspected() -> None:
    """Tokens travel in bf16 while a step is searched for NaN: operands are then in memory."""
    from megatron_lowprec.mcore.debug.finite_check import FiniteCheck

    block, runtime = build(RECIPES["mxfp8"], True)
    with FiniteCheck([block]) as check, counted() as sent:
        steps(block, runtime)
    assert check.first is None
    assert not any(dtype == torch.uint8 for dtype, _ in sent)
    with counted() as sent:
        steps(block, runtime)
    assert any(dtype == torch.uint8 for dtype, _ in sent)


def header() -> None:
    """Layers and bytes; a layer that the recipe leaves in bf16 sends bf16."""
    recipe = replace(get_recipe("mxfp8"), keep_bf16=replace(get_recipe("mxfp8").keep_bf16, last_layers=1))
    block, runtime = build(recipe, True, num_layers=2)
    line = next(line for line in runtime.header() if "--moe-fp8-dispatch" in line)
    assert "to experts as codes in 1, gradients to linear_fc2 in 1 of 2 layers" in line
    assert "264 bytes a token and expert instead of 512" in line
    with counted() as sent:
        steps(block, runtime)
    assert sent[torch.uint8, 264] == 2 * 2 * TOKENS * TOPK * 264


def gradients_in_bf16(recipe: Recipe, **more: Any) -> None:
    """Gradients travel in bf16 where dgrad takes no such codes, or linear_fc2 has a bias; tokens travel as codes."""
    block, runtime = build(recipe, True, **more)
    line = next(line for line in runtime.header() if "--moe-fp8-dispatch" in line)
    assert "to experts as codes in 1, gradients to linear_fc2 in 0 of 1 layers" in line
    with counted() as sent:
        steps(block, runtime)
    assert sent[torch.uint8, 264] == 2 * TOKENS * TOPK * 264
