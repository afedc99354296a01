"""Name -> Recipe: the published recipes, one entry each, composed of named operand specs.

Other packages add recipes with ``register_recipe`` or through the entry-point group ``megatron_lowprec.recipes``, whose
entries name a ``Recipe`` or a function that returns one.
"""

import difflib
from dataclasses import replace
from importlib.metadata import entry_points
from typing import TypedDict

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.activation_spec import ActivationSpec
from megatron_lowprec.recipe.quant_spec import ScaleSpec, TensorScaleSpec
from megatron_lowprec.recipe.recipe import BF16, GradientSpec, KeepBf16, OptimizerSpec, Phase, Recipe, Rule
from megatron_lowprec.recipe.schema import GemmSpec, HadamardSpec, QuantSpec

ENTRY_POINT_GROUP = "megatron_lowprec.recipes"

_RECIPES: dict[str, Recipe] = {}
_entry_points_loaded = False


def register_recipe(recipe: Recipe) -> Recipe:
    """Add ``recipe`` under its name and return it; UserError if another has the name, or if it is empty or a path."""
    if not recipe.name or is_path(recipe.name):
        raise UserError(f"a recipe is named {recipe.name!r}, which is empty or a path: give it one such as my_recipe")
    if _RECIPES.setdefault(recipe.name, recipe) != recipe:
        raise UserError(f"a recipe named {recipe.name!r} is registered already; give the new one another name")
    return recipe


def is_path(name: str) -> bool:
    """Whether a recipe's name is the path of a file: recipe names have no slash."""
    return name.endswith((".yaml", ".yml")) or "/" in name


def _load_entry_points() -> None:
    global _entry_points_loaded
    if not _entry_points_loaded:
        _entry_points_loaded = True
        for entry in entry_points(group=ENTRY_POINT_GROUP):
            try:
                found = entry.load()
                found = found if isinstance(found, Recipe) else found()
            except Exception as error:  # noqa: BLE001 another package's import may raise anything
                raise UserError(
                    f"the recipe entry point {entry.name} = {entry.value!r} cannot be loaded ({type(error).__name__}: "
                    f"{error}); mend or uninstall the package that has it"
                ) from None
            if not isinstance(found, Recipe):
                raise UserError(
                    f"the recipe entry point {entry.name} = {entry.value!r} gives {type(found).__name__}; it must name "
                    "a Recipe or a function that returns one"
                )
            register_recipe(found)


def recipes() -> tuple[str, ...]:
    """Names of all registered recipes, in the order of registration."""
    _load_entry_points()
    return tuple(_RECIPES)


def get_recipe(name: str) -> Recipe:
    """The recipe of that name; UserError with the nearest names if there is none."""
    known = recipes()
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else "--list-recipes prints them all"
        if is_path(name):
            hint = "megatron_lowprec.recipe.parsing.load_recipe reads a file"
        raise UserError(f"there is no recipe {name!r}: {hint}")
    return _RECIPES[name]


def list_table() -> str:
    """One line per recipe: name, summary, source."""
    rows = [get_recipe(name) for name in recipes()]
    width = max(len(row.name) for row in rows)
    return "\n".join(f"{row.name:<{width}}  {row.summary}{f' [{row.source}]' if row.source else ''}" for row in rows)


