"""What a recipe may not say, and with which words it is refused."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_lowprec import GemmSpec, HadamardSpec, KeepBf16, LowPrecLinear, QuantSpec, Recipe, UserError
from megatron_lowprec.formats import ELEMENT_FORMATS
from megatron_lowprec.quantization.quantizer import quantize
from megatron_lowprec.recipe.quant_spec import ScaleSpec, TensorScaleSpec
from megatron_lowprec.recipe.recipe import OptimizerSpec, Rule
from megatron_lowprec.recipe.schema import FIXED_SIGNS, GEMM_OPERANDS
from megatron_lowprec.scaling import SCALE_FORMATS, scale_rules
from tests.refusal import refused

FP8 = QuantSpec("e4m3", granularity="tensor")
DELAYED = QuantSpec("e4m3", granularity="tensor", scaling="delayed")
E4M3_SCALES = {"granularity": "1x16", "scale_format": "e4m3", "scale_rule": "product"}
CODED: dict[str, Any] = {"granularity": "1x16", "format": "e4m3", "rule": "product"}
NVFP4 = QuantSpec("e2m1", **E4M3_SCALES, tensor_scale=TensorScaleSpec(2688.0))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "e5m3"}, f"format is 'e5m3', but must be one of {', '.join(ELEMENT_FORMATS)}"),
        ({"scale_format": "e4m4"}, f"scale: format is 'e4m4', but must be one of {', '.join(SCALE_FORMATS)}"),
        ({"format": "ue4m3"}, "format is 'ue4m3', but must be one of e4m3"),
        ({"format": "e5m6", **E4M3_SCALES}, "e5m6 elements have 11 bits under e4m3 scales, but bf16 holds 8"),
        (
            {**E4M3_SCALES, "granularity": "tensor"},
            "granularity tensor was asked with e4m3 scales, which need blocks such as 1x32",
        ),
        ({"tensor_scale": TensorScaleSpec(2688.0)}, "tensor_scale was asked above fp32 scales; it belongs above e4m3"),
        (
            {**E4M3_SCALES, "scaling": "delayed"},
            "scaling delayed was asked with granularity 1x16 and e4m3 scales; a history is kept for granularity tensor",
        ),
        (
            {"granularity": "1x32", "scale_format": "e8m0", "scale_rule": "floor", "amax_floor": 1e-4},
            "amax_floor 0.0001 has no effect on e8m0 scales",
        ),
        ({"rounding": "up"}, "rounding is 'up', but must be one of nearest_even, half_away, stochastic"),
        ({"scaling": "later"}, "scaling is 'later', but must be one of current, delayed"),
        ({"history_rule": "mean"}, "history_rule is 'mean', but must be one of max, most_recent"),
        (
            {"history_rule": "held"},
            "history_rule held was asked with scaling current, which keeps no history: set scaling=delayed, or",
        ),
        ({"granularity": "32"}, "granularity is '32', but must be tensor, row or ROWSxCOLUMNS such as 1x32"),
        ({"granularity": "0x32"}, "granularity is '0x32'"),
        ({"granularity": "1x32 "}, "granularity is '1x32 '"),
        (
            {"scale_rule": "floor"},
            f"scale: rule 'floor' does not belong to format 'fp32', which has {', '.join(scale_rules('fp32'))}",
        ),
        (
            {"scale_format": "e8m0", "granularity": "1x32"},
            f"scale: rule 'amax' does not belong to format 'e8m0', which has {', '.join(scale_rules('e8m0'))}",
        ),
        ({"random_bits": 0}, "random_bits is 0, but a draw has 1 to 16 bits"),
        ({"random_bits": 17}, "random_bits is 17"),
        ({"headroom": 0.0}, "headroom is 0.0, but must lie above 0 and not above 1"),
        ({"headroom": 1.5}, "headroom is 1.5"),
        ({"headroom": float("nan")}, "headroom is nan"),
        ({"headroom": 1e-300}, "headroom is 1e-300, but must lie above 0 and not above 1; fp32 takes 2^-63 to 2^63"),
        ({"amax_floor": 1e300}, "amax_floor is 1e+300, but must be 0 or a positive number up to 2^63"),
        ({"scaling": "delayed", "margin": 140}, "margin 140 was asked; it is a number from 0 to 63"),
        ({"amax_floor": -1.0}, "amax_floor is -1.0, but must be 0 or a positive number"),
        ({"history": 0}, "history is 0, but must be at least 1 and at most 2^20"),
        ({"history": 10**13}, "history is 10000000000000, but must be at least 1 and at most 2^20"),
        *(
            ({"granularity": name}, f"granularity is '{name}', but must be tensor, row or ROWSxCOLUMNS such as 1x32")
            for name in ("2048x1024", "1x99999999999999999999999")
        ),
        (
            {"scaling": "delayed", "granularity": "row"},
            "scaling delayed was asked with granularity row and fp32 scales",
        ),
        (
            {"scaling": "delayed", "granularity": "1x32", "scale_format": "e8m0", "scale_rule": "floor"},
            "scaling delayed was asked with granularity 1x32 and e8m0 scales",
        ),
        ({"scale": ScaleSpec(**CODED), "format": "e4m3", "correction": "edne"}, "must be one of eden, null"),
        (
            {"scale": ScaleSpec(**CODED, four_over_six="mse")},
            "scale.four_over_six was asked for e4m3 elements, which have no 4 beside their 6: use format e2m1",
        ),
        (
            {"scale": ScaleSpec(**CODED), "correction": "eden"},
            "correction eden was asked with 1x16 e4m3 scales and zero_code zero; it corrects coded scales of one row",
        ),
        (
            {"scale": ScaleSpec(**CODED | {"granularity": "16x16"}, zero_code="one"), "correction": "eden"},
            "correction eden was asked with 16x16 e4m3 scales",
        ),
        (
            {"format": "e2m1", "scale": ScaleSpec(**CODED, four_over_six="mse"), "headroom": 0.75},
            "headroom 0.75 was asked with scale.four_over_six; set scale.block_target instead",
        ),
        (
            {"format": "e1m2", "scale": ScaleSpec(**CODED), "tensor_scale": TensorScaleSpec(2688.0)},
            "tensor_scale.target is 2688.0, but e4m3 scales of e1m2 elements reach 784.0, and larger blocks would "
            "saturate: set tensor_scale.target=784.0",
        ),
        (
            {"format": "e5m2", "scale": ScaleSpec(**CODED)},
            "e5m2 elements were asked under e4m3 scales alone, where a block of amax 1 has scale 0: set "
            "tensor_scale.target, 25690112.0 at most",
        ),
        (
            {"format": "e5m2", "scale": ScaleSpec(**CODED), "tensor_scale": TensorScaleSpec(50.0)},
            "tensor_scale.target is 50.0, which gives blocks of e5m2 elements the e4m3 scale 0: set a target "
            "above 56.0",
        ),
        (
            {"format": "e2m1", "scale": ScaleSpec(**CODED), "tensor_scale": TensorScaleSpec(2688.0)}
            | {"scaling": "delayed", "margin": 19},
            "tensor_scale.target is 2688.0, which gives blocks of e2m1 elements the e4m3 scale 0: set a target "
            "above 3072.0",
        ),
        (
            {"scale": ScaleSpec(**CODED | {"rule": "divided"})},
            "scale.rule divided was asked without a tensor_scale to divide by: set tensor_scale.target",
        ),
        (
            {"scale": ScaleSpec(**CODED), "tensor_scale": TensorScaleSpec(2688.0, "1x24")},
            "tensor_scale.granularity is 1x24, which does not hold whole blocks of 1x16: give multiples of both sizes",
        ),
        (
            {"scale": ScaleSpec(**CODED), "tensor_scale": TensorScaleSpec(2688.0, "1x128"), "scaling": "delayed"},
            "scaling delayed was asked with granularity 1x16 and e4m3 scales",
        ),
    ],
)
def test_operand_is_refused(fields: dict[str, Any], message: str) -> None:
    with refused(message):
        QuantSpec(**{"format": "e4m3", **({} if "scale" in fields else {"granularity": "tensor"}), **fields})


@pytest.mark.parametrize("fields", [{}, {"block_target": 4.0}])
def test_the_least_target_is_that_of_zeros(fields: dict[str, Any]) -> None:
    least = fields.get("block_target", 6.0) * 2.0**-10
    scale = ScaleSpec(**CODED, **fields)
    with refused(f"set a target above {least}"):
        QuantSpec("e2m1", scale=scale, tensor_scale=TensorScaleSpec(least))
    spec = QuantSpec("e2m1", scale=scale, tensor_scale=TensorScaleSpec(least * 1.01))
    assert quantize(torch.ones(1, 16), spec).dequantize().all()


@pytest.mark.parametrize("block", [0, 8, 48, 512, "64"])
def test_hadamard_block_names_the_known_sizes(block: Any) -> None:
    with pytest.raises(UserError, match="must be one of 16, 32, 64, 128, 256"):
        HadamardSpec(block=block)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Recipe("x", "", fprop=FP8), "but must be a GemmSpec"),  # type: ignore[arg-type]
        (lambda: Recipe("x", "", keep_bf16=None), "keep_bf16 is None, but must be a KeepBf16"),  # type: ignore[arg-type]
        (lambda: GemmSpec(input="e4m3"), "input is 'e4m3', but must be a QuantSpec or None"),  # type: ignore[arg-type]
        (lambda: GemmSpec(fast_accumulation=1), "fast_accumulation is 1, but must be True or False"),  # type: ignore[arg-type]
        (lambda: KeepBf16(names="layers.*"), "names is 'layers.*', but must be a tuple of str"),  # type: ignore[arg-type]
        (lambda: KeepBf16(names=(1,)), r"names is (1,), but must be a tuple of str"),  # type: ignore[arg-type]
        (lambda: KeepBf16(first_layers=True), "first_layers is True, but must be an integer"),
        (lambda: QuantSpec("e4m3", "tensor", headroom="1"), "headroom is '1', but must be a number"),  # type: ignore[arg-type]
        (lambda: OptimizerSpec(exp_avg="fp4"), "exp_avg is 'fp4', but must be one of fp32, bf16"),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_another_type_is_refused_in_python(build: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        build()


def test_an_integer_is_a_number() -> None:
    assert QuantSpec("e4m3", "tensor", headroom=1).headroom == 1.0


WIDE, NARROW = QuantSpec("e4m3", "1x64"), QuantSpec("e4m3", "32x32")
OUTER = dataclasses.replace(NVFP4, tensor_scale=TensorScaleSpec(2688.0, "128x128"))


@pytest.mark.parametrize(("one", "other"), [(WIDE, NARROW), (OUTER, NARROW), (OUTER, WIDE)])
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_scales_of_partial_sums_have_equal_columns(gemm: str, one: QuantSpec, other: QuantSpec) -> None:
    for pair in ((one, other), (other, one)):
        specs: dict[str, Any] = dict(zip(GEMM_OPERANDS[gemm], pair, strict=True))
        with refused(f"{gemm} has a scale for", "give them blocks of equal columns"):
            Recipe("r", "", **{gemm: GemmSpec(**specs)})
        with refused("rules[0]: "):
            Recipe("r", "", rules=(Rule(**{gemm: GemmSpec(**specs)}),))


@pytest.mark.parametrize(
    "other",
    [
        None,
        FP8,
        NVFP4,
        QuantSpec("e4m3", "row"),
        QuantSpec("e4m3", "128x64"),
        QuantSpec("e4m3", "1x32", "e8m0", "floor"),
        QuantSpec("e4m3", "1x32", scale_rule="amax_pow2"),
    ],
)
def test_other_scales_go_with_those_of_partial_sums(other: QuantSpec | None) -> None:
    recipe = Recipe("r", "", fprop=GemmSpec(input=WIDE, weight=other))
    assert LowPrecLinear(128, 16, recipe=recipe)(torch.ones(4, 128)).shape == (4, 16)


def test_hadamard_signs() -> None:
    with pytest.raises(UserError, match="signs is 'same', but must be one of random, none, nvfp4"):
        HadamardSpec(signs="same")
    with pytest.raises(UserError, match=r"signs nvfp4 has 16 entries, and block is 32: set hadamard.block=16"):
        HadamardSpec(32, signs="nvfp4")
    assert HadamardSpec(16, signs="nvfp4").fixed_signs == FIXED_SIGNS["nvfp4"]
    assert HadamardSpec(32, signs="none").fixed_signs == (1,) * 32
    assert HadamardSpec().fixed_signs is None


@pytest.mark.parametrize("target", [0.0, 1e-300, 1e300, float("nan")])
def test_a_tensor_scale_needs_a_positive_target(target: float) -> None:
    with refused(f"target is {target}, but must be a positive number such as 2688.0; fp32 takes 2^-63 to 2^63"):
        TensorScaleSpec(target)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"four_over_six": "rms"}, "four_over_six is 'rms', but must be one of mse, mae, abs_max, null"),
        ({"format": "fp32", "rule": "amax", "four_over_six": "mae"}, "four_over_six mae was asked for fp32 scales"),
        (
            {"format": "e8m0", "rule": "floor", "zero_code": "one"},
            "zero_code one was asked for e8m0 scales",
        ),
        ({"format": "fp32", "rule": "amax", "block_target": 4.0}, "block_target 4.0 was asked for fp32 scales"),
        ({"block_target": 0.0}, "block_target is 0.0, but must be a positive number such as 4.0, or null"),
        ({"block_target": 1e-320}, "block_target is 1e-320, but must be a positive number such as 4.0, or null; fp32"),
        ({"block_target": "6/4"}, "block_target is '6/4', but must be a number or None"),
    ],
)
def test_fields_of_coded_scales_are_refused_elsewhere(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        ScaleSpec(**{**CODED, **fields})


def test_outer_blocks_are_blocks() -> None:
    with pytest.raises(UserError, match="granularity is 'row', but must be tensor or ROWSxCOLUMNS such as 1x128"):
        TensorScaleSpec(2688.0, "row")
    outer = dataclasses.replace(NVFP4, tensor_scale=TensorScaleSpec(2688.0, "1x128"))
    assert outer.outer_block == (1, 128)
    assert not outer.has_tensor_amax
    assert NVFP4.outer_block is None
    assert NVFP4.has_tensor_amax


def test_a_correction_needs_a_transform_of_whole_blocks() -> None:
    eden = dataclasses.replace(NVFP4, scale=ScaleSpec(**CODED, zero_code="one"), correction="eden")
    with pytest.raises(UserError, match=r"dgrad.grad_output.correction is eden with blocks of 1x16 and no Hadamard"):
        Recipe("r", "", dgrad=GemmSpec(grad_output=eden))
    wide = dataclasses.replace(eden, scale=dataclasses.replace(eden.scale, granularity="1x32"))
    with pytest.raises(
        UserError, match=r"and a transform of 16, whose groups share a factor: set dgrad.hadamard.block"
    ):
        Recipe("r", "", dgrad=GemmSpec(grad_output=wide, hadamard=HadamardSpec(16)))
    Recipe("r", "", dgrad=GemmSpec(grad_output=eden, hadamard=HadamardSpec(16)))


def test_dequantized_operands_are_not_rounded_after_a_transform() -> None:
    with pytest.raises(UserError, match=r"dgrad.hadamard.output is operand and dgrad.weight.source is fprop"):
        Recipe(
            "r",
            "",
            fprop=GemmSpec(weight=FP8),
            dgrad=GemmSpec(weight=dataclasses.replace(FP8, source="fprop"), hadamard=HadamardSpec(output="operand")),
        )


def test_scales_may_be_rounded_stochastically_if_they_are_coded() -> None:
    with pytest.raises(UserError, match=r"^rounding stochastic was asked for fp32 scales"):
        ScaleSpec("1x16", rounding="stochastic")
    drawn = dataclasses.replace(NVFP4, scale=ScaleSpec("1x16", "e4m3", "product", rounding="stochastic"))
    assert drawn.random
    assert not NVFP4.random
    assert Recipe("r", "", fprop=GemmSpec(input=drawn)).random


def test_the_scales_fields_are_shorthand_for_a_row_of_its_own() -> None:
    row = ScaleSpec("1x32", "e8m0", "floor")
    spec = QuantSpec("e2m1", scale=row)
    assert spec == QuantSpec("e2m1", "1x32", "e8m0", "floor")
    assert (spec.granularity, spec.scale_format, spec.scale_rule, spec.amax_floor) == ("1x32", "e8m0", "floor", 0.0)
    assert dataclasses.replace(spec, scale_rule="ceil").scale == ScaleSpec("1x32", "e8m0", "ceil")
    assert dataclasses.replace(spec, scale=dataclasses.replace(row, rule="ceil")).scale_rule == "ceil"
    assert QuantSpec("e2m1", "1x32", scale=row) == spec
    with pytest.raises(UserError, match=r"both 1x32 and 1x16 were given as scale.granularity: give one of them"):
        QuantSpec("e2m1", "1x32", scale=ScaleSpec("1x16", "e4m3", "product"))
    with pytest.raises(UserError, match="an operand lacks its scale"):
        QuantSpec("e4m3")


@pytest.mark.parametrize(("gemm", "operand"), [("fprop", "weight"), ("dgrad", "grad_output"), ("wgrad", "input")])
def test_source_fprop_needs_an_operand_of_fprop(gemm: str, operand: str) -> None:
    again = dataclasses.replace(FP8, source="fprop")
    plain = GemmSpec() if gemm == "wgrad" else GemmSpec(weight=FP8)
    with pytest.raises(UserError, match=rf"{gemm}.{operand}.source is fprop, which dgrad.weight and wgrad.input can"):
        Recipe("r", "", **{"fprop": plain, gemm: GemmSpec(**{operand: again})})
    Recipe("r", "", fprop=GemmSpec(weight=FP8), dgrad=GemmSpec(weight=again))


@pytest.mark.parametrize(("gemm", "operand"), [("dgrad", "weight"), ("wgrad", "input")])
def test_source_fprop_needs_the_scale_of_fprop(gemm: str, operand: str) -> None:
    """A history with an entry a microbatch has moved on by the backward pass; one with an entry a step has not."""
    late = dataclasses.replace(NVFP4, scaling="delayed", history=1)
    again, moving = dataclasses.replace(FP8, source="fprop"), dataclasses.replace(late, history_update="microbatch")
    gemms = {gemm: GemmSpec(**{operand: again})}
    with pytest.raises(UserError, match=rf"^{gemm}.{operand}.source is fprop, .* fprop.{operand}.history_update is m"):
        Recipe("r", "", fprop=GemmSpec(**{operand: moving}), **gemms)
    Recipe("r", "", fprop=GemmSpec(**{operand: late}), **gemms)


def test_one_history_serves_a_tensor_scale() -> None:
    delayed = dataclasses.replace(NVFP4, scaling="delayed", history=50)
    assert Recipe("r", "", fprop=GemmSpec(input=delayed)).delayed_operands() == {"input": (50, "max", "step")}
    held = dataclasses.replace(delayed, history_rule="held", margin=1)
    assert held.with_current_scaling() == dataclasses.replace(NVFP4, history=50)


@pytest.mark.parametrize("fields", [{"first_layers": -1}, {"last_layers": -2}])
def test_negative_layer_counts(fields: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"^(first|last)_layers is -\d, but must be a number of layers, 0 or more"):
        KeepBf16(**fields)


@pytest.mark.parametrize(("gemm", "operand"), [("fprop", "grad_output"), ("dgrad", "input"), ("wgrad", "weight")])
def test_a_gemm_has_two_operands(gemm: str, operand: str) -> None:
    with pytest.raises(UserError, match=f"{gemm} multiplies .* {gemm}.{operand} must be left out"):
        Recipe("r", "", **{gemm: GemmSpec(**{operand: FP8})})  # type: ignore[arg-type]


def test_delayed_scaling_under_a_hadamard_transform() -> None:
    with pytest.raises(UserError, match=r"set dgrad.weight.scaling=current or dgrad.hadamard=null"):
        Recipe("r", "", dgrad=GemmSpec(weight=DELAYED, hadamard=HadamardSpec()))


def test_one_tensor_keeps_one_history() -> None:
    short = dataclasses.replace(DELAYED, history=16)
    with pytest.raises(UserError, match=r"weight is asked to keep two amax histories, .*in dgrad.*16"):
        Recipe("r", "", fprop=GemmSpec(weight=DELAYED), dgrad=GemmSpec(weight=short))
    # the format may differ: the history holds amax, not scales
    other = dataclasses.replace(DELAYED, format="e5m2", margin=2)
    recipe = Recipe("r", "", fprop=GemmSpec(weight=DELAYED), dgrad=GemmSpec(weight=other))
    assert recipe.delayed_operands() == {"weight": (1024, "max", "step")}


def test_delayed_operands_of_all_gemms() -> None:
    recipe = Recipe("r", "", fprop=GemmSpec(input=DELAYED), wgrad=GemmSpec(grad_output=DELAYED, input=FP8))
    assert recipe.delayed_operands() == {"input": (1024, "max", "step"), "grad_output": (1024, "max", "step")}


@pytest.mark.parametrize(
    ("granularity", "block"), [("tensor", None), ("row", None), ("1x32", (1, 32)), ("128x128", (128, 128))]
)
def test_block_of_a_tile(granularity: str, block: tuple[int, int] | None) -> None:
    assert QuantSpec("e4m3", granularity=granularity).block == block


def test_power_of_two_scales() -> None:
    assert not FP8.power_of_two_scale
    assert dataclasses.replace(FP8, scale_rule="amax_pow2").power_of_two_scale
    assert QuantSpec("e4m3", "1x32", "e8m0", "floor").power_of_two_scale


@pytest.mark.parametrize("spec", [QuantSpec, HadamardSpec, GemmSpec, KeepBf16, Recipe])
def test_frozen(spec: type) -> None:
    assert spec.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_a_transform_needs_a_quantized_operand() -> None:
    assert not Recipe("r", "").quantized
    with pytest.raises(UserError, match=r"dgrad has a Hadamard transform and no quantized operand: set dgrad.hadamard"):
        Recipe("r", "", dgrad=GemmSpec(hadamard=HadamardSpec()))
    assert Recipe("r", "", dgrad=GemmSpec(weight=FP8, hadamard=HadamardSpec())).quantized
