"""The test before the first step: passes where all is well, and notices what has gone wrong elsewhere before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lowprec import GemmSpec, HadamardSpec, QuantSpec, Recipe
from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.lowprec_linear import LinearGemms
from megatron_lowprec.quantization import quantizer, random_stream
from megatron_lowprec.quantization.random_stream import RandomStream, RngStep
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.quant_spec import TensorScaleSpec
from megatron_lowprec.recipe.registry import get_recipe, recipes
from megatron_lowprec.training.monitoring.self_test import self_test
from tests.refusal import refused
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses
from tests.weekly import each_kind

CPU = torch.device("cpu")
NVFP4 = QuantSpec("e2m1", "1x16", "e4m3", "product", tensor_scale=TensorScaleSpec(2688.0))
DTYPES = [torch.bfloat16, torch.float32]


class Work(TorchDispatchMode):
    """Counts the elements that torch's operations write."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.elements += sum(leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))
        return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", each_kind(recipes()))
def test_every_recipe_passes_by_little_work(name: str, dtype: torch.dtype) -> None:
    with Work() as work:
        self_test(get_recipe(name), dtype, CPU)
    assert work.elements < 3e8  # a second or less; it is done at every start


@pytest.mark.gpu
@pytest.mark.parametrize("name", recipes())
def test_every_recipe_passes_on_this_gpu(name: str) -> None:
    device = torch.device("cuda")
    self_test(get_recipe(name), torch.bfloat16, device)


def test_the_random_state_stays() -> None:
    before = torch.get_rng_state()
    self_test(get_recipe("mxfp4_sr"), torch.bfloat16, CPU)
    assert torch.equal(torch.get_rng_state(), before)


STOCHASTIC = ["fprop.input", "fprop.weight", "dgrad.grad_output", "dgrad.weight", "wgrad.grad_output", "wgrad.input"]


@pytest.mark.parametrize(
    ("base", "overrides"),
    [
        ("mxfp4_sr", ["random_bits=1"]),
        ("mxfp4_sr", ["random_bits=2"]),
        ("mxfp8", ["rounding=stochastic"]),
        ("mxfp8_ocp", ["rounding=stochastic", "random_bits=4"]),
        ("fp8_current", ["rounding=stochastic"]),
        ("fp8_delayed", ["rounding=stochastic"]),
        ("fp8_blockwise", ["rounding=stochastic"]),
        ("configs/recipes/tetrajet.yaml", []),  # from fprop's operands
        ("configs/recipes/tetrajet_v2_scales_only.yaml", []),
    ],
)
def test_stochastic_rounding_of_any_format_and_tile_passes(base: str, overrides: list[str]) -> None:
    operands = STOCHASTIC if base != "mxfp4_sr" else STOCHASTIC[2:]
    recipe = load_recipe(base, [f"{operand}.{override}" for operand in operands for override in overrides])
    self_test(recipe, torch.bfloat16, CPU)


@pytest.mark.parametrize(
    "overrides",
    [
        ["dgrad.hadamard.block=256"],
        ["dgrad.hadamard.signs=none", "wgrad.hadamard.signs=none"],  # a correction is unbiased over random signs
        ["dgrad.grad_output.correction=null", "dgrad.weight.correction=null"],
    ],
)
def test_what_is_biased_by_its_recipe_passes(overrides: list[str]) -> None:
    self_test(load_recipe("quartet2", overrides), torch.bfloat16, CPU)


def test_an_operand_is_drawn_without_what_it_depends_on() -> None:
    """Its fprop operand and its transform are not there when it is drawn alone."""
    drawn = replace(NVFP4, rounding="stochastic", correction="eden", scale=replace(NVFP4.scale, zero_code="one"))
    recipe = Recipe(
        "r",
        "",
        fprop=GemmSpec(weight=NVFP4),
        dgrad=GemmSpec(grad_output=drawn, weight=replace(drawn, source="fprop"), hadamard=HadamardSpec(16)),
    )
    self_test(recipe, torch.bfloat16, CPU)


def constant(value: float) -> Callable[[torch.Tensor, int], torch.Tensor]:
    return lambda bits, count: torch.full(bits.shape, value)


uniform = random_stream.uniform_from_bits
FAULTS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    # As on some GPUs under TransformerEngine: every draw zero, so everything was rounded down.
    "zeros": constant(1e-6),
    "ones": constant(1 - 1e-6),
    "halves": constant(0.5),
    "too small": lambda bits, count: uniform(bits, count) * 0.9,
    "too narrow": lambda bits, count: uniform(bits, count) * 0.5 + 0.25,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_draws_that_are_not_uniform_are_found(monkeypatch: pytest.MonkeyPatch, fault: str, dtype: torch.dtype) -> None:
    monkeypatch.setattr(random_stream, "uniform_from_bits", FAULTS[fault])
    with pytest.raises(UserError, match=r"dgrad's grad_output \(E2M1\) is not rounded without bias"):
        self_test(get_recipe("mxfp4_rht_sr"), dtype, CPU)


@pytest.mark.parametrize("fault", FAULTS)
def test_draws_of_scales_that_are_not_uniform_are_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Random signs hide most of the bias from the error of a mean; the mean is shorter or longer than the operand."""
    monkeypatch.setattr(random_stream, "uniform_from_bits", FAULTS[fault])
    with pytest.raises(UserError, match=r"dgrad's grad_output \(E2M1\) is not rounded without bias"):
        self_test(get_recipe("quartet2"), torch.bfloat16, CPU)


def test_draws_that_never_change_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    at = RandomStream.at
    monkeypatch.setattr(RandomStream, "at", lambda self, rng_step: at(self, RngStep(0, 0)))
    with pytest.raises(UserError, match="inf standard errors off"):
        self_test(get_recipe("mxfp4_sr"), torch.bfloat16, CPU)


def test_an_operand_of_zeros_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize = quantizer.quantize_operand

    def zeros(*args: Any, **options: Any) -> Any:
        elements, scale = quantize(*args, **options)
        return torch.zeros_like(elements), scale

    monkeypatch.setattr(quantizer, "quantize_operand", zeros)
    with pytest.raises(UserError, match="fprop is 1 away from the exact product"):
        self_test(get_recipe("mxfp8"), torch.bfloat16, CPU)


def test_a_product_with_a_wrong_scale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LinearGemms.forward

    def doubled(*operands: Any, **options: Any) -> Any:
        y, kept = forward(*operands, **options)
        return y * 2.0, kept

    monkeypatch.setattr(LinearGemms, "forward", doubled)
    with pytest.raises(UserError, match="away from the exact product"):
        self_test(get_recipe("mxfp8"), torch.bfloat16, CPU)


def test_a_failed_self_test_ends_the_run_before_its_first_step(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_stream, "uniform_from_bits", constant(1e-6))
    options: dict[str, Any] = {"save": "out", "recipe": "mxfp4_sr", "hidden_size": 128, "bf16": True}
    with refused(match="self-test on cpu"):
        drive(argv(**options))
    assert not Path("out/metrics.jsonl").exists()
    drive(argv(**options, no_self_test=True))
    assert len(losses(Path("out"))) == 2
