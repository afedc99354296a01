"""Recipes as TransformerEngine's own objects, built by its real Python files: fields, quantizers, refusals."""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import pytest
from megatron.core import fp8_utils

from megatron_lowprec import get_recipe, recipes
from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from megatron_lowprec.te import QuantizerFactory, quantizer_factory, te_recipe
from tests.refusal import refused
from tests.te.conftest import Import
from tests.te.operands import all_operands, operands_of

NO_FLOOR = {"power_2_scale": False, "amax_epsilon": 0.0}
SPLIT = {"fp8_gemm_fprop": True, "fp8_gemm_dgrad": True, "fp8_gemm_wgrad": True}
SCALES = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")

resolve = fp8_utils._resolve_callable_from_python_import_path

IN_BF16 = {gemm: [f"{gemm}.{operand}=null" for operand in operands] for gemm, operands in GEMM_OPERANDS.items()}

NVFP4 = {
    "fp8_format": "E4M3",
    "disable_rht": False,
    "disable_stochastic_rounding": False,
    "disable_2d_quantization": False,
    "row_scaled_activation": False,
    "nvfp4_4over6": "none",
}

# name -> class, and every field of it that decides numerics
OBJECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8_delayed": (
        "DelayedScaling",
        {
            "fp8_format": "HYBRID",
            "margin": 0,
            "amax_history_len": 1024,
            "amax_compute_algo": "max",
            "scaling_factor_compute_algo": None,
            "reduce_amax": True,
        },
    ),
    "fp8_current": (
        "Float8CurrentScaling",
        {
            "fp8_format": "HYBRID",
            "use_power_2_scales": False,
            **dict.fromkeys(SCALES, NO_FLOOR),
            **SPLIT,
            "fp8_gemm_fprop": False,
        },
    ),
    "fp8_blockwise": (
        "Float8BlockScaling",
        {
            "fp8_format": "E4M3",
            "use_f32_scales": True,
            **dict.fromkeys(SCALES, NO_FLOOR),
            **SPLIT,
            "x_block_scaling_dim": 1,
            "w_block_scaling_dim": 2,
            "grad_block_scaling_dim": 1,
        },
    ),
    "mxfp8": ("MXFP8BlockScaling", {"fp8_format": "E4M3", "margin": 0, "enable_2d_quantization": False}),
    "mxfp8_e5m2_grad": ("MXFP8BlockScaling", {"fp8_format": "HYBRID", "margin": 0, "enable_2d_quantization": False}),
    "mxfp8_e5m2_weight": ("CustomRecipe", {"fp8_format": "E4M3"}),
    "mxfp8_e5m2_act": ("CustomRecipe", {"fp8_format": "E4M3"}),
    "mxfp8_2d": ("MXFP8BlockScaling", {"fp8_format": "E4M3", "margin": 0, "enable_2d_quantization": True}),
    "nvfp4_all": ("NVFP4BlockScaling", NVFP4),
}
REFUSED = {
    "bf16": "quantizes nothing",
    "fp8_current_bf16_ends": "rules need the layer's number",
    "nvfp4": "rules need the layer's number",
    "nvfp4_bf16_tail": "phases need the step of the training",
    "nvfp4_four_over_six": "fprop.input.scale.four_over_six is mse, which its NVFP4 quantizers have only outside",
    "quartet2": "fprop.input.scale.four_over_six is mse",
    "fp8_rowwise": "fprop.input.granularity is row",
    "fp8_rowwise_gw_hp": "fprop.input.granularity is row",
    "mxfp8_ocp": "fprop.input.scale_rule is floor",
    "mxfp4": "dgrad.grad_output.format is e2m1",
    "mxfp4_rht": "dgrad.grad_output.format is e2m1",
    "mxfp4_sr": "dgrad.grad_output.format is e2m1",
    "mxfp4_rht_sr": "dgrad.grad_output.format is e2m1",
    "fp8_mxfp4_rht_sr": "dgrad.grad_output.format is e2m1",
    **dict.fromkeys(
        ("fp8_lm", "fp8_lm_o1", "fp8_lm_o2", "fp8_lm_o3", "deepseek_v3", "deepseek_v32"),
        "optimizer state, gradients or weights",
    ),
}


