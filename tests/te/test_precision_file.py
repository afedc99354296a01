"""Megatron-LM's --te-precision-config-file as rules of a recipe."""

from pathlib import Path

import pytest

from megatron_lowprec import UserError, get_recipe, load_recipe
from megatron_lowprec.recipe.layer_match import Layer
from megatron_lowprec.te.precision_file import RECIPES, rules_of_precision_file
from megatron_lowprec.te.te_config import te_config
from megatron_lowprec.training.config.arguments import parse
from tests.refusal import refused

# as in Megatron-LM's TransformerEngineMixedPrecision.md
FILE = """
configs:
  bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
  mxfp8:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: mxfp8}
  ours:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: custom, custom_recipe_factory: megatron_lowprec.te.fp8_rowwise}
  default:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: mxfp8, override_quantized_autocast: false}
matchers:
  off: {config: mxfp8, type: glob, pattern: "*"}
  second: {config: default, type: glob, pattern: "decoder.layers.1.mlp.*", enabled: true}
  qkv: {config: bf16, type: glob, pattern: "*.linear_qkv", enabled: true}
  fc2: {config: ours, type: glob, pattern: "*fc2*", enabled: true}
  first: {config: mxfp8, type: glob, pattern: "*layers.0.*", enabled: true}
"""


def test_matchers_are_rules_over_the_paths_of_modules(tmp_path: Path) -> None:
    (tmp_path / "precision.yaml").write_text(FILE)
    given = ["--recipe", "fp8_current", "--te-precision-config-file", str(tmp_path / "precision.yaml")]
    (override,) = parse(given)[0].recipe_override
    recipe = load_recipe("fp8_current", [override])
    wanted = {
        (1, "self_attention.linear_qkv"): "bf16",
        (1, "self_attention.linear_proj"): "mxfp8",
        (1, "mlp.linear_fc2"): "fp8_rowwise",
        (2, "mlp.linear_fc2"): "fp8_current",  # left to the other flags, by the first matcher that is enabled
        (2, "self_attention.linear_proj"): "fp8_current",
        (3, "mlp.linear_fc2"): "fp8_rowwise",
    }
    for (number, name), of in wanted.items():
        assert recipe.at(Layer(number, name, 4)).gemms == get_recipe(of).gemms


RULED = "{base: fp8_current, rules: [{last: 1, gemms: fp8_blockwise}]}"


@pytest.mark.parametrize(
    ("recipe", "override", "last"),
    [
        (RULED, None, "fp8_blockwise"),
        ("{base: fp8_current}", "rules=[{last: 1, gemms: fp8_delayed}]", "fp8_delayed"),
        (RULED, "rules=[{last: 1, gemms: fp8_delayed}]", "fp8_delayed"),
        (RULED, "dgrad=null", "fp8_blockwise"),
    ],
)
def test_a_files_rules_are_in_front_of_all_others(tmp_path: Path, recipe: str, override: str | None, last: str) -> None:
    (tmp_path / "precision.yaml").write_text(FILE)
    (tmp_path / "mine.yaml").write_text(recipe)
    words = ["--recipe", str(tmp_path / "mine.yaml"), "--te-precision-config-file", str(tmp_path / "precision.yaml")]
    config, _, _ = parse([*words, *([] if override is None else ["--recipe-override", override])])
    found = load_recipe(config.recipe, config.recipe_override)
    assert found.name.endswith("+rules of precision.yaml")
    assert found.at(Layer(4, "self_attention.linear_proj", 4)).gemms == get_recipe(last).gemms
    assert found.at(Layer(4, "mlp.linear_fc2", 4)).gemms == get_recipe("fp8_rowwise").gemms


def test_a_file_without_an_enabled_matcher_adds_nothing_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "precision.yaml").write_text(FILE.replace(", enabled: true", ""))
    config, _, notes = parse(
        ["--recipe", "fp8_current", "--te-precision-config-file", str(tmp_path / "precision.yaml")]
    )
    assert config.recipe_override == []
    assert [note for note in notes if "no matcher is enabled, so it changes no layer" in note]


def test_recipes_are_those_of_transformer_engine() -> None:
    for (scaling, format), name in RECIPES.items():
        fields = te_config(get_recipe(name)).transformer_config()
        assert (fields["fp8_recipe"], fields["fp8"]) == (scaling, format)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('type: glob, pattern: "*.linear_qkv"', "type: regex, pattern: x", "matcher qkv has type 'regex'; only glob"),
        ("config: bf16, type", "config: fp8, type", "matcher qkv has config 'fp8', but configs has bf16, mxfp8, ours"),
        ("training_recipe: {}}", "training_recipe: {fp4_quantization_recipe: nvfp4}}", "config bf16 has fp4_quantizat"),
        ("recipe: mxfp8}", "recipe: delayed}", "config mxfp8 has recipe delayed in e4m3; rules have tensorwise hybrid"),
        ("recipe: mxfp8}", "recipe: mxfp8, fp8_param: true}", "config mxfp8 has fp8_param: True, which no rule"),
        ("training_recipe: {}}", "training_recipe: {}, evaluation_recipe: {fp8_format: hybrid}}", "evaluates as it tr"),
        ("type: TEQuantizationParams, tr", "type: Kitchen, tr", "'Kitchen'; only TEQuantizationParams is read"),
        ("megatron_lowprec.te.fp8_rowwise", "megatron_lowprec.te.fp8_row", "there is no recipe 'fp8_row'"),
        ("matchers:", "rules:", "must be a mapping with configs and matchers"),
    ],
)
def test_fields_without_a_rule_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in FILE
    (tmp_path / "precision.yaml").write_text(FILE.replace(old, new, 1))
    with refused(message):
        rules_of_precision_file(str(tmp_path / "precision.yaml"))


def test_it_needs_a_recipe_that_quantizes(tmp_path: Path) -> None:
    (tmp_path / "precision.yaml").write_text(FILE)
    with pytest.raises(UserError, match="--recipe bf16 quantizes none"):
        parse(["--te-precision-config-file", str(tmp_path / "precision.yaml")])