# ---- operands
FP8_CURRENT = QuantSpec("e4m3", granularity="tensor")
FP8_CURRENT_E5M2 = QuantSpec("e5m2", granularity="tensor")
FP8_DELAYED = QuantSpec("e4m3", granularity="tensor", scaling="delayed")
FP8_DELAYED_E5M2 = QuantSpec("e5m2", granularity="tensor", scaling="delayed")
FP8_ROW = QuantSpec("e4m3", granularity="row", scale_rule="amax_pow2", amax_floor=1e-12)
FP8_TENSOR_POW2 = QuantSpec("e4m3", granularity="tensor", scale_rule="amax_pow2", amax_floor=1e-12)
FP8_1X128 = QuantSpec("e4m3", granularity="1x128")
FP8_128X128 = QuantSpec("e4m3", granularity="128x128")
FP8_1X128_POW2 = QuantSpec("e4m3", granularity="1x128", scale_rule="amax_pow2")
FP8_128X128_POW2 = QuantSpec("e4m3", granularity="128x128", scale_rule="amax_pow2")
MXFP8 = QuantSpec("e4m3", granularity="1x32", scale_format="e8m0", scale_rule="round_up")
MXFP8_E5M2 = replace(MXFP8, format="e5m2")
MXFP8_OCP = QuantSpec("e4m3", granularity="1x32", scale_format="e8m0", scale_rule="floor")
MXFP4 = QuantSpec("e2m1", granularity="1x32", scale_format="e8m0", scale_rule="floor")
MXFP4_SR = replace(MXFP4, rounding="stochastic", headroom=0.75)
MXFP8_32X32 = replace(MXFP8, scale=replace(MXFP8.scale, granularity="32x32"))
NVFP4 = QuantSpec("e2m1", "1x16", "e4m3", "product", tensor_scale=TensorScaleSpec(448.0 * 6.0))
NVFP4_16X16 = replace(NVFP4, scale=replace(NVFP4.scale, granularity="16x16"))
NVFP4_SR = replace(NVFP4, rounding="stochastic", random_bits=8)  # the bits of Blackwell's cvt.rs
NVFP4_HADAMARD = HadamardSpec(16, signs="nvfp4", output="operand")
# the larger of both scales, 3/2 of 256, is below E4M3's 448
NVFP4_4OVER6 = QuantSpec(
    "e2m1", scale=ScaleSpec("1x16", "e4m3", "base", four_over_six="mse"), tensor_scale=TensorScaleSpec(256.0 * 6.0)
)
NVFP4_4OVER6_16X16 = replace(NVFP4_4OVER6, scale=replace(NVFP4_4OVER6.scale, granularity="16x16"))
NVFP4_4OVER6_SR = replace(NVFP4_4OVER6, rounding="stochastic", random_bits=8)
QUARTET2 = QuantSpec(
    "e2m1",
    scale=ScaleSpec("1x16", "e4m3", "divided", four_over_six="mse", zero_code="one"),
    tensor_scale=TensorScaleSpec(256.0 * 6.0),
)
# a block's largest entry is mapped to 6 / 0.988125, which lowers the error; a corrected scale may exceed 256
_EDEN_TARGET = 6.0 / (17 / 16 * 0.93)
QUARTET2_EDEN = QuantSpec(
    "e2m1",
    scale=ScaleSpec("1x16", "e4m3", "divided", rounding="stochastic", block_target=_EDEN_TARGET, zero_code="one"),
    tensor_scale=TensorScaleSpec(255.99 * _EDEN_TARGET),
    correction="eden",
)
_QUARTET2_EDEN_AGAIN = replace(QUARTET2_EDEN, source="fprop")
_QUARTET2_HADAMARD = HadamardSpec(128)

_TE = "arXiv 2209.05433; TransformerEngine"
_TORCHAO = "torchao float8"
_DEEPSEEK = "arXiv 2412.19437"
_MXFP8 = "arXiv 2506.08027"
_MXFP4 = "arXiv 2502.20586"
_MXFP8_2D = "TransformerEngine #2634"
_FP8_LM = "arXiv 2310.18313"
_NVFP4 = "arXiv 2509.25149; TransformerEngine"
_FOUR_OVER_SIX = "arXiv 2512.02010"
_QUARTET2 = "arXiv 2601.22813"


class _Backward(TypedDict):
    dgrad: GemmSpec
    wgrad: GemmSpec


class _AllGemms(_Backward):
    fprop: GemmSpec


def _backward(operand: QuantSpec, hadamard: HadamardSpec | None = None) -> _Backward:
    """dgrad and wgrad with the same spec for all four operands."""
    return {
        "dgrad": GemmSpec(grad_output=operand, weight=operand, hadamard=hadamard),
        "wgrad": GemmSpec(grad_output=operand, input=operand, hadamard=hadamard),
    }


def _gemms(
    x: QuantSpec, w: QuantSpec, dy: QuantSpec, fast_fprop: bool = False, wgrad_hadamard: HadamardSpec | None = None
) -> _AllGemms:
    """All three GEMMs, with the same spec for a tensor in each of its GEMMs."""
    return {
        "fprop": GemmSpec(input=x, weight=w, fast_accumulation=fast_fprop),
        "dgrad": GemmSpec(grad_output=dy, weight=w),
        "wgrad": GemmSpec(grad_output=dy, input=x, hadamard=wgrad_hadamard),
    }


