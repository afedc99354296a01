"""GEMMs of experts by the grouped ops are those of the loop, and no more of them run than are needed."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch

from megatron_lowprec.linear.grouped_gemms import GroupedLinearGemms
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.registry import get_recipe
from tests.linear.grouped_experts import IN, OUT, ROUNDED, STEP, TETRAJET, TOKENS, UE5M3, grouped_ops, passes


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("bf16", 3),
        ("mxfp8", 3),
        ("mxfp4_sr", 3),
        ("mxfp4_rht_sr", 3),
        ("fp8_mxfp4_rht_sr", 2),
        ("nvfp4_here", 3),
        ("quartet2", 3),
        (TETRAJET, 3),
        (UE5M3, 3),
        (f"{UE5M3} dgrad.grad_output.scaling=current dgrad.grad_output.history_rule=max", 3),
    ],
)
def test_grouped_ops_compute_what_the_loop_does(name: str, products: int, accumulates: bool) -> None:
    want = passes(name, accumulates)
    with grouped_ops() as taken:
        got = passes(name, accumulates)
    assert taken.count("grouped_gemm") == 2 * products
    assert ("grouped_quantize" in taken) == (name != "bf16")
    for what, value in want.items():
        assert got[what].dtype == value.dtype
        bound = ROUNDED[value.dtype] * value.abs().max()
        assert (got[what] - value).abs().max() <= bound, what


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("name", ["fp8_blockwise", "fp8_current", "fp8_delayed"])
def test_grouped_fp8_gemms_compute_what_the_loop_does(name: str, accumulates: bool, saves: bool) -> None:
    want = passes(name, accumulates)
    with grouped_ops("sm90") as taken:
        got = passes(name, accumulates, saves)
    # of two microbatches x and dy, x again if it was not saved, and both directions of the weights once
    assert taken.count("grouped_cast_fp8") == 2 * (3 - saves) + 2
    for what, value in want.items():
        assert got[what].dtype == value.dtype
        bound = ROUNDED[value.dtype] * value.abs().max()
        assert (got[what] - value).abs().max() <= bound, what


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize("name", ["fp8_blockwise", "fp8_current", "fp8_delayed"])
def test_grouped_gemms_take_the_codes_of_fp8_primary_weights(name: str, accumulates: bool) -> None:
    want = passes(name, accumulates, primary=True)
    with grouped_ops("sm90") as taken:
        got = passes(name, accumulates, primary=True)
        assert taken.count("grouped_cast_fp8") == 2 * 2  # x and dy of two microbatches, and no weight
        from_bf16 = passes(name, accumulates)
    for what, value in want.items():
        assert got[what].dtype == value.dtype
        bound = ROUNDED[value.dtype] * value.abs().max()
        assert (got[what] - value).abs().max() <= bound, what
        # bf16 holds these main weights; a delayed scale begins with 1, which the weights do not know
        assert name == "fp8_delayed" or torch.equal(got[what], from_bf16[what]), what


@pytest.mark.parametrize(("saves", "save_memory"), [(True, False), (False, False), (False, True)])
def test_grouped_row_wise_gemms_compute_what_the_loop_does(saves: bool, save_memory: bool) -> None:
    want = passes("fp8_rowwise", accumulates=True)
    with grouped_ops("sm90") as taken:
        got = passes("fp8_rowwise", accumulates=True, saves=saves, save_memory=save_memory)
    # rows of x and dy in two microbatches and of the weights, once unless memory is saved; and their columns
    casts = 2 * 2 + (2 if save_memory else 1)
    assert (taken.count("cast_fp8"), taken.count("grouped_cast_fp8")) == (casts, casts)
    for what, value in want.items():
        assert (got[what] - value).abs().max() <= ROUNDED[value.dtype] * value.abs().max(), what


def test_an_fp8_forward_pass_and_an_mx_backward_pass_are_both_grouped() -> None:
    want = passes("fp8_mxfp4_rht_sr", accumulates=True)
    with grouped_ops("sm90") as taken:
        got = passes("fp8_mxfp4_rht_sr", accumulates=True)
    assert (taken.count("grouped_cast_fp8"), taken.count("grouped_fp8_gemm")) == (2 + 1, 2)
    assert taken.count("grouped_gemm") == 2 * 2
    for what, value in want.items():
        assert (got[what] - value).abs().max() <= ROUNDED[value.dtype] * value.abs().max(), what


def test_the_weights_of_a_step_are_quantized_once() -> None:
    with grouped_ops() as taken:
        passes("mxfp8", accumulates=True)
    # in each microbatch x for fprop, dy and x for the others; in the first both directions of the weights
    assert taken.count("grouped_quantize") == 2 * 4 + 2


@pytest.mark.parametrize("needed", ["dgrad", "wgrad"])
@pytest.mark.parametrize(
    ("name", "arch"), [("mxfp8", "cpu"), ("fp8_blockwise", "sm90"), ("fp8_current", "sm90"), ("fp8_delayed", "sm90")]
)
def test_a_gemm_that_is_not_needed_does_not_run(name: str, arch: str, needed: str) -> None:
    """That of frozen experts, or of inputs without gradients; the other gradient keeps its bits."""
    generator = torch.Generator().manual_seed(4)
    x, dy = (torch.randn(sum(TOKENS), size, generator=generator).bfloat16() for size in (IN, OUT))
    weights = [torch.randn(OUT, IN, generator=generator).bfloat16() for _ in TOKENS]
    found, products = [], []
    for gemms in (("dgrad", "wgrad"), (needed,)):
        experts = [LinearGemms(get_recipe(name), LinearId(3, "fc1", expert), 1, AmaxHistory) for expert in range(4)]
        group = GroupedLinearGemms(experts)
        with grouped_ops(arch) as taken:
            _, saved = group.forward(x, TOKENS, weights, RngStep(0, 0), save_input="wgrad" in gemms)
            saved = saved if "wgrad" in gemms else saved.without_input()
            taken.clear()
            found.append(group.backward(dy, TOKENS, saved, RngStep(0, 0), [None] * 4, gemms=gemms))
            products.append(sum(op.endswith("gemm") for op in taken))
    (dx, dw), (only_dx, only_dw) = found
    assert products[1] < products[0]
    if needed == "dgrad":
        assert only_dw == [None] * 4
        assert torch.equal(only_dx, dx)
    else:
        assert only_dx is None
        assert all(map(torch.equal, only_dw, dw))


@pytest.mark.parametrize(("name", "most"), [("fp8_current", 900), ("mxfp8", 780), ("bf16", 440)])
def test_calls_of_a_layer_do_not_grow_with_its_experts(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that forward and backward pass call, of Python and of C: the GPU waits for them."""
    pytest.importorskip("triton", reason="triton is not installed")
    from megatron_lowprec.kernels.launch import Specialized

    monkeypatch.setattr(Specialized, "launch", lambda *_: None)
    found: list[int] = []
    for number in (4, 64):
        calls: list[str] = []

        def count(frame: FrameType, event: str, _: Any, calls: list[str] = calls) -> None:
            if event in ("call", "c_call") and "megatron_lowprec/" in frame.f_code.co_filename:
                calls.append(frame.f_code.co_name)

        group = GroupedLinearGemms([LinearGemms(load_recipe(name), LinearId(0, "fc1"), 0, AmaxHistory)] * number)
        weight = torch.zeros(number, OUT, IN).bfloat16()
        for step in range(3):
            tokens = [i % 5 + step for i in range(number)]
            x, dy = (torch.zeros(sum(tokens), size).bfloat16() for size in (IN, OUT))
            with grouped_ops("sm90", "triton"):
                sys.setprofile(count if step == 2 else None)
                _, saved = group.forward(x, tokens, weight, STEP, save_input=True)
                group.backward(dy, tokens, saved, STEP, [None] * number, out=torch.empty_like(weight))
                sys.setprofile(None)
        found.append(len(calls))
    assert 200 < found[0] == found[1] <= most, found
