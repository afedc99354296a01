"""Names, files and overrides to recipes and back; every way to get it wrong has one line."""

import importlib
import json
import pickle
import types
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_lowprec import GemmSpec, HadamardSpec, QuantSpec, UserError, get_recipe, recipes
from megatron_lowprec.recipe.explain import describe_operand
from megatron_lowprec.recipe.parsing import (
    in_current_form,
    load_recipe,
    recipe_from_dict,
    recipe_to_dict,
    same_numerics,
)
from megatron_lowprec.recipe.quant_spec import ScaleSpec, TensorScaleSpec
from megatron_lowprec.shipped import SHIPPED
from tests.refusal import refused

CONFIGS = SHIPPED / "configs" / "recipes"


@pytest.mark.parametrize("name", recipes())
def test_dump_and_load(name: str) -> None:
    recipe = get_recipe(name)
    data = recipe_to_dict(recipe)
    assert recipe_from_dict(data) == recipe
    assert recipe_from_dict(json.loads(json.dumps(data))) == recipe
    assert recipe_from_dict(yaml.safe_load(yaml.safe_dump(data))) == recipe
    assert load_recipe(name) == recipe


def test_dump_is_complete_and_not_shared() -> None:
    data = recipe_to_dict(get_recipe("mxfp4_rht_sr"))
    assert data["dgrad"]["hadamard"] == {"block": 64, "signs": "random", "output": "fp32"}
    assert data["dgrad"]["weight"]["scale"]["amax_floor"] == 0.0
    assert data["keep_bf16"]["names"] == []
    data["dgrad"]["hadamard"]["block"] = 32
    assert get_recipe("mxfp4_rht_sr").dgrad.hadamard == HadamardSpec(64)


def test_gemms_of_one_recipe_and_training_state_of_another(tmp_path: Path) -> None:
    found, gemms, state = load_recipe("mxfp8+fp8_lm_o3"), load_recipe("mxfp8"), load_recipe("fp8_lm_o3")
    assert found.name == "mxfp8+fp8_lm_o3"
    assert (found.gemms, found.keep_bf16) == (gemms.gemms, gemms.keep_bf16)
    assert (found.optimizer, found.gradients, found.fp8_weights) == (state.optimizer, state.gradients, True)
    assert load_recipe("bf16+fp8_lm_o1", ["gradients.sum=format"]).name == "bf16+fp8_lm_o1+gradients.sum=format"
    path = tmp_path / "mine.yaml"
    path.write_text("base: mxfp8+fp8_lm_o2\ngradients: {sum: format}\n")
    assert load_recipe(str(path)).optimizer == load_recipe("fp8_lm_o2").optimizer
    with pytest.raises(UserError, match="from mxfp8, which has Megatron-core's"):
        load_recipe("fp8_lm_o1+mxfp8")
    with pytest.raises(UserError, match="there is no recipe 'fp8_lm_04'"):
        load_recipe("mxfp8+fp8_lm_04")


def test_stored_gradients_need_a_format() -> None:
    with pytest.raises(UserError, match="accumulation fp32 was asked with format none"):
        load_recipe("bf16", ["gradients.accumulation=fp32"])


def test_overrides_in_order() -> None:
    overrides = [
        "dgrad.hadamard.block=128",
        "wgrad.hadamard=null",
        "dgrad.hadamard.block=256",
        "keep_bf16.first_layers=2",
        'keep_bf16.names=["layers.3.*"]',
        "wgrad.input.headroom=1",
    ]
    recipe = load_recipe("mxfp4_rht_sr", overrides)
    assert recipe.dgrad.hadamard == HadamardSpec(256)
    assert recipe.wgrad.hadamard is None
    assert recipe.keep_bf16.first_layers == 2
    assert recipe.keep_bf16.names == ("layers.3.*",)
    assert recipe.wgrad.input is not None
    assert isinstance(recipe.wgrad.input.headroom, float)
    assert recipe.dgrad.weight == get_recipe("mxfp4_rht_sr").dgrad.weight
    assert recipe.name == "+".join(["mxfp4_rht_sr", *overrides])  # no log shows the published name for this
    assert get_recipe("mxfp4_rht_sr").dgrad.hadamard == HadamardSpec(64)