def described(found: Any, names: Any) -> dict[str, Any]:
    """Fields of a recipe object as plain values."""
    values = {}
    for name in names:
        value = getattr(found, name)
        if name in SCALES:
            value = {field: getattr(value, field) for field in NO_FLOOR}
        elif name in SPLIT:
            value = value.use_split_accumulator
        values[name] = value.name if name == "fp8_format" else value
    return values


def changed(recipe: str, changes: list[str]) -> Any:
    return te_recipe(load_recipe(recipe, changes))


def test_every_recipe_is_an_object_or_refused() -> None:
    assert set(OBJECTS) | set(REFUSED) == set(recipes())
    assert not set(OBJECTS) & set(REFUSED)


@pytest.mark.parametrize("name", OBJECTS)
def test_the_objects_fields_do_not_depend_on_the_environment(te: Import, name: str) -> None:
    found, (recipe_class, expected) = te_recipe(name), OBJECTS[name]
    assert type(found) is getattr(te("common.recipe"), recipe_class)
    assert described(found, expected) == expected
    assert found.backward_override is None
    assert not found.fp8_dpa
    assert not found.fp8_mha


@pytest.mark.parametrize("name", REFUSED)
def test_recipes_without_a_counterpart_are_refused_with_the_reason(name: str) -> None:
    with refused(name, REFUSED[name]):
        te_recipe(name)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        (
            "fp8_delayed",
            [*all_operands("history=16"), *all_operands("history_rule=most_recent"), *all_operands("margin=1")],
            {"amax_history_len": 16, "amax_compute_algo": "most_recent", "margin": 1},
        ),
        ("fp8_delayed", operands_of("grad_output", "format=e4m3"), {"fp8_format": "E4M3"}),
        (
            "fp8_current",
            all_operands("scale_rule=amax_pow2"),
            {"use_power_2_scales": True, "fp8_quant_bwd_grad": {"power_2_scale": True, "amax_epsilon": 0.0}},
        ),
        (
            "fp8_current",
            operands_of("weight", "amax_floor=1.0e-12"),
            {"fp8_quant_fwd_weight": {"power_2_scale": False, "amax_epsilon": 1e-12}, "fp8_quant_fwd_inp": NO_FLOOR},
        ),
        ("fp8_current", ["fprop.fast_accumulation=false", "dgrad.fast_accumulation=true"], {"fp8_gemm_dgrad": False}),
        ("fp8_current", IN_BF16["dgrad"] + IN_BF16["wgrad"], {"backward_override": "high_precision"}),
        ("fp8_blockwise", all_operands("scale_rule=amax_pow2"), {"use_f32_scales": False}),
        ("fp8_blockwise", operands_of("weight", "granularity=1x128"), {"w_block_scaling_dim": 1}),
        ("fp8_blockwise", operands_of("grad_output", "format=e5m2"), {"fp8_format": "HYBRID"}),
        ("mxfp8", operands_of("weight", "granularity=32x32"), {"enable_2d_quantization": True}),
        ("nvfp4_all", ["wgrad.hadamard=null"], {**NVFP4, "disable_rht": True}),
        (
            "nvfp4_all",
            operands_of("grad_output", "rounding=nearest_even"),
            {**NVFP4, "disable_stochastic_rounding": True},
        ),
        ("nvfp4_all", operands_of("weight", "granularity=1x16"), {**NVFP4, "disable_2d_quantization": True}),
        (
            "nvfp4_all",
            [*IN_BF16["dgrad"], *IN_BF16["wgrad"], "wgrad.hadamard=null"],
            {"backward_override": "high_precision", "disable_2d_quantization": False},
        ),
    ],
)
def test_fields_of_a_recipe_are_fields_of_the_object(
    te: Import, name: str, changes: list[str], expected: dict[str, Any]
) -> None:
    found = changed(name, changes)
    assert type(found).__name__ == OBJECTS[name][0]
    assert described(found, expected) == expected