_DELAYED_GEMMS = _gemms(FP8_DELAYED, FP8_DELAYED, FP8_DELAYED_E5M2, fast_fprop=True)
_DEEPSEEK_STATE = OptimizerSpec(exp_avg="bf16", exp_avg_sq="bf16", rounding="nearest_even")
_DEEPSEEK_ACTIVATIONS = ActivationSpec(attention_output="e5m6", swiglu_input="e4m3")
_FP8_LM_STATE = OptimizerSpec(exp_avg="e4m3", exp_avg_sq="fp16", master="fp16")
_FP8_LM_GRADIENTS = GradientSpec("e4m3", accumulation="fp32")
_FP8_DELAYED_FPROP = GemmSpec(input=FP8_DELAYED, weight=FP8_DELAYED, fast_accumulation=True)
_CURRENT_GEMMS = _gemms(FP8_CURRENT, FP8_CURRENT, FP8_CURRENT_E5M2, fast_fprop=True)
_NVFP4_GEMMS = _gemms(NVFP4, NVFP4_16X16, NVFP4_SR, wgrad_hadamard=NVFP4_HADAMARD)
_LAST_15_PERCENT = (Rule.of(BF16, last_fraction=0.15),)

for _recipe in (
    Recipe("bf16", "no quantization: the compute dtype in all three GEMMs"),
    Recipe(
        "fp8_delayed",
        "FP8 E4M3, gradients E5M2; one fp32 scale a tensor from the amax of earlier steps",
        _TE,
        **_DELAYED_GEMMS,
    ),
    Recipe("fp8_current", "FP8 E4M3, gradients E5M2; one fp32 scale a tensor, from itself", _TE, **_CURRENT_GEMMS),
    Recipe(
        "fp8_current_bf16_ends",
        "fp8_current with the first and the last transformer block in bf16",
        _MXFP8,
        **_CURRENT_GEMMS,
        keep_bf16=KeepBf16(first_layers=1, last_layers=1),
    ),
    Recipe(
        "fp8_rowwise",
        "FP8 E4M3, power-of-two scale a row",
        _TORCHAO,
        **_gemms(FP8_ROW, FP8_ROW, FP8_ROW, fast_fprop=True),
    ),
    Recipe(
        "fp8_rowwise_gw_hp",
        "fp8_rowwise with dgrad's weight scaled per tensor and wgrad in bf16",
        _TORCHAO,
        fprop=GemmSpec(input=FP8_ROW, weight=FP8_ROW, fast_accumulation=True),
        dgrad=GemmSpec(grad_output=FP8_ROW, weight=FP8_TENSOR_POW2),
    ),
    Recipe(
        "fp8_blockwise",
        "FP8 E4M3; fp32 scales of 1x128 (activations, gradients) and 128x128 (weights)",
        _DEEPSEEK,
        **_gemms(FP8_1X128, FP8_128X128, FP8_1X128),
    ),
    Recipe(
        "deepseek_v3",
        "fp8_blockwise with FP8 weights, bf16 moments, attention's output saved in E5M6 and SwiGLU's input in E4M3",
        _DEEPSEEK,
        **_gemms(FP8_1X128, FP8_128X128, FP8_1X128),
        optimizer=_DEEPSEEK_STATE,
        activations=_DEEPSEEK_ACTIVATIONS,
        fp8_weights=True,
    ),
    Recipe(
        "deepseek_v32",
        "deepseek_v3 with power-of-two scales",
        "arXiv 2412.19437; model card of DeepSeek-V3.1",
        **_gemms(FP8_1X128_POW2, FP8_128X128_POW2, FP8_1X128_POW2),
        optimizer=_DEEPSEEK_STATE,
        activations=_DEEPSEEK_ACTIVATIONS,
        fp8_weights=True,
    ),
    Recipe("mxfp8", "MXFP8 E4M3, scales rounded up", _MXFP8, **_gemms(MXFP8, MXFP8, MXFP8)),
    Recipe("mxfp8_ocp", "MXFP8 E4M3, scales by the OCP floor rule", _MXFP8, **_gemms(MXFP8_OCP, MXFP8_OCP, MXFP8_OCP)),
    Recipe("mxfp8_e5m2_grad", "mxfp8 with gradients in E5M2", _MXFP8, **_gemms(MXFP8, MXFP8, MXFP8_E5M2)),
    Recipe("mxfp8_e5m2_weight", "mxfp8 with weights in E5M2", _MXFP8, **_gemms(MXFP8, MXFP8_E5M2, MXFP8)),
    Recipe("mxfp8_e5m2_act", "mxfp8 with activations in E5M2", _MXFP8, **_gemms(MXFP8_E5M2, MXFP8, MXFP8)),
    Recipe(
        "mxfp8_2d",
        "mxfp8 with weights scaled by 32x32, so that fprop and dgrad multiply the same numbers",
        _MXFP8_2D,
        **_gemms(MXFP8, MXFP8_32X32, MXFP8),
    ),
    Recipe("mxfp4", "MXFP4 backward, nearest rounding (Algorithm 1); forward bf16", _MXFP4, **_backward(MXFP4)),
    Recipe("mxfp4_rht", "mxfp4 after a random Hadamard transform", _MXFP4, **_backward(MXFP4, HadamardSpec())),
    Recipe("mxfp4_sr", "MXFP4 backward, unbiased stochastic rounding (Algorithm 2)", _MXFP4, **_backward(MXFP4_SR)),
    Recipe(
        "mxfp4_rht_sr",
        "MXFP4 backward: random Hadamard transform and stochastic rounding (Algorithm 3)",
        _MXFP4,
        **_backward(MXFP4_SR, HadamardSpec()),
    ),
    Recipe(
        "fp8_mxfp4_rht_sr",
        "mxfp4_rht_sr backward with an FP8 forward (E4M3, delayed scaling)",
        _MXFP4,
        fprop=_FP8_DELAYED_FPROP,
        **_backward(MXFP4_SR, HadamardSpec()),
    ),
    Recipe(
        "nvfp4",
        "NVFP4: weights by 16x16, stochastic gradients, Hadamard transform in wgrad; last layers in bf16",
        _NVFP4,
        **_NVFP4_GEMMS,
        rules=_LAST_15_PERCENT,
    ),
    Recipe("nvfp4_all", "nvfp4 in all layers, as TransformerEngine's NVFP4BlockScaling", _NVFP4, **_NVFP4_GEMMS),
    Recipe(
        "nvfp4_bf16_tail",
        "nvfp4 with the forward pass in bf16 at the end of the run",
        _NVFP4,
        **_NVFP4_GEMMS,
        rules=_LAST_15_PERCENT,
        phases=(Phase(from_fraction=0.82, fprop=GemmSpec()),),
    ),
    Recipe(
        "nvfp4_four_over_six",
        "nvfp4 with each block's largest entry mapped to 6 or to 4, whichever has the lower squared error",
        _FOUR_OVER_SIX,
        **_gemms(NVFP4_4OVER6, NVFP4_4OVER6_16X16, NVFP4_4OVER6_SR, wgrad_hadamard=NVFP4_HADAMARD),
        rules=_LAST_15_PERCENT,
    ),
    Recipe(
        "quartet2",
        "NVFP4, four over six in fprop; backward from fprop's operands, Hadamard 128, corrected stochastic scales",
        _QUARTET2,
        fprop=GemmSpec(input=QUARTET2, weight=QUARTET2),
        dgrad=GemmSpec(grad_output=QUARTET2_EDEN, weight=_QUARTET2_EDEN_AGAIN, hadamard=_QUARTET2_HADAMARD),
        wgrad=GemmSpec(grad_output=QUARTET2_EDEN, input=_QUARTET2_EDEN_AGAIN, hadamard=_QUARTET2_HADAMARD),
    ),
    Recipe(
        "fp8_lm",
        "fp8_delayed with gradients exchanged in E4M3, moments in E4M3 and FP16, main weights in FP16",
        _FP8_LM,
        **_DELAYED_GEMMS,
        optimizer=_FP8_LM_STATE,
        gradients=GradientSpec("e4m3"),
    ),
    Recipe(
        "fp8_lm_o1",
        "fp8_delayed with gradients stored and exchanged in E4M3",
        _FP8_LM,
        **_DELAYED_GEMMS,
        gradients=_FP8_LM_GRADIENTS,
    ),
    Recipe(
        "fp8_lm_o2",
        "fp8_lm_o1 with moments in E4M3 and FP16, main weights in FP16",
        _FP8_LM,
        **_DELAYED_GEMMS,
        optimizer=_FP8_LM_STATE,
        gradients=_FP8_LM_GRADIENTS,
    ),
    Recipe(
        "fp8_lm_o3",
        "fp8_lm_o2 with FP8 weights: no copy in the compute dtype, codes gathered",
        _FP8_LM,
        **_DELAYED_GEMMS,
        optimizer=_FP8_LM_STATE,
        gradients=_FP8_LM_GRADIENTS,
        fp8_weights=True,
    ),
):
    register_recipe(_recipe)