def test_an_operand_can_be_added_and_removed() -> None:
    recipe = load_recipe("bf16", ["dgrad.weight={format: e4m3, granularity: row}", "name=mine"])
    assert recipe.name == "mine"
    assert recipe.dgrad.weight is not None
    assert recipe.dgrad.weight.granularity == "row"
    assert load_recipe("mxfp4", ["dgrad.weight=null"]).dgrad.weight is None
    assert load_recipe("mxfp4", ["wgrad.hadamard.block=32"]).wgrad.hadamard == HadamardSpec(32)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dgrad.hadamard.block", "--recipe-override 'dgrad.hadamard.block' has no value: write FIELD=VALUE"),
        ("dgrd.weight=null", "the recipe has no field 'dgrd': did you mean dgrad"),
        ("dgrad.wieght=null", "dgrad has no field 'wieght': did you mean weight"),
        ("dgrad.weight.zzz=1", "dgrad.weight has no field 'zzz': it has format, scale"),
        ("dgrad.weight.scale_fromat=e8m0", "dgrad.weight has no field 'scale_fromat': did you mean scale_format"),
        ("dgrad.weight.tensor_scale={}", "dgrad.weight.tensor_scale lacks target: give it a value"),
        (
            "dgrad.weight.tensor_scale=2688",
            "tensor_scale is 2688, but must be a mapping of fields such as {target: 2688.0}",
        ),
        ("dgrad.weight.scale=1x64", "scale is '1x64', but must be a mapping of fields such as {granularity: 1x64}"),
        (
            "dgrad.weight={granularity: 1x32, scale: {granularity: 1x16}}",
            "dgrad.weight has both 1x32 and 1x16 as scale.granularity: give one of the two",
        ),
        (
            "dgrad.weight={scale: {rule: floor}, scale_rule: ceil}",
            "dgrad.weight has both floor and ceil as scale.rule: give one of the two",
        ),
        ("=3", "the recipe has no field ''"),
        ("dgrad=4", "dgrad is 4, but must be a mapping of fields"),
        ("name=3", "name is 3 (int), but must be str"),
        ("dgrad.hadamard.block=48", "dgrad.hadamard: block is 48, but must be one of 16, 32, 64, 128, 256"),
        ("dgrad.hadamard.block=big", "dgrad.hadamard.block is 'big' (str), but must be int"),
        ("dgrad.hadamard.block=true", "dgrad.hadamard.block is True (bool), but must be int"),
        ("dgrad.hadamard.block=", "dgrad.hadamard.block is None (NoneType), but must be int"),
        ("dgrad.hadamard.block.x=1", "dgrad.hadamard.block is {'x': 1} (dict), but must be int"),
        ("dgrad.weight.headroom=1.0e6", "as text: write 3.0e-4, and 1.0e+6 with a sign"),
        ("rules=[null, {first: 1}]", "rules[0] is empty: give it fields, or leave it out"),
        ("phases=[{from_step: 1, rules: [{first: 1}, null]}]", "phases[0].rules[1] is empty"),
        ("dgrad.weight.headroom=3e-1", "YAML reads a number without a point, such as 3e-4, as text: write 3.0e-4"),
        ("dgrad.weight.headroom=2.0", "headroom is 2.0, but must lie above 0"),
        ("dgrad.weight.rounding=[1]", "dgrad.weight.rounding is [1] (list), but must be str"),
        ("keep_bf16.names=layers.1.*", "keep_bf16.names is 'layers.1.*', but must be a list such as ['layers.1.*']"),
        ("keep_bf16.names=[3]", "keep_bf16.names is 3 (int), but must be str"),
        ("dgrad.weight=[", "--recipe-override dgrad.weight=[ is no valid YAML"),
        ("dgrad.input={format: e4m3}", "dgrad multiplies grad_output and weight; dgrad.input must be left out"),
        ("dgrad.input.format=e4m3", "dgrad multiplies grad_output and weight; dgrad.input must be left out"),
        (
            "fprop.input.format=e4m3",
            "recipe mxfp4_rht_sr does not quantize fprop.input: give --recipe a recipe that does, or override "
            "fprop.input.granularity as well",
        ),
        ("base=mxfp8", "the recipe has no field 'base': did you mean"),
        ("dgrad.input={format: e4m3, granularity: row}", "dgrad.input must be left out"),
        ("dgrad.weight.scaling=delayed", "scaling delayed was asked with granularity 1x32"),
    ],
)
def test_bad_override_is_one_line(override: str, message: str) -> None:
    with refused(message):
        load_recipe("mxfp4_rht_sr", [override])