REASONS = [
    ("fp8_delayed", ["fprop.input.margin=1"], "input has delayed scaling, but not the same in fprop and wgrad"),
    ("fp8_delayed", operands_of("weight", "margin=1"), "input and weight have delayed scaling with other"),
    (
        "fp8_delayed",
        [*operands_of("weight", "format=e5m2"), *operands_of("grad_output", "format=e4m3")],
        "its forward pass has e4m3",
    ),
    ("fp8_delayed", IN_BF16["dgrad"] + IN_BF16["wgrad"], "input has delayed scaling"),
    ("fp8_delayed", all_operands("scale_rule=amax_pow2"), "DelayedScaling has amax"),
    ("fp8_current", ["dgrad.weight.source=fprop"], "dgrad.weight.source is fprop"),
    ("fp8_delayed", all_operands("amax_floor=1.0e-12"), "DelayedScaling has none"),
    ("fp8_delayed", ["fprop.fast_accumulation=false"], "fprop.fast_accumulation is false"),
    ("fp8_blockwise", ["fprop.fast_accumulation=true"], "fprop.fast_accumulation is true"),
    ("fp8_blockwise", operands_of("input", "granularity=128x128"), "two operands of 128x128"),
    ("fp8_current", [*operands_of("input", "format=e5m2")], "wgrad has two E5M2 operands"),
    ("fp8_current", ["wgrad.input=null"], "wgrad has one operand in the compute dtype"),
    ("fp8_current", operands_of("weight", "granularity=128x128"), "blockwise and tensorwise scaling"),
    ("fp8_current", ["wgrad.grad_output.rounding=stochastic"], "rounding stochastic"),
    ("fp8_current", ["wgrad.hadamard={}"], "wgrad has a Hadamard transform"),
    ("mxfp8", operands_of("weight", "granularity=1x64"), "weight.granularity is 1x64"),
    ("nvfp4_all", operands_of("input", "rounding=stochastic"), "fprop.input.rounding is stochastic"),
    ("nvfp4_all", operands_of("input", "granularity=16x16"), "fprop.input.scale.granularity is 16x16"),
    ("nvfp4_all", operands_of("grad_output", "random_bits=16"), "grad_output.random_bits is 16, but"),
    ("nvfp4_all", operands_of("weight", "tensor_scale.target=1536.0"), "weight.tensor_scale.target is 1536.0"),
    ("nvfp4_all", operands_of("weight", "tensor_scale=null"), "weight.tensor_scale.target is None"),
    ("nvfp4_all", ["wgrad.hadamard.signs=random"], "wgrad.hadamard is"),
    ("nvfp4_all", ["dgrad.hadamard={block: 16, signs: nvfp4}"], "dgrad has a Hadamard transform"),
    ("nvfp4_all", ["fprop=mxfp8"], "it has NVFP4 in some operands only"),
    ("nvfp4_all", ["wgrad.grad_output.rounding=nearest_even"], "in two ways in one tensor"),
    ("fp8_current", ["keep_bf16.names=['*.linear_fc1']"], "rules need the layer's number"),
]


@pytest.mark.parametrize(("name", "changes", "words"), REASONS)
def test_a_field_that_it_lacks_is_named(name: str, changes: list[str], words: str) -> None:
    with refused(words):
        changed(name, changes)


def quantizers(te: Import, recipe: Any, mode: str) -> list[Any]:
    """Those that TransformerEngine makes for a linear layer: input, weight and output, or the two gradients."""
    quantization = te("pytorch.quantization")
    names = ("input", "weight", None) if mode == "forward" else ("grad_output", None)
    roles = [name and quantization.QuantizerRole("linear", name, "fc1") for name in names]
    state = quantization.RecipeState.create(recipe, mode=mode, num_quantizers=len(roles), device="cpu", roles=roles)
    return state.make_quantizers()


