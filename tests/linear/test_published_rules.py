"""Each rule of a published FP4 recipe decides results of a layer, and its operands are the peer's, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from megatron_lowprec import load_recipe, quantize
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.layer_match import Layer, Progress
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.registry import recipes
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, QuantSpec
from megatron_lowprec.three_gemms import Draws, three_gemms

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENS, IN, OUT = 40, 64, 128
NEAREST = ["dgrad.grad_output.rounding=nearest_even", "wgrad.grad_output.rounding=nearest_even"]


class Removed(NamedTuple):
    """A recipe, overrides that remove a rule, the GEMMs that change; in a layer of 20, at a step of 100."""

    recipe: str
    rule: str
    overrides: Sequence[str]
    changes: str
    layer: int = 1
    step: int = 0
    base: Sequence[str] = ()


def each(field: str, *operands: str) -> list[str]:
    return [f"{operand}.{field}" for operand in operands]


def nvfp4(recipe: str, *more: Removed) -> list[Removed]:
    """Rules that a recipe has in common with nvfp4."""
    rows = [
        ("sign vector", ["wgrad.hadamard.signs=none"], "wgrad"),
        ("transform of wgrad", ["wgrad.hadamard=null"], "wgrad"),
        ("bf16 behind the transform", ["wgrad.hadamard.output=fp32"], "wgrad"),
        ("stochastic rounding in dgrad", NEAREST[:1], "dgrad"),
        ("stochastic rounding in wgrad", NEAREST[1:], "wgrad"),
        ("8 random bits", each("random_bits=4", "dgrad.grad_output", "wgrad.grad_output"), "dgrad wgrad"),
        ("weights by 16x16", each("granularity=1x16", "fprop.weight", "dgrad.weight"), "fprop dgrad"),
        ("tensor scale of x", each("tensor_scale=null", "fprop.input", "wgrad.input"), "fprop wgrad"),
        ("tensor scale of w", each("tensor_scale=null", "fprop.weight", "dgrad.weight"), "fprop dgrad"),
        ("tensor scale of dy", each("tensor_scale=null", "dgrad.grad_output", "wgrad.grad_output"), "dgrad wgrad"),
    ]
    again = Removed(
        recipe,
        "x quantized again from high precision",
        ["wgrad.input.source=fprop"],
        "wgrad",
        base=["wgrad.hadamard.output=fp32"],
    )
    return [*(Removed(recipe, *row) for row in rows), again, *more]


def last_layers(recipe: str) -> list[Removed]:
    """bf16 begins with layer 18 of 20."""
    change = "last layers in bf16"
    return [Removed(recipe, change, ["rules=null"], changes, layer) for layer, changes in ((18, "all"), (17, ""))]


def quartet2(recipe: str) -> list[Removed]:
    eden = ("dgrad.grad_output", "dgrad.weight", "wgrad.grad_output", "wgrad.input")
    rows = [
        ("four over six", each("scale.four_over_six=null", "fprop.input", "fprop.weight"), "all"),
        ("scale correction", each("correction=null", *eden), "dgrad wgrad"),
        ("stochastic scales", each("scale.rounding=nearest_even", *eden), "dgrad wgrad"),
        ("override of the block's target", each("scale.block_target=null", *eden), "dgrad wgrad"),
        ("room above 255.99", each("tensor_scale.target=2720.3", *eden), "dgrad wgrad"),
        ("signs drawn anew", ["dgrad.hadamard.signs=none"], "dgrad"),
        ("transform of 128", ["wgrad.hadamard.block=32"], "wgrad"),
        ("weight of fprop in dgrad", ["dgrad.weight.source=original"], "dgrad"),
        ("input of fprop in wgrad", ["wgrad.input.source=original"], "wgrad"),
        ("tensor scale", each("tensor_scale.target=1344.0", "fprop.input"), "fprop wgrad"),
    ]
    return [Removed(recipe, *row) for row in rows]


FOUR_OVER_SIX = [
    Removed("nvfp4_four_over_six", f"four over six of {operand}", each("scale.four_over_six=null", operand), gemm)
    for gemm, operands in GEMM_OPERANDS.items()
    for operand in (f"{gemm}.{tensor}" for tensor in operands)
]
V2_SCALES = "tetrajet_v2_scales_only"
UE5M3 = ("fprop.input", "fprop.weight", "dgrad.grad_output", "dgrad.weight", "wgrad.grad_output", "wgrad.input")
RULES = [
    *nvfp4("nvfp4_all"),
    *last_layers("nvfp4"),
    *last_layers("nvfp4_bf16_tail"),
    Removed("nvfp4_bf16_tail", "tail", ["phases=null"], "fprop", step=82),
    Removed("nvfp4_bf16_tail", "tail", ["phases=null"], "", step=81),
    *nvfp4("nvfp4_four_over_six"),
    *last_layers("nvfp4_four_over_six"),
    *FOUR_OVER_SIX,
    Removed("nvfp4_four_over_six", "squared errors", each("scale.four_over_six=mae", "fprop.input"), "fprop"),
    Removed("nvfp4_four_over_six", "bound of 256", each("tensor_scale.target=2688.0", "fprop.input"), "fprop"),
    *quartet2("quartet2"),
    Removed("mxfp8_2d", "weights by 32x32", each("granularity=1x32", "fprop.weight", "dgrad.weight"), "fprop dgrad"),
    Removed("nvfp4_bf16_first2_last8", "first layers in bf16", ["rules=[{last: 8, gemms: bf16}]"], "all", 2),
    Removed("nvfp4_bf16_last8", "last layers in bf16", ["rules=null"], "all", 13),
    Removed("nvfp4_bf16_last4", "last layers in bf16", ["rules=null"], "all", 17),
    Removed("nvfp4_bf16_last14", "last layers in bf16", ["rules=null"], "all", 7),
    Removed("nvfp4_bf16_tail_backward", "tail, weights by 1x16", ["phases=null"], "all", step=82),
    Removed("nvfp4_bf16_tail_both", "tail", ["phases=null"], "all", step=82),
    Removed("mxfp8_fprop_nvfp4_backward", "MXFP8 in fprop", ["fprop=nvfp4_all"], "fprop"),
    Removed("fp4_all_the_way", "stochastic x in wgrad", ["wgrad.input.rounding=nearest_even"], "wgrad"),
    Removed("fp4_all_the_way", "stochastic dy", NEAREST, "dgrad wgrad"),
    Removed("tetrajet", "scales rounded up", each("scale.rule=floor", "fprop.input"), "fprop wgrad"),
    Removed("tetrajet", "stochastic dy", NEAREST, "dgrad wgrad"),
    Removed("tetrajet", "stochastic weight in dgrad", ["dgrad.weight.rounding=nearest_even"], "dgrad"),
    Removed("tetrajet", "weight of fprop in dgrad", ["dgrad.weight.source=original"], "dgrad"),
    Removed("tetrajet", "input of fprop in wgrad", ["wgrad.input.source=original"], "wgrad"),
    Removed(
        V2_SCALES,
        "outer blocks of w",
        each("tensor_scale.granularity=tensor", "fprop.weight"),
        "fprop dgrad",
    ),
    Removed(V2_SCALES, "transform of dgrad", ["dgrad.hadamard=null"], "dgrad"),
    Removed(V2_SCALES, "input of fprop in wgrad", ["wgrad.input.source=original"], "wgrad"),
    Removed("ue5m3", "UE5M3 scales", each("scale.format=e4m3", *UE5M3), "all"),
    Removed("ue5m3", "held amax", each("scaling=current", *UE5M3) + each("history_rule=max", *UE5M3), "all"),
    Removed("ue5m3", "stochastic dy", NEAREST, "dgrad wgrad"),
    *(Removed("ufp4", f"transform of {gemm}", [f"{gemm}.hadamard=null"], gemm) for gemm in GEMM_OPERANDS),
    Removed("ufp4", "E1M2", each("format=e2m1", "fprop.input"), "fprop"),
    Removed("quartet2_nvidia", "headroom for dy", each("scale.block_target=null", "dgrad.grad_output"), "dgrad"),
    Removed("quartet2_nvidia", "signs drawn anew", ["wgrad.hadamard.signs=none"], "wgrad"),
    Removed("quartet2_h32", "transform of 32", ["dgrad.hadamard.block=128"], "dgrad"),
]


def found(name: str, overrides: Sequence[str] = ()) -> Recipe:
    return load_recipe(name if name in recipes() else f"configs/recipes/{name}.yaml", overrides)


@cache
def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, w and dy in bf16; blocks of very different size, and an outlier each."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for rows, columns in ((TOKENS, IN), (OUT, IN), (TOKENS, OUT)):
        sizes = torch.logspace(-5, 0, rows)[torch.randperm(rows, generator=generator)]
        tensor = torch.randn(rows, columns, generator=generator) * sizes.unsqueeze(1) * torch.logspace(-1, 0, columns)
        tensor[rows // 2, columns // 2] = 300.0
        made.append(tensor[:, torch.randperm(columns, generator=generator)].bfloat16())
    return made[0], made[1], made[2]


@cache
def results(name: str, overrides: tuple[str, ...], layer: int, step: int) -> dict[str, torch.Tensor]:
    recipe = found(name, overrides)
    linear = recipe.at(Layer(layer, "mlp.linear_fc1", 20), Progress(step, 100))
    amaxes = dict.fromkeys(("input", "weight", "grad_output"), torch.tensor(100.0))  # of delayed scales
    return dict(zip(GEMM_OPERANDS, three_gemms(linear, *tensors(), Draws(rng_step=RngStep(4, 1)), amaxes), strict=True))


@pytest.mark.parametrize("row", RULES, ids=lambda row: f"{row.recipe}: {row.rule}, {row.layer}, {row.step}")
def test_without_a_rule_these_gemms_change(row: Removed) -> None:
    place = row.layer, row.step
    whole = results(row.recipe, tuple(row.base), *place)
    without = results(row.recipe, (*row.base, *row.overrides), *place)
    changed = [gemm for gemm in GEMM_OPERANDS if not torch.equal(whole[gemm], without[gemm])]
    assert changed == (list(GEMM_OPERANDS) if row.changes == "all" else row.changes.split())
    assert all(bool(result.isfinite().all()) for result in (*whole.values(), *without.values()))


def test_every_fp4_recipe_has_its_rules_here() -> None:
    listed = {path.stem for path in (GOLDEN.parents[1] / "megatron_lowprec/configs/recipes").glob("*.yaml")}
    names = [*recipes(), *sorted(listed)]
    family = [name for name in names if re.match(r"nvfp4|quartet2|mxfp8_2d|ue5m3|ufp4|fp4_|tetrajet|mxfp8_fprop", name)]
    assert {row.recipe for row in RULES} == set(family)


# ---- the peers' operands
def spec_of(recipe: str, operand: str) -> QuantSpec:
    gemm, tensor = operand.split(".")
    spec: QuantSpec = getattr(found(recipe).gemms[gemm], tensor)
    return spec


@pytest.mark.parametrize(
    ("recipe", "operand", "case"),
    [
        ("nvfp4", "fprop.input", "nvfp4_te_1x16"),
        ("nvfp4", "fprop.weight", "nvfp4_te_16x16"),
        ("nvfp4_four_over_six", "fprop.input", "nvfp4_4over6_te_mse_256_1x16"),
        ("nvfp4_four_over_six", "fprop.weight", "nvfp4_4over6_te_mse_256_16x16"),
        ("mxfp8_2d", "fprop.weight", "mxfp8_te_2d"),
        ("tetrajet", "fprop.input", "mxfp4_tetrajet_1x32"),
        ("ue5m3", "fprop.input", "fp4_ue5m3_graphcore_1x16"),
    ],
)
def test_codes_are_the_peer_s(recipe: str, operand: str, case: str) -> None:
    x, stored = load_file(GOLDEN / "inputs.safetensors")["normal_f32"], load_file(GOLDEN / f"{case}.safetensors")
    made = quantize(x, spec_of(recipe, operand))
    assert torch.equal(made.codes if made.format.bits == 8 else made.packed_codes, stored["normal_f32.codes"])


def test_values_are_quartet_2_s() -> None:
    stored = load_file(GOLDEN / "nvfp4_rtn_quartet2_46.safetensors")
    x = load_file(GOLDEN / "inputs.safetensors")["normal_f32"]
    assert torch.equal(quantize(x, spec_of("quartet2", "fprop.input")).dequantize(), stored["normal_f32.dequant"])
    # behind the transform of 32, with an amax of the tensor's own
    stored = load_file(GOLDEN / "nvfp4_mseden_quartet2.safetensors")
    transformed = hadamard_transform(stored["d32.x"], stored["d32.sign"].float())
    draws = (1.0 - stored["d32.noise"]).clamp(max=1.0 - 2.0**-24).repeat_interleave(16, 1)
    made = quantize(transformed, spec_of("quartet2", "dgrad.grad_output"), random=draws, group=32)
    torch.testing.assert_close(made.dequantize(), stored["d32.dequant"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("group", ["f32", "bf16", "sparse"])
def test_products_are_transformer_engine_s(group: str) -> None:
    """With nearest rounding, which its reference has; in bf16 to half a step of the result."""
    stored = load_file(GOLDEN / "nvfp4_linear_te.safetensors")
    x, w, dy = (stored[f"{group}.{name}"] for name in ("x", "w", "dy"))
    made = three_gemms(found("nvfp4_all", NEAREST), x, w, dy, Draws(), {})
    for name, product in zip(("y", "dx", "dw"), made, strict=True):
        want = stored[f"{group}.{name}"]
        bound = 2.0**-18 * want.abs().max() + (2.0**-8 * want.abs() if x.dtype == torch.bfloat16 else 0.0)
        assert bool(((product.float() - want).abs() <= bound).all()), name