def test_an_override_in_no_list_is_refused() -> None:
    with refused("overrides are 'fprop=null', but must be a list such as ['fprop=null']"):  # not each of its letters
        load_recipe("mxfp8", "fprop=null")


def test_old_field_names_are_read_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="tile is called granularity"):
        assert load_recipe("mxfp8", ["fprop.weight.tile=32x32"]).fprop.weight.granularity == "32x32"  # type: ignore[union-attr]
    stored = recipe_to_dict(get_recipe("fp8_blockwise"))
    for gemm in ("fprop", "dgrad", "wgrad"):
        for operand in filter(None, stored[gemm].values()):
            if isinstance(operand, dict) and "scale" in operand:
                operand["tile"] = operand["scale"].pop("granularity")
    with pytest.warns(UserWarning, match="tile is called granularity"):
        assert recipe_from_dict(stored) == get_recipe("fp8_blockwise")


def test_recipes_that_older_checkpoints_store_are_todays() -> None:
    """Their scales were fields of the operand; the file holds ``recipe_to_dict`` of such a release."""
    stored = yaml.safe_load((Path(__file__).parent / "recipes_with_flat_scales.yaml").read_text(encoding="utf-8"))
    assert len(stored) == 6
    for asked, content in stored.items():
        name, *overrides = asked.split()
        recipe = load_recipe(name, overrides)
        assert recipe_from_dict(content) == recipe
        assert in_current_form(content) == recipe_to_dict(recipe)
        assert recipe_from_dict(recipe_to_dict(recipe)) == recipe
    assert in_current_form({"fprop": 3}) == {"fprop": 3}


def test_scales_by_shorthand_and_as_a_row() -> None:
    short = load_recipe("mxfp8", ["fprop.input.scale_rule=floor", "name=mine"])
    assert load_recipe("mxfp8", ["fprop.input.scale.rule=floor", "name=mine"]) == short
    assert load_recipe("mxfp8", ["fprop.input={scale: {rule: floor}}", "name=mine"]) == short
    nvfp4 = "{format: e2m1, granularity: 1x16, scale_format: e4m3, scale_rule: product, tensor_scale: {target: 2688}}"
    spec = load_recipe("bf16", [f"fprop.input={nvfp4}"]).fprop.input
    assert spec == QuantSpec("e2m1", "1x16", "e4m3", "product", tensor_scale=TensorScaleSpec(2688.0))


