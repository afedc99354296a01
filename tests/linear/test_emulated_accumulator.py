"""Hopper's accumulator in the emulated GEMMs that ask for fast accumulation; the others keep their bits."""

from dataclasses import replace

import pytest
import torch

from megatron_lowprec import get_recipe
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.gemm.fp8_accumulator import fp8_product
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.quantizer import quantize
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.recipe import Recipe


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.rand(shape, generator=generator) for shape in ((8, 512), (16, 512), (8, 16)))  # type: ignore[return-value]


def products(recipe: Recipe, emulate_accumulator: bool) -> list[torch.Tensor]:
    """y, dx and dw of one layer."""
    gemms = LinearGemms(recipe, LinearId(1, "x"), 0, AmaxHistory, emulate_accumulator=emulate_accumulator)
    x, w, dy = operands()
    step = RngStep(0, 0)
    return [gemms.fprop(x, w, step), gemms.dgrad(dy, w, step), gemms.wgrad(dy, x, step)]


@pytest.mark.parametrize("name", ["fp8_current", "fp8_rowwise"])
def test_fprop_alone_is_summed_as_on_hopper(name: str) -> None:
    recipe, (x, w, _) = get_recipe(name), operands()
    plain, emulated = (products(recipe, each) for each in (False, True))
    quantized = [quantize(matrix, recipe.fprop.input) for matrix in (x, w)]  # type: ignore[arg-type]
    elements = (each.elements for each in quantized)
    sums = fp8_product(*elements, FORMATS["e4m3"], FORMATS["e4m3"])
    scales = [each.decode_scale for each in quantized]
    assert torch.equal(emulated[0], sums * scales[0] * scales[1].t())
    assert not torch.equal(emulated[0], plain[0])
    # 16 groups of positive terms, each cut by less than a unit of 2^-13 of the sum's power of two
    assert bool(((emulated[0] - plain[0]).abs() <= 16 * 34 * 2.0**-13 * plain[0]).all())
    for ours, theirs in zip(emulated[1:], plain[1:]):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rule", ["amax", "amax_pow2"])
def test_fp8_weights_are_summed_as_others(rule: str) -> None:
    """Scales that are powers of two stay apart from the codes, which the sums take."""
    recipe = load_recipe("fp8_current", [f"{name}.weight.scale_rule={rule}" for name in ("fprop", "dgrad")])
    gemms = LinearGemms(recipe, LinearId(1, "x"), 0, AmaxHistory, emulate_accumulator=True)
    x, w, _ = operands()
    w[:, :480] *= 2.0**-16  # groups of subnormal codes, whose exponent is the format's least
    spec = recipe.fprop.weight
    assert spec is not None
    assert torch.equal(gemms.fprop(x, Fp8Weight.of(w, spec), RngStep(0, 0)), gemms.fprop(x, w, RngStep(0, 0)))


def all_fast() -> Recipe:
    recipe = get_recipe("fp8_current")
    return replace(recipe, **{name: replace(gemm, fast_accumulation=True) for name, gemm in recipe.gemms.items()})


def test_an_expert_without_tokens() -> None:
    gemms = LinearGemms(all_fast(), LinearId(1, "x", expert=0), 0, AmaxHistory, emulate_accumulator=True)
    step, x, w, dy = RngStep(0, 0), torch.zeros(0, 512), operands()[1], torch.zeros(0, 16)
    assert gemms.fprop(x, w, step).shape == (0, 16)
    assert gemms.dgrad(dy, w, step).shape == (0, 512)
    assert torch.equal(gemms.wgrad(dy, x, step), torch.zeros(16, 512))


def test_a_recipe_may_ask_for_it_in_every_gemm() -> None:
    for ours, theirs in zip(products(all_fast(), True), products(all_fast(), False)):
        assert not torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs, rtol=0.06, atol=0.0)
