"""Specs by name: ``megatron_lowprec.specs`` and ``layer_spec`` take a recipe, overrides, flags, or a YAML file."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lowprec import UserError, get_recipe, specs
from tests.mcore.spec_loop import LAYERS, SEED, gpt

pytestmark = pytest.mark.usefixtures("world", "bounded")


def test_a_flag_behind_the_recipe_s_name() -> None:
    """--moe-fp8-dispatch reaches the layers, where it is refused: one rank has nothing to send."""
    experts = {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False}
    with pytest.raises(UserError, match="--moe-fp8-dispatch sends tokens to experts, and this model has none"):
        gpt(getattr(specs, "mxfp8 --moe-fp8-dispatch keep_bf16.last_layers=1"))
    with pytest.raises(UserError, match="--moe-fp8-dispatch does nothing at --expert-model-parallel-size 1"):
        gpt(getattr(specs, "mxfp8 --moe-fp8-dispatch"), **experts)


def recipes_of_layers(name: str) -> list[str]:
    """The recipe that each layer's linears run."""
    model = gpt(getattr(specs, name))
    return [layer.mlp.linear_fc1.bound_gemms.recipe.name for layer in model.decoder.layers]


def test_a_layer_spec_takes_the_name_of_a_recipe() -> None:
    from megatron_lowprec import layer_spec

    layers = gpt(layer_spec("mxfp8", seed=SEED)).decoder.layers
    gemms = get_recipe("mxfp8").gemms
    assert [layer.mlp.linear_fc1.bound_gemms.recipe.gemms for layer in layers] == [gemms] * LAYERS
    for other in (None, 7, get_recipe("mxfp8").fprop):
        with pytest.raises(UserError, match="as recipe: give a Recipe, the name of one, or a YAML file"):
            layer_spec(other)  # type: ignore[arg-type]


def test_a_spec_by_the_name_of_a_recipe() -> None:
    assert recipes_of_layers("mxfp8") == ["mxfp8"] * LAYERS
    assert vars(specs)["mxfp8"] is specs.mxfp8, "Megatron-LM reads the module's dictionary"


def test_a_spec_by_a_recipe_with_overrides() -> None:
    assert recipes_of_layers("mxfp8 keep_bf16.last_layers=1") == ["mxfp8+keep_bf16.last_layers=1", "bf16"]
    assert recipes_of_layers('mxfp8 keep_bf16.names=["decoder.layers.1.*"]')[1] == "bf16"


def test_a_spec_by_a_yaml_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nbase: mxfp8\nsummary: MXFP8 of mine\nkeep_bf16: {first_layers: 1}\n")
    assert recipes_of_layers(str(file)) == ["bf16", "mine"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mxfp4_rht_s", "there is no recipe 'mxfp4_rht_s': did you mean mxfp4_rht_sr"),
        ("mxfp8 keep_bf16.last_layer=1", "last_layer"),
        ("nowhere/mine.yaml", "nowhere/mine.yaml"),
    ],
)
def test_an_unknown_name_lists_what_was_found(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        getattr(specs, name)


def test_python_s_own_names_are_no_recipes() -> None:
    assert not hasattr(specs, "__wrapped__")
    assert not hasattr(specs, "_a_probe_of_a_shell")