def test_fields_of_the_fp4_family(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    scale = "{granularity: 1x16, format: e4m3, rule: divided, block_target: 6, four_over_six: mae, zero_code: one}"
    operand = f"{{format: e2m1, scale: {scale}, tensor_scale: {{target: 1536, granularity: 1x128}}, correction: eden}}"
    path.write_text(f"dgrad: {{grad_output: {operand}, hadamard: {{block: 32, output: operand}}}}\n")
    recipe = load_recipe(str(path))
    spec = recipe.dgrad.grad_output
    assert spec is not None
    assert spec.scale == ScaleSpec("1x16", "e4m3", "divided", block_target=6.0, four_over_six="mae", zero_code="one")
    assert (spec.tensor_scale, spec.correction) == (TensorScaleSpec(1536.0, "1x128"), "eden")
    assert recipe.dgrad.hadamard == HadamardSpec(32, output="operand")
    assert recipe_from_dict(json.loads(json.dumps(recipe_to_dict(recipe)))) == recipe
    changed = load_recipe(str(path), ["dgrad.grad_output.scale.four_over_six=null", "dgrad.hadamard.output=fp32"])
    assert changed.dgrad.grad_output == replace(spec, scale=replace(spec.scale, four_over_six=None))
    with pytest.raises(UserError, match="has no field 'four_over_sx': did you mean four_over_six"):
        load_recipe(str(path), ["dgrad.grad_output.scale.four_over_sx=mse"])
    for words in ("amax of a block to 6", "four over six by mae", "fp32 scale of 1x128 to 1536", "1 for 0", "eden"):
        assert words in describe_operand(spec)


def test_a_field_after_the_name_of_a_recipe() -> None:
    taken = load_recipe("bf16", ["fprop=mxfp8", "fprop.input.format=e5m2", "name=mine"]).fprop
    assert taken == load_recipe("mxfp8", ["fprop.input.format=e5m2"]).fprop


def test_an_override_below_a_value_that_is_no_mapping_is_one_line() -> None:
    with pytest.raises(UserError, match="hadamard"):
        load_recipe("mxfp4_rht_sr", ["dgrad.hadamard=64", "dgrad.hadamard.block=32"])


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_file_is_a_base_and_what_differs(tmp_path: Path) -> None:
    path = write(tmp_path, "base: mxfp4_rht_sr\ndgrad: {hadamard: {block: 128}}\nsummary: wide\n")
    recipe = load_recipe(path)
    assert (recipe.name, recipe.summary) == ("mine", "wide")
    assert recipe.dgrad.hadamard == HadamardSpec(128)
    assert recipe.wgrad == get_recipe("mxfp4_rht_sr").wgrad
    assert load_recipe(path, ["wgrad.hadamard=null"]).name == "mine+wgrad.hadamard=null"


def test_null_leaves_a_gemm_unquantized(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "base: mxfp4_rht_sr\nwgrad: null\n"))
    assert (recipe.wgrad, recipe.dgrad) == (GemmSpec(), get_recipe("mxfp4_rht_sr").dgrad)
    assert load_recipe("mxfp4_rht_sr", ["wgrad=null"]).wgrad == GemmSpec()
    two = ["wgrad=null", "wgrad.input={format: e4m3, granularity: row}"]
    assert load_recipe("mxfp4_rht_sr", two).wgrad == GemmSpec(input=QuantSpec("e4m3", "row"))


def test_a_changed_recipe_does_not_pass_for_its_base(tmp_path: Path) -> None:
    """Neither as a file nor by overrides; texts of one's own stay, as do those of an unchanged recipe."""
    base, change = get_recipe("mxfp8"), "dgrad: {grad_output: {format: e5m2}}\n"
    source = "changed from mxfp8 (arXiv 2506.08027)"
    path = write(tmp_path, f"base: mxfp8\n{change}")
    changed = load_recipe(path)
    assert (changed.summary, changed.source) == (f"changed from mxfp8: {base.summary}", source)
    again = load_recipe(path, ["wgrad=null"])
    assert (again.summary, again.source) == (changed.summary, source)
    overridden = load_recipe("mxfp8", ["dgrad.grad_output.format=e5m2"])
    assert (overridden.summary, overridden.source) == (changed.summary, source)
    assert load_recipe("bf16", ["dgrad.weight={format: e4m3, granularity: row}"]).source == "changed from bf16"

    own = load_recipe(write(tmp_path, f"base: mxfp8\n{change}summary: mine\nsource: my paper\n"))
    assert (own.summary, own.source) == ("mine", "my paper")
    assert load_recipe("mxfp8", ["dgrad.grad_output.format=e5m2", "source=x"]).source == "x"
    same = load_recipe(write(tmp_path, "base: mxfp8\n"))
    assert (same.summary, same.source) == (base.summary, base.source)
    assert load_recipe("mxfp8", ["fprop.input.format=e4m3"]).source == base.source
    assert same_numerics(recipe_from_dict({**recipe_to_dict(changed), "source": base.source}), changed)