def numerics(quantizer: Any) -> dict[str, Any]:
    names = ("dtype", "force_pow_2_scales", "amax_epsilon", "block_scaling_dim", "block_len", "with_2d_quantization")
    values = {name: getattr(quantizer, name) for name in names if hasattr(quantizer, name)}
    if hasattr(quantizer, "scale"):  # delayed
        values |= {"scale": quantizer.scale.shape, "amax": quantizer.amax.shape}
    return {"class": type(quantizer).__name__, **values}


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize(
    "name", [name for name, (found, _) in OBJECTS.items() if found not in ("CustomRecipe", "NVFP4BlockScaling")]
)
def test_the_factory_s_quantizers_are_those_of_the_class(te: Import, name: str, mode: str) -> None:
    custom = te("common.recipe").CustomRecipe(qfactory=QuantizerFactory(get_recipe(name)))
    theirs, ours = quantizers(te, te_recipe(name), mode), quantizers(te, custom, mode)
    assert [numerics(each) for each in ours[:-1]] == [numerics(each) for each in theirs[:-1]]
    assert len(ours) == len(theirs)
    assert type(ours[-1]).__name__ == "IdentityQuantizer", "an output that nothing quantizes"


def test_formats_of_each_tensor(te: Import) -> None:
    e4m3, e5m2 = (getattr(te("pytorch.constants").DType, f"kFloat8{name}") for name in ("E4M3", "E5M2"))
    found = te_recipe("mxfp8_e5m2_weight")
    assert [each.dtype for each in quantizers(te, found, "forward")[:2]] == [e4m3, e5m2]
    assert quantizers(te, found, "backward")[0].dtype == e4m3


def test_gemms_in_bf16_are_directions_in_high_precision(te: Import) -> None:
    found = changed("fp8_current", IN_BF16["wgrad"])
    assert type(found).__name__ == "CustomRecipe"
    (x, w, _), (dy, _) = quantizers(te, found, "forward"), quantizers(te, found, "backward")
    assert numerics(w)["class"] == "Float8CurrentScalingQuantizer"
    for hybrid in (x, dy):
        parts = hybrid.rowwise_quantizer, hybrid.columnwise_quantizer
        assert [type(part).__name__ for part in parts] == ["Float8CurrentScalingQuantizer", "IdentityQuantizer"]
        assert hybrid.columnwise_source == "original"


def test_one_layer_may_have_current_and_delayed_scales(te: Import) -> None:
    delayed = [f"{gemm}.weight.scaling=delayed" for gemm in ("fprop", "dgrad")]
    x, w, _ = quantizers(te, changed("fp8_current", delayed), "forward")
    assert [type(each).__name__ for each in (x, w)] == ["Float8CurrentScalingQuantizer", "Float8Quantizer"]


def test_other_tensors_stay_in_high_precision_and_unnamed_ones_are_refused(te: Import) -> None:
    role = te("pytorch.quantization").QuantizerRole
    factory = QuantizerFactory(get_recipe("fp8_current"))
    for other in (None, role("dpa", "qkv"), role(name="dpa_output"), role("linear", "output")):
        assert type(factory(other)).__name__ == "IdentityQuantizer"
    assert type(factory(role("grouped_linear", "weight"))).__name__ == "Float8CurrentScalingQuantizer"
    with pytest.raises(UserError, match="without naming its tensors"):
        factory(role())


