"""A step's microbatches multiply with one quantized weight, which is made once."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lowprec import GemmSpec, QuantSpec, Recipe, get_recipe
from megatron_lowprec.linear import weight_cache
from megatron_lowprec.linear.backends.emulated.dense import EmulatedGemms
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.linear.weight_cache import QuantizedWeightCache
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8"])
def test_it_is_made_once_a_step_and_serves_passes_that_observe_nothing(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized: list[str] = []
    quantize = EmulatedGemms.quantize

    def counted(self: EmulatedGemms, tensor: str, *rest: Any, **options: Any) -> object:
        quantized.append(tensor)
        return quantize(self, tensor, *rest, **options)

    monkeypatch.setattr(EmulatedGemms, "quantize", counted)
    linear_gemms = LinearGemms(get_recipe(recipe), LinearId(1, "x"), 0, AmaxHistory, cache_weights=True)
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(128, 128, generator=generator) for _ in range(2))

    def passes(w: torch.Tensor) -> list[torch.Tensor]:
        # before the step's first pass with gradients nothing is kept; behind it everything is
        calls = [(0, False), (0, True), (1, False), (1, True)]
        return [linear_gemms.fprop(x, w, RngStep(0, microbatch), update_amax) for microbatch, update_amax in calls]

    found = passes(w)
    assert quantized.count("weight") == 2
    assert all(torch.equal(y, found[0]) for y in found)
    linear_gemms.weight_cache.clear()
    assert not torch.equal(passes(2 * w.roll(1))[2], found[2])


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_blockwise", "mxfp8"])
def test_no_copy_stays_beside_a_weight_to_save_memory(recipe: str) -> None:
    layer = LinearId(1, "x")
    saving, caching = (
        LinearGemms(get_recipe(recipe), layer, 0, AmaxHistory, cache_weights=True, save_memory=saves)
        for saves in (True, False)
    )
    x, w = torch.randn(2, 128, 128).bfloat16()
    for linear_gemms in (saving, caching):
        linear_gemms.forward(x, w, RngStep(0, 0), save_input=True)
        linear_gemms.dgrad(x, w, RngStep(0, 0))
    assert len(caching.weight_cache.tensors()) == 2
    assert saving.weight_cache.tensors() == []


def test_weights_cached_before_a_capture_are_not_used_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, weight = QuantizedWeightCache(["fprop"]), QuantizedTensor(torch.Size((1, 1)), torch.float32, None)
    cache.put("fprop", "emulated", weight)
    assert cache.get("fprop", "emulated") is weight
    assert cache.get("fprop", "hopper_fp8") is None
    # an expert without tokens falls back: one of both forms stays in memory
    cache.put("fprop", "hopper_fp8", QuantizedTensor(torch.Size((1, 1)), torch.float32, None))
    assert len(cache.tensors()) == 1
    cache.put("fprop", "emulated", weight)
    assert not cache.holds("dgrad")
    monkeypatch.setattr(weight_cache, "capturing", lambda: True)
    assert not cache.holds("fprop")
    assert cache.get("fprop", "emulated") is None
    cache.under_capture = True
    assert cache.get("fprop", "emulated") is weight
    cache.clear()
    assert cache.get("fprop", "emulated") is None
    assert cache.tensors() == []


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_a_weight_of_fprop_s_is_kept_only_if_fprop_s_is(rounding: Any) -> None:
    spec = QuantSpec("e2m1", "1x32", "e8m0", "floor")
    fprop = GemmSpec(input=spec, weight=replace(spec, rounding=rounding))
    recipe = Recipe("again", "", fprop=fprop, dgrad=GemmSpec(grad_output=spec, weight=replace(spec, source="fprop")))
    cache = LinearGemms(recipe, LinearId(1, "x"), 0, AmaxHistory, cache_weights=True).weight_cache
    assert [cache.holds(gemm) for gemm in ("fprop", "dgrad")] == [rounding == "nearest_even"] * 2