def test_file_without_a_base(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "fprop: {weight: {format: e3m2, granularity: 1x32}}\n"))
    assert recipe.name == "mine"
    assert recipe.fprop.weight is not None
    assert recipe.fprop.weight.format == "e3m2"
    assert not recipe.dgrad.quantized


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds nothing, but a recipe file is a mapping such as 'base: mxfp4_rht_sr'"),
        ("- base\n", "holds a list, but a recipe file is a mapping"),
        ("base: [\n", "mine.yaml is no valid YAML"),
        ("base: ./other.yaml\n", "must be the name of a registered recipe, not a file"),
        ("base: mxpf4\n", "there is no recipe 'mxpf4': did you mean mxfp4"),
        ("base: mxfp4\nfprob: {}\n", "mine.yaml: the recipe has no field 'fprob': did you mean fprop"),
        ("bse: mxfp4\n", "mine.yaml: the recipe has no field 'bse': did you mean base"),
        ("fprop: {weight: {format: e4m3}}\n", "fprop.weight lacks granularity: give it a value"),
        ("base: mxfp4\nbase: mxfp8\n", "line 2, column 1: 'base' is there twice"),
        ("base: mxfp4\ndgrad: {weight: {format: e9m9}}\n", "mine.yaml: dgrad.weight: format is 'e9m9'"),
        ("num-layers: 2\nhidden-size: 64\n", "mine.yaml is the configuration of a model: give it as --config"),
        ("base: mxfp4\ndgrad: 3\n", "dgrad is 3, but must be a mapping of fields"),
        ("base: mxfp4\nname: 3\n", "name is 3 (int), but must be str"),
        # keys and bases that YAML does not read as text: 1, and "on", which is true
        ("base: 3\n", "3"),
        ("base: mxfp4\n1: 2\n", "1"),
        ("base: mxfp4\non: 2\n", "True"),
        ("base: mxfp4\ndgrad: {1: 2}\n", "1"),
    ],
)
def test_bad_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with refused(message):
        load_recipe(write(tmp_path, text))


def test_file_in_another_encoding_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes('base: mxfp4\nsummary: "größer"\n'.encode("latin-1"))
    with pytest.raises(UserError, match=r"mine\.yaml"):
        load_recipe(str(tmp_path / "mine.yaml"))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yml does not exist"):
        load_recipe(str(tmp_path / "none.yml"))
    with pytest.raises(UserError, match="recipe file configs/recipes/none does not exist"):
        load_recipe("configs/recipes/none")
    with pytest.raises(UserError, match=f"--recipe {tmp_path} is a folder: give a YAML file in it"):
        load_recipe(str(tmp_path))


def test_unsafe_yaml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no valid YAML"):
        load_recipe(write(tmp_path, "base: !!python/object/apply:os.getcwd []\n"))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_file(path: Path) -> None:
    recipe = load_recipe(str(path))
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe
    # overrides of a named recipe, or a published one, which says from where; never a copy of a named one
    data = yaml.safe_load(path.read_text())
    assert "base" in data or data["source"].startswith("arXiv ")
    assert not any(same_numerics(recipe, get_recipe(name)) for name in recipes())
    assert recipe.name not in recipes()  # no published name for something else


@pytest.mark.parametrize("data", [3, None, [], "mxfp4"])
def test_dict_of_another_type(data: object) -> None:
    with pytest.raises(UserError, match="must be a mapping of fields"):
        recipe_from_dict(data)  # type: ignore[arg-type]


def test_dict_that_lacks_fields() -> None:
    with pytest.raises(UserError, match="the recipe lacks name and summary"):
        recipe_from_dict({})


@pytest.mark.parametrize("module", ["megatron_lowprec.specs", "megatron_lowprec.te"])
def test_a_module_of_recipes_has_no_other_attributes(module: str) -> None:
    found = importlib.import_module(module)
    with pytest.raises(AttributeError, match="there is no recipe 'fp8_delayd': did you mean fp8_delayed"):
        found.fp8_delayd  # noqa: B018
    function = types.FunctionType((lambda: None).__code__, {})
    function.__qualname__ = "of_no_module"
    with pytest.raises(pickle.PicklingError):  # asks every module for the function's name
        pickle.dumps(function)


def test_a_wrong_name_in_an_import_is_explained() -> None:
    with pytest.raises(UserError, match="there is no recipe 'fp8_delayd': did you mean fp8_delayed"):
        from megatron_lowprec.specs import fp8_delayd  # noqa: F401