# ---- Megatron-LM's --fp8-quantizer-factory
def test_megatron_core_builds_a_custom_recipe_of_it(te: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    te("common.recipe")
    monkeypatch.setattr(fp8_utils, "transformer_engine", importlib.import_module("transformer_engine"), raising=False)
    first, second = (fp8_utils._get_custom_recipe("megatron_lowprec.te.fp8_current") for _ in range(2))
    assert first is not second
    assert first == second, "TransformerEngine would build the quantizers anew in every forward pass"
    assert first != fp8_utils._get_custom_recipe("megatron_lowprec.te.mxfp8")
    assert first.backward_override is None
    assert numerics(quantizers(te, first, "forward")[0])["class"] == "Float8CurrentScalingQuantizer"


def test_megatron_core_finds_a_factory_by_the_recipe_s_name(te: Import) -> None:
    first, second = (resolve("megatron_lowprec.te.fp8_blockwise") for _ in range(2))
    assert first == QuantizerFactory(get_recipe("fp8_blockwise"))
    assert first is second
    # TransformerEngine keeps a layer's quantizers as long as its recipe is equal
    recipe = te("common.recipe").CustomRecipe
    assert recipe(qfactory=first) == recipe(qfactory=pickle.loads(pickle.dumps(first)))
    assert recipe(qfactory=first) != recipe(qfactory=resolve("megatron_lowprec.te.fp8_current"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fp8_curent", ["did you mean fp8_current"]),
        ("bf16", ["leave out --fp8-format"]),
        ("mxfp4_rht_sr", ["mxfp4_rht_sr", "dgrad.grad_output.format is e2m1"]),
        (
            "fp8_delayed",
            ["once a layer", "--fp8-recipe delayed", "--fp8-amax-history-len 1024 --fp8-amax-compute-algo max"],
        ),
        ("fp8_current_bf16_ends", ["--fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 1"]),
    ],
)
def test_recipes_that_megatron_core_cannot_run_by_a_factory_are_refused(name: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        resolve(f"megatron_lowprec.te.{name}")
    assert [word for word in words if word not in str(error.value)] == []


def test_a_factory_cannot_choose_the_accumulation() -> None:
    with pytest.raises(UserError, match=r"fprop\.fast_accumulation is false.* choose a recipe without that"):
        quantizer_factory(load_recipe("fp8_current", ["fprop.fast_accumulation=false"]))


def test_environment_variables_are_in_the_flags() -> None:
    with pytest.raises(
        UserError, match=r"flags: NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 --fp8-format e4m3 --fp8-recipe bl"
    ):
        quantizer_factory(load_recipe("fp8_blockwise", ["keep_bf16.last_layers=1"]))
    with pytest.raises(UserError, match="choose a recipe without that"):
        quantizer_factory(load_recipe("mxfp8_e5m2_act", ["keep_bf16.last_layers=1"]))


def test_an_override_by_the_environment_is_refused(te: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te("common.recipe").CustomRecipe, "backward_override", "dequantized")
    with pytest.raises(UserError, match="NVTE_BACKWARD_OVERRIDE=dequantized"):
        quantizer_factory(get_recipe("fp8_current"))
    assert te_recipe("mxfp8_e5m2_act").backward_override is None


def test_a_context_for_each_layer_shifts_delayed_windows(te: Import) -> None:
    """Why quantizer factories have no delayed scaling in Megatron-LM: the window of a layer ages with every layer."""
    import torch

    manager = te("pytorch.quantization").FP8GlobalStateManager
    factory = QuantizerFactory(load_recipe("fp8_delayed", all_operands("history=4")))
    recipe = te("common.recipe").CustomRecipe(qfactory=factory)

    def window(contexts: int) -> torch.Tensor:
        manager.reset()
        state = te("pytorch.quantization").RecipeState
        quantization = te("pytorch.quantization")
        roles = [quantization.QuantizerRole("linear", name) for name in ("input", "weight")]
        layer = state.create(recipe, mode="forward", num_quantizers=2, device="cpu", roles=roles)
        layer.make_quantizers()
        manager.add_fp8_tensors_to_global_buffer({"recipe": recipe, "scaling_fwd": layer, "fp8_group": None})
        layer.amax_history[0] = 3.0
        for _ in range(contexts):
            manager.reduce_and_update_fp8_tensors(forward=True)
        return layer.amax_history[:, 0]

    one, layers = window(contexts=1), window(contexts=3)
    manager.reset()
    assert sorted(one.tolist()) == sorted(layers.tolist()) == [0.0, 0.0, 0.0, 3.0]
    assert one.tolist().index(3.0) - layers.tolist().index(3.0) == 2


def test_another_version_of_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_lowprec.te.imports.version", lambda name: "2.9.0+cu12")
    with pytest.raises(UserError, match=r"TransformerEngine 2\.9\.0"):
        te_recipe("mxfp8")


def test_without_transformer_engine_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("megatron_lowprec.te.imports.import_module", absent)
    with refused("transformer_engine.common.recipe cannot be imported", match="pip install"):
        te_recipe("mxfp8")
