"""Layers that a recipe keeps in bf16: the first, the last, and those that a glob names."""

from dataclasses import replace

import pytest

from megatron_lowprec import KeepBf16, UserError, get_recipe
from megatron_lowprec.recipe.coverage import check_sizes, keeps_all, unmatched_globs
from megatron_lowprec.recipe.explain import explain
from megatron_lowprec.recipe.layer_match import Layer, numbering_notes
from tests.recipe.sites import sites_of


def kept(keep: KeepBf16, layers: int = 4) -> list[str]:
    recipe = replace(get_recipe("mxfp8"), keep_bf16=keep)
    return [s.path for s in sites_of(layers) if not recipe.at(s.layer(layers)).quantized]


def test_nothing_is_kept_by_default() -> None:
    assert kept(KeepBf16()) == []


@pytest.mark.parametrize(
    ("first", "last", "numbers"),
    [(1, 0, {1}), (0, 1, {4}), (1, 1, {1, 4}), (2, 1, {1, 2, 4}), (4, 0, {1, 2, 3, 4}), (9, 9, {1, 2, 3, 4})],
)
def test_first_and_last_layers(first: int, last: int, numbers: set[int]) -> None:
    assert kept(KeepBf16(first, last)) == [s.path for s in sites_of(4) if s.layer_number in numbers]


@pytest.mark.parametrize(
    ("glob", "paths"),
    [
        ("layers.2.mlp.linear_fc1", ["layers.2.mlp.linear_fc1"]),
        ("layers.2.mlp.*", ["layers.2.mlp.linear_fc1", "layers.2.mlp.linear_fc2"]),
        ("*.linear_proj", [f"layers.{i}.self_attention.linear_proj" for i in (1, 2, 3, 4)]),
        ("layers.[13].mlp.linear_fc2", ["layers.1.mlp.linear_fc2", "layers.3.mlp.linear_fc2"]),
        ("layers.?.mlp.LINEAR_FC2", []),  # case counts
        ("linear_proj", []),  # a glob is of the whole path
        ("decoder.layers.1.mlp.*", ["layers.2.mlp.linear_fc1", "layers.2.mlp.linear_fc2"]),  # Megatron counts from 0
        ("decoder.layers.*.linear_proj", [f"layers.{i}.self_attention.linear_proj" for i in (1, 2, 3, 4)]),
        ("decoder.layers.3", []),  # a glob is of a linear layer
        ("decoder.layers.[01].*", []),  # no single number to count on
    ],
)
def test_globs(glob: str, paths: list[str]) -> None:
    assert kept(KeepBf16(names=(glob,))) == paths


def test_a_glob_of_layer_1_is_not_one_of_layer_10() -> None:
    assert {path.split(".")[1] for path in kept(KeepBf16(names=("layers.1.*",)), layers=12)} == {"1"}


def test_a_glob_without_effect_is_refused() -> None:
    recipe = replace(get_recipe("mxfp8"), keep_bf16=KeepBf16(names=("layers.1.*", "layers.9.*")))
    assert [glob for glob, _ in unmatched_globs(recipe, [site.layer(4) for site in sites_of(4)])] == ["layers.9.*"]
    with pytest.raises(
        UserError, match=r"'layers\.9\.\*', which matches no linear layer; layers are named like layers\.1"
    ):
        check_sizes(recipe, sites_of(4), 4, 1)


@pytest.mark.parametrize(
    ("glob", "number"),
    [
        ("*layers.1.mlp.*", 1),
        ("*.2.self_attention.linear_qkv", 2),
        ("layers.1.*", None),
        ("decoder.layers.1.*", None),
        ("*.linear_proj", None),
    ],
)
def test_a_glob_that_means_another_layer_to_megatron_is_named(glob: str, number: int | None) -> None:
    """Megatron's module names count layers from 0, so that a pattern copied from there hits the layer before."""
    recipe = replace(get_recipe("mxfp8"), keep_bf16=KeepBf16(names=(glob,)))
    notes = numbering_notes(recipe.keep_bf16.names, [site.path for site in sites_of(4)])
    assert len(notes) == (number is not None)
    for note in notes:
        assert note.startswith(f"{glob} matches layers.{number}.")
        assert note.endswith(f"write decoder.layers.{number} or layers.{(number or 0) + 1}")
        assert note in explain(recipe, sites_of(4), 4, "cpu")


def test_gemms_of_a_layer_by_megatron_s_name() -> None:
    recipe = get_recipe("mxfp8").in_bf16(["decoder.layers.0.mlp.linear_fc1.dgrad"])
    plain = [
        (layer, name)
        for layer in (1, 2)
        for name, gemm in recipe.at(Layer(layer, "mlp.linear_fc1", 2)).gemms.items()
        if not gemm.quantized
    ]
    assert plain == [(1, "dgrad")]


def test_a_recipe_that_is_left_nothing_to_quantize() -> None:
    ends, sites = get_recipe("fp8_current_bf16_ends"), sites_of(3)
    assert not keeps_all(ends, sites, 3)
    assert keeps_all(ends, sites_of(2), 2)
    assert keeps_all(replace(ends, keep_bf16=KeepBf16(names=("layers.*",))), sites, 3)
    assert not keeps_all(get_recipe("bf16"), sites, 3)  # which has nothing to leave out
