"""When experts' GEMMs run by the grouped ops and when in a loop, and the reason for it."""

from __future__ import annotations

import pytest
import torch

from megatron_lowprec.linear.backends.emulated import grouped as grouped_emulated
from megatron_lowprec.linear.grouped_gemms import GroupedLinearGemms
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.registry import get_recipe
from tests.linear.grouped_experts import IN, OUT, ROUNDED, STEP, TETRAJET, TOKENS, UE5M3, grouped_ops, passes

GEMMS, BACKWARD = ("fprop", "dgrad", "wgrad"), ("dgrad", "wgrad")
OF_BLOCKS = grouped_emulated._KNOWN_BLOCKS


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_current", "fp8_rowwise", "fp8_blockwise"])
def test_emulated_fp8_takes_the_loop(name: str) -> None:
    with grouped_ops() as taken:
        passes(name, accumulates=True)
    assert not taken


def test_instrumented_experts_take_the_loop() -> None:
    from megatron_lowprec.mcore.debug.instrumented import InstrumentedGemms

    experts = [LinearGemms(get_recipe("mxfp8"), LinearId(3, "fc1", expert), 1, AmaxHistory) for expert in range(2)]
    group = GroupedLinearGemms([InstrumentedGemms(gemms) for gemms in experts])  # type: ignore[list-item]
    x, w = torch.zeros(8, IN).bfloat16(), torch.zeros(OUT, IN).bfloat16()
    with grouped_ops() as taken:
        group.forward(x, (3, 5), (w, w), RngStep(0, 0))
    assert not taken


def test_evaluation_is_grouped_where_all_experts_scale_alike() -> None:
    """An expert that no token has reached yet scales by its current amax, the others by their histories."""
    x, weights = torch.randn(sum(TOKENS), IN).bfloat16(), [torch.randn(OUT, IN).bfloat16() for _ in TOKENS]

    def evaluated(*current: frozenset[str]) -> torch.Tensor:
        experts = [LinearGemms(load_recipe(UE5M3), LinearId(3, "fc1", i), 1, AmaxHistory) for i in range(4)]
        group = GroupedLinearGemms([gemms.unrecorded(own) for gemms, own in zip(experts, current, strict=True)])
        y, _ = group.forward(x, TOKENS, weights, STEP, update_amax=False)
        assert not any(history.newest.any() for gemms in experts for history, _ in gemms.histories.values())
        return y

    none, of_input = frozenset[str](), frozenset(["input"])
    for current, grouped in ([of_input] * 4, True), ([none, of_input, none, none], False):
        want = evaluated(*current)
        with grouped_ops() as taken:
            y = evaluated(*current)
        assert bool(taken) == grouped
        assert (y - want).abs().max() <= ROUNDED[y.dtype] * want.abs().max()


@pytest.mark.parametrize(
    ("recipe", "out_features", "reasons"),
    [
        ("mxfp8", 256, {}),
        ("mxfp4", 48, dict.fromkeys(BACKWARD, "emulated: sizes are no multiples of 32")),
        ("fp8_current", 256, dict.fromkeys(GEMMS, f"emulated: {OF_BLOCKS}")),
        ("mxfp4_rht_sr", 256, {}),
        ("quartet2", 256, {}),
        ("quartet2", 192, dict.fromkeys(BACKWARD, "emulated: sizes are no multiples of 128")),
        (TETRAJET, 256, {}),
        (UE5M3, 256, {}),
        ("configs/recipes/tetrajet_v2_scales_only.yaml", 256, dict.fromkeys(GEMMS, f"emulated: {OF_BLOCKS}")),
    ],
)
def test_the_reason_for_a_loop(recipe: str, out_features: int, reasons: dict[str, str]) -> None:
    experts = [LinearGemms(load_recipe(recipe), LinearId(1, "fc1", expert), 1, AmaxHistory) for expert in range(2)]
    weight, group = torch.zeros(out_features, IN).bfloat16(), GroupedLinearGemms(experts)
    assert group.why_in_a_loop("fprop", weight) == "kernels need a GPU and Triton"
    with grouped_ops():
        found = {name: group.why_in_a_loop(name, weight) for name in ("fprop", "dgrad", "wgrad")}
    assert {name: reason for name, reason in found.items() if reason is not None} == reasons


def test_gemms_of_two_backends_run_in_a_loop() -> None:
    experts = [LinearGemms(get_recipe("fp8_rowwise_gw_hp"), LinearId(1, "fc1"), 1, AmaxHistory)]
    with grouped_ops("sm90"):
        reason = GroupedLinearGemms(experts).why_in_a_loop("wgrad", torch.zeros(OUT, IN).bfloat16())
    assert reason == "dgrad runs on hopper_fp8, wgrad on emulated"
