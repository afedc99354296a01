"""The registered recipes are the published table, and the registry takes others'."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_lowprec import (
    BF16,
    GemmSpec,
    HadamardSpec,
    Phase,
    QuantSpec,
    Recipe,
    Rule,
    UserError,
    get_recipe,
    recipes,
    register_recipe,
)
from megatron_lowprec.recipe import registry
from tests.refusal import refused

# One operand a word: FORMAT:tile:scales[:more]; "-" is the compute dtype. Columns: fprop x w, dgrad dy w, wgrad dy x.
CURRENT, CURRENT_GRAD = "e4m3:tensor:amax", "e5m2:tensor:amax"
DELAYED, DELAYED_GRAD = CURRENT + ":max of 1024, margin 0", CURRENT_GRAD + ":max of 1024, margin 0"
ROW, TENSOR_POW2 = "e4m3:row:amax_pow2", "e4m3:tensor:amax_pow2"
ACT, WEIGHT = "e4m3:1x128:amax", "e4m3:128x128:amax"
ACT_POW2, WEIGHT_POW2 = "e4m3:1x128:amax_pow2", "e4m3:128x128:amax_pow2"
MX, MX_OCP, MX_E5M2 = "e4m3:1x32:round_up", "e4m3:1x32:floor", "e5m2:1x32:round_up"
FP4, FP4_SR = "e2m1:1x32:floor", "e2m1:1x32:floor:stochastic 16 bits, headroom 0.75"
MX_SQUARE = "e4m3:32x32:round_up"
NV, NV_SQUARE = "e2m1:1x16:product to 2688", "e2m1:16x16:product to 2688"
NV_SR = NV + ":stochastic 8 bits, headroom 1.0"
NVFP4 = ((NV, NV_SQUARE), (NV_SR, NV_SQUARE), (NV_SR, NV))
NV46, NV46_SQUARE = "e2m1:1x16:base to 1536, 4 or 6 by mse", "e2m1:16x16:base to 1536, 4 or 6 by mse"
NV46_SR = NV46 + ":stochastic 8 bits, headroom 1.0"
QUARTET = "e2m1:1x16:divided to 1536, 4 or 6 by mse, 0 is one"
EDEN = "e2m1:1x16:divided to 1554.4, amax to 6.07211, 0 is one, eden, scale stochastic"
EDEN_AGAIN = EDEN + ":from fprop"
FP8 = ((DELAYED, DELAYED), (DELAYED_GRAD, DELAYED), (DELAYED_GRAD, DELAYED))
DEEPSEEK = (
    "state bf16 bf16 fp32 nearest_even, gradients none fp32 fixed buffer, FP8 weights, "
    "attention_output e5m6, swiglu_input e4m3"
)
TABLE = {
    "bf16": ("- -", "- -", "- -", ""),
    "fp8_delayed": ((DELAYED, DELAYED), (DELAYED_GRAD, DELAYED), (DELAYED_GRAD, DELAYED), ""),
    "fp8_current": ((CURRENT, CURRENT), (CURRENT_GRAD, CURRENT), (CURRENT_GRAD, CURRENT), ""),
    "fp8_current_bf16_ends": (
        (CURRENT, CURRENT),
        (CURRENT_GRAD, CURRENT),
        (CURRENT_GRAD, CURRENT),
        "first 1, last 1 in bf16",
    ),
    "fp8_rowwise": ((ROW, ROW), (ROW, ROW), (ROW, ROW), ""),
    "fp8_rowwise_gw_hp": ((ROW, ROW), (ROW, TENSOR_POW2), "- -", ""),
    "fp8_blockwise": ((ACT, WEIGHT), (ACT, WEIGHT), (ACT, ACT), ""),
    "deepseek_v3": ((ACT, WEIGHT), (ACT, WEIGHT), (ACT, ACT), DEEPSEEK),
    "deepseek_v32": ((ACT_POW2, WEIGHT_POW2), (ACT_POW2, WEIGHT_POW2), (ACT_POW2, ACT_POW2), DEEPSEEK),
    "mxfp8": ((MX, MX), (MX, MX), (MX, MX), ""),
    "mxfp8_ocp": ((MX_OCP, MX_OCP), (MX_OCP, MX_OCP), (MX_OCP, MX_OCP), ""),
    "mxfp8_e5m2_grad": ((MX, MX), (MX_E5M2, MX), (MX_E5M2, MX), ""),
    "mxfp8_e5m2_weight": ((MX, MX_E5M2), (MX, MX_E5M2), (MX, MX), ""),
    "mxfp8_e5m2_act": ((MX_E5M2, MX), (MX, MX), (MX, MX_E5M2), ""),
    "mxfp8_2d": ((MX, MX_SQUARE), (MX, MX_SQUARE), (MX, MX), ""),
    "mxfp4": ("- -", (FP4, FP4), (FP4, FP4), ""),
    "mxfp4_rht": ("- -", (FP4, FP4), (FP4, FP4), "hadamard 64 random"),
    "mxfp4_sr": ("- -", (FP4_SR, FP4_SR), (FP4_SR, FP4_SR), ""),
    "mxfp4_rht_sr": ("- -", (FP4_SR, FP4_SR), (FP4_SR, FP4_SR), "hadamard 64 random"),
    "fp8_mxfp4_rht_sr": ((DELAYED, DELAYED), (FP4_SR, FP4_SR), (FP4_SR, FP4_SR), "hadamard 64 random"),
    "nvfp4": (*NVFP4, "wgrad hadamard 16 nvfp4 in operand, last 15% in bf16"),
    "nvfp4_all": (*NVFP4, "wgrad hadamard 16 nvfp4 in operand"),
    "nvfp4_bf16_tail": (*NVFP4, "wgrad hadamard 16 nvfp4 in operand, last 15% in bf16, from 82% fprop in bf16"),
    "nvfp4_four_over_six": (
        (NV46, NV46_SQUARE),
        (NV46_SR, NV46_SQUARE),
        (NV46_SR, NV46),
        "wgrad hadamard 16 nvfp4 in operand, last 15% in bf16",
    ),
    "quartet2": ((QUARTET, QUARTET), (EDEN, EDEN_AGAIN), (EDEN, EDEN_AGAIN), "hadamard 128 random"),
    "fp8_lm": (
        *FP8,
        "state e4m3 fp16 fp16 stochastic, gradients e4m3 fp32 fixed buffer",
    ),
    "fp8_lm_o1": (*FP8, "state fp32 fp32 fp32 stochastic, gradients e4m3 fp32 fixed fp32"),
    "fp8_lm_o2": (*FP8, "state e4m3 fp16 fp16 stochastic, gradients e4m3 fp32 fixed fp32"),
    "fp8_lm_o3": (*FP8, "state e4m3 fp16 fp16 stochastic, gradients e4m3 fp32 fixed fp32, FP8 weights"),
}


def words(spec: QuantSpec | None) -> str:
    if spec is None:
        return "-"
    text = f"{spec.format}:{spec.granularity}:{spec.scale_rule}"
    if spec.tensor_scale is not None:
        assert spec.tensor_scale.granularity == "tensor"
        text += f" to {spec.tensor_scale.target:g}"
    scale = spec.scale
    text += f", amax to {scale.block_target:g}" if scale.block_target else ""
    text += f", 4 or 6 by {scale.four_over_six}" if scale.four_over_six else ""
    text += f", 0 is {scale.zero_code}" if scale.zero_code != "zero" else ""
    text += f", {spec.correction}" if spec.correction else ""
    text += f", scale {scale.rounding}" if scale.rounding != "nearest_even" else ""
    if spec.rounding != "nearest_even":
        text += f":{spec.rounding} {spec.random_bits} bits, headroom {spec.headroom}"
    if spec.source != "original":
        text += f":from {spec.source}"
    if spec.scaling == "delayed":
        text += f":{spec.history_rule} of {spec.history}, margin {spec.margin}"
    of_rules = {"floor": "e8m0", "round_up": "e8m0", "product": "e4m3", "base": "e4m3", "divided": "e4m3"}
    assert spec.scale_format == of_rules.get(spec.scale_rule, "fp32")
    torchao = spec.scale_rule == "amax_pow2" and spec.block is None
    assert spec.amax_floor == (1e-12 if torchao else 0.0)
    assert spec.rounding == "stochastic" or spec.headroom == 1.0
    return text


def row_of(recipe: Recipe) -> tuple[object, ...]:
    gemms = recipe.gemms
    columns = [
        (words(gemms["fprop"].input), words(gemms["fprop"].weight)),
        (words(gemms["dgrad"].grad_output), words(gemms["dgrad"].weight)),
        (words(gemms["wgrad"].grad_output), words(gemms["wgrad"].input)),
    ]
    transforms: dict[HadamardSpec, list[str]] = {}
    for name, gemm in gemms.items():
        if gemm.hadamard is not None:
            transforms.setdefault(gemm.hadamard, []).append(name)
    more = [
        f"{'' if of == ['dgrad', 'wgrad'] else ' '.join(of) + ' '}hadamard {hadamard.block} {hadamard.signs}"
        f"{' in operand' if hadamard.output == 'operand' else ''}"
        for hadamard, of in transforms.items()
    ]
    keep = recipe.keep_bf16
    if keep.first_layers or keep.last_layers:
        more.append(f"first {keep.first_layers}, last {keep.last_layers} in bf16")
    assert keep.names == ()
    for rule in recipe.rules:
        assert rule == Rule.of(BF16, last_fraction=rule.last_fraction)
        more.append(f"last {rule.last_fraction:.0%} in bf16")
    for phase in recipe.phases:
        assert phase == Phase(from_fraction=phase.from_fraction, fprop=GemmSpec())
        more.append(f"from {phase.from_fraction:.0%} fprop in bf16")
    if recipe.changes_training:
        state, gradients = recipe.optimizer, recipe.gradients
        more.append(
            f"state {state.exp_avg} {state.exp_avg_sq} {state.master} {state.rounding}, "
            f"gradients {gradients.format} {gradients.sum} {gradients.mu} {gradients.accumulation}"
            f"{', FP8 weights' if recipe.fp8_weights else ''}"
            f"{''.join(f', {name} {form}' for name, form in recipe.activations.formats.items() if form != 'none')}"
        )
    return (*("- -" if column == ("-", "-") else column for column in columns), ", ".join(more))


def test_the_registry_is_the_table() -> None:
    assert recipes() == tuple(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_recipe_is_its_row(name: str) -> None:
    recipe = get_recipe(name)
    assert recipe.name == name
    assert row_of(recipe) == TABLE[name]
    assert recipe.summary
    assert recipe.source or name == "bf16"


@pytest.mark.parametrize(
    ("asked", "offered"),
    [
        ("mxpf4", "mxfp4"),
        ("mxfp4_sr_rht", "mxfp4_rht_sr"),
        ("fp8_curent", "fp8_current"),
        ("MXFP8", "mxfp8"),
        ("", None),
    ],
)
def test_unknown_recipe_offers_the_nearest(asked: str, offered: str | None) -> None:
    with pytest.raises(UserError) as error:
        get_recipe(asked)
    message = str(error.value)
    assert message.startswith(f"there is no recipe {asked!r}: ")
    assert "\n" not in message
    assert (offered in message.split(": ")[1]) if offered else message.endswith("--list-recipes prints them all")


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_RECIPES", dict(registry._RECIPES))
    return


@pytest.mark.usefixtures("own_registry")
def test_register_recipe() -> None:
    mine = Recipe("mine", "for a test", dgrad=GemmSpec(grad_output=QuantSpec("e3m2", granularity="1x32")))
    assert register_recipe(mine) is mine
    assert get_recipe("mine") == mine
    assert recipes()[-1] == "mine"
    register_recipe(replace(mine))  # the same again does no harm
    with pytest.raises(UserError, match="'mine' is registered already"):
        register_recipe(replace(mine, summary="another"))
    assert get_recipe("mine") == mine
    with pytest.raises(UserError, match="'mxfp4' is registered already"):
        register_recipe(Recipe("mxfp4", "not the published one"))


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("name", ["", "a/b", "x.yaml", "x.yml"])
def test_a_name_that_load_recipe_reads_as_a_path_is_refused(name: str) -> None:
    with refused(f"a recipe is named {name!r}, which is empty or a path"):
        register_recipe(Recipe(name, "for a test"))
    assert name not in recipes()


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("as_function", [False, True])
def test_entry_points_are_registered(monkeypatch: pytest.MonkeyPatch, as_function: bool) -> None:
    theirs = Recipe("theirs", "from a plugin")

    class EntryPoint:
        def load(self) -> object:
            return (lambda: theirs) if as_function else theirs

    monkeypatch.setattr(registry, "_entry_points_loaded", False)
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint()] if "lowprec" in group else [])
    assert get_recipe("theirs") == theirs


def test_list_has_a_line_each() -> None:
    lines = registry.list_table().splitlines()
    assert [line.split()[0] for line in lines] == list(TABLE)
    assert "[arXiv 2502.20586]" in lines[list(TABLE).index("mxfp4_rht_sr")]
