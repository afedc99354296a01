"""What a recipe answers for a layer and a time: rules, phases, and their forms in YAML, overrides and checkpoints."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec import GemmSpec, HadamardSpec, KeepBf16, UserError, get_recipe, load_recipe
from megatron_lowprec.recipe.coverage import LinearSite, check_sizes
from megatron_lowprec.recipe.explain import describe_phases, explain, phase_starts
from megatron_lowprec.recipe.layer_match import Layer, LayerMatch, Progress
from megatron_lowprec.recipe.parsing import recipe_from_dict, recipe_to_dict, same_numerics
from megatron_lowprec.recipe.recipe import BF16, Phase, Recipe, Rule
from tests.refusal import refused

FP4, FP8, MIXED = get_recipe("mxfp4_rht_sr"), get_recipe("mxfp8"), get_recipe("fp8_delayed")


def ruled(*rules: Rule, phases: tuple[Phase, ...] = ()) -> Recipe:
    return replace(FP4, rules=rules, phases=phases)


def layers_of(match: LayerMatch, layers: int = 10) -> list[int]:
    return [n for n in range(1, layers + 1) if match.matches(Layer(n, "mlp.linear_fc1", layers), "dgrad")]


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({}, [*range(1, 11)]),
        ({"first": 2}, [1, 2]),
        ({"last": 3}, [8, 9, 10]),
        ({"first": 1, "last": 2}, [1, 9, 10]),
        ({"last_fraction": 0.15}, [9, 10]),  # 1.5 layers
        ({"first": 0}, []),
        ({"last": 0}, []),
        ({"last_fraction": 0.0}, []),
        ({"layers": ()}, []),
        ({"layers": [], "modules": ["decoder.layers.0.*"]}, [1]),
        ({"first": 0, "layers": ("layers.3.*",)}, []),
        ({"first": 0, "last": 1}, [10]),
        ({"last_fraction": 0.1}, [10]),
        ({"last": 1, "last_fraction": 0.25}, [8, 9, 10]),
        ({"first": 2, "layers": ("layers.[23].*",)}, [2]),
        ({"layers": ("layers.3.*", "layers.10.mlp.linear_fc1.dgrad")}, [3, 10]),
        ({"layers": ("layers.3.*.wgrad",)}, []),
        ({"layers": ("decoder.layers.3.*",)}, [4]),
        ({"modules": ("decoder.layers.[01].*",)}, [1, 2]),
        ({"modules": ("*layers.3.*.dgrad",)}, [4]),
    ],
)
def test_a_match(fields: dict[str, Any], numbers: list[int]) -> None:
    assert layers_of(LayerMatch(**fields)) == numbers


def test_an_empty_alternative_is_no_other_rule() -> None:
    assert Rule(first=1, last=0, layers=["layers.1.*"], modules=[]) == Rule(first=1, layers=("layers.1.*",))  # type: ignore[arg-type]


@pytest.mark.parametrize("match", [{"first": 0}, {"last": 0}, {"last_fraction": 0.0}, {"layers": []}])
def test_a_rule_of_no_layers_changes_nothing_and_is_no_error(match: dict[str, Any]) -> None:
    data = {**recipe_to_dict(FP4), "rules": [{**match, "gemms": "bf16"}]}
    recipe = recipe_from_dict(data)
    check_sizes(recipe, SITES, 3, 1)
    assert recipe.at(SITES[0].layer(3)).gemms == FP4.gemms
    stored = recipe_to_dict(recipe)
    assert stored["rules"][0].items() >= match.items()
    assert recipe_from_dict(stored) == recipe


def test_fractions_are_those_that_were_written() -> None:
    """In binary 0.07 * 100 lies above 7, and would be rounded up to 8."""
    assert len(layers_of(LayerMatch(last_fraction=0.07), 100)) == 7
    assert Phase(from_fraction=0.07).begins(100) == 7
    assert Phase(from_fraction=0.82).begins(10) == 9


def test_the_first_rule_that_matches_gives_all_gemms_of_a_layer() -> None:
    recipe = ruled(Rule(layers=("*.linear_fc1",), fprop=FP8.fprop), Rule.of(BF16, last=1))
    fc1, fc2 = (recipe.at(Layer(4, f"mlp.{name}", 4)) for name in ("linear_fc1", "linear_fc2"))
    assert fc1.gemms == FP4.gemms | {"fprop": FP8.fprop}  # omitted GEMMs are the recipe's, not the next rule's
    assert fc2.gemms == BF16.gemms
    assert recipe.at(Layer(1, "mlp.linear_fc2", 4)).gemms == FP4.gemms
    assert recipe.at(Layer(2, "mlp.linear_fc2", 4)) is recipe.at(Layer(1, "mlp.linear_fc2", 4))
    assert (fc1.name, fc2.name) == (FP4.name, "bf16")


def test_the_phase_that_began_last_changes_the_recipe_itself() -> None:
    late = Phase(from_fraction=0.75, dgrad=GemmSpec(), rules=(Rule.of(FP8, first=1),))
    recipe = ruled(Rule.of(BF16, first=2), phases=(Phase(from_step=2, fprop=FP8.fprop), late))
    first, second, third = (Layer(n, "mlp.linear_fc1", 3) for n in (1, 2, 3))
    for steps, gemms in (((0, 1), {}), ((2, 5), {"fprop": FP8.fprop}), ((6, 99), {"dgrad": GemmSpec()})):
        for step in steps:
            now = Progress(step, 8)
            assert recipe.at(third, now).gemms == FP4.gemms | gemms
            assert recipe.at(second, now) == BF16
            assert recipe.at(first, now).gemms == (FP8 if step >= 6 else BF16).gemms
    assert [recipe.during(Progress(step, 8)) for step in (0, 2, 6)] == list(recipe.stages)
    assert recipe.at(third).gemms == FP4.gemms  # at the start no number of steps is needed
    with pytest.raises(UserError, match=r"from_fraction 0\.75 of a run whose number of steps is unknown: give it"):
        recipe.at(third, Progress(1))


def test_histories_are_those_of_all_rules_and_phases() -> None:
    weight_only = Rule(first=1, dgrad=MIXED.dgrad)
    assert set(ruled(weight_only).delayed_operands()) == {"grad_output", "weight"}
    assert set(ruled(phases=(Phase(from_step=1, fprop=MIXED.fprop),)).delayed_operands()) == {"input", "weight"}
    assert FP4.delayed_operands() == {}
    assert ruled(weight_only).at(Layer(2, "x", 2)).delayed_operands() == {}
    short = load_recipe("fp8_delayed", ["fprop.input.history=16", "wgrad.input.history=16"])
    with pytest.raises(UserError, match=r"input is asked to keep two amax histories"):
        replace(MIXED, rules=(Rule.of(short, first=1),))


def test_a_recipe_is_quantized_and_random_if_a_rule_or_a_phase_is() -> None:
    plain = get_recipe("bf16")
    assert not plain.quantized
    assert replace(plain, rules=(Rule.of(FP4, last=1),)).random
    assert replace(plain, phases=(Phase(from_step=9, wgrad=FP8.wgrad),)).quantized


def test_source_fprop_where_a_rule_or_a_phase_has_no_fprop() -> None:
    weight = replace(FP8.dgrad.weight, source="fprop")  # type: ignore[type-var]
    again = replace(FP8, dgrad=replace(FP8.dgrad, weight=weight))
    late = Phase(from_step=1, fprop=GemmSpec())
    for fields, place in (
        ({"rules": (Rule(last=1, fprop=GemmSpec()),)}, "rules[0]"),
        ({"phases": (Phase(from_step=1), replace(late, from_step=2))}, "phases[1]"),
        ({"phases": (Phase(from_step=1, rules=(Rule(first=1, fprop=GemmSpec()),)),)}, "phases[0].rules[0]"),
        (
            {"phases": (replace(late, dgrad=GemmSpec()),), "rules": (Rule(first=1, dgrad=again.dgrad),)},
            "rules[0] under",
        ),
    ):
        with pytest.raises(UserError, match=f"^{re.escape(place)}.*: give {re.escape(place)}.* its own dgrad, or set"):
            replace(again, **fields)
    replace(again, rules=(Rule.of(BF16, last=1),), phases=(replace(late, dgrad=GemmSpec()),))
    single = again.in_bf16(["layers.2.*.fprop"])
    with pytest.raises(UserError, match=r"^layers.2.mlp.linear_fc1: dgrad.weight.source is fprop"):
        single.at(Layer(2, "mlp.linear_fc1", 2))


def test_contradictions_of_a_rule_are_named_with_it() -> None:
    with pytest.raises(UserError, match=r"^rules\[0\]: dgrad multiplies .*; dgrad.input must be left out"):
        ruled(Rule(dgrad=GemmSpec(input=FP8.fprop.input)))
    short = load_recipe("fp8_delayed", ["fprop.input.history=16", "wgrad.input.history=16"])
    with pytest.raises(UserError, match=r"two amax histories, .* and, in phases\[0\].rules\[0\].fprop"):
        replace(MIXED, phases=(Phase(from_step=1, rules=(Rule.of(short, first=1),)),))


# ---- forms
TEXT = [
    "rules=[{first: 1, last: 2, gemms: bf16}, {layers: ['*.linear_qkv'], fprop: mxfp8, wgrad: null}]",
    "phases=[{from_fraction: 0.82, fprop: bf16, rules: [{last_fraction: 0.5, gemms: mxfp8}]}]",
]


def test_rules_and_phases_as_text_and_in_python() -> None:
    qkv = Rule(layers=("*.linear_qkv",), fprop=FP8.fprop, wgrad=GemmSpec())
    late = Phase(from_fraction=0.82, fprop=GemmSpec(), rules=(Rule.of(FP8, last_fraction=0.5),))
    found = load_recipe("mxfp4_rht_sr", TEXT)
    assert (found.rules, found.phases) == ((Rule.of(BF16, first=1, last=2), qkv), (late,))
    assert found.name == "+".join(["mxfp4_rht_sr", *TEXT])
    data = recipe_to_dict(found)
    assert data["rules"][1].keys() == {"layers", "fprop", "wgrad"}  # and nothing that it inherits
    assert recipe_from_dict(data) == found


def test_fields_of_a_gemm_change_the_recipe_s() -> None:
    wide, plain = (replace(FP4.dgrad, hadamard=found) for found in (HadamardSpec(128), None))
    recipe = load_recipe(
        "mxfp4_rht_sr",
        [
            "rules=[{first: 1, dgrad: {hadamard: {block: 128}}}, "
            "{last: 1, gemms: mxfp8, wgrad: {input: {format: e5m2}}}]",
            "phases=[{from_step: 10, dgrad: {hadamard: null}, rules: [{first: 1, dgrad: {weight: null}}]}]",
        ],
    )
    assert recipe.rules[0].gemms == {"dgrad": wide}
    assert recipe.rules[1].gemms == FP8.gemms | {"wgrad": load_recipe("mxfp8", ["wgrad.input.format=e5m2"]).wgrad}
    assert recipe.phases[0].gemms == {"dgrad": plain}
    assert recipe.phases[0].rules[0].gemms == {"dgrad": replace(plain, weight=None)}  # of the phase
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe
    assert load_recipe("mxfp8", ["rules=[{first: 1, gemms: null}]"]).rules == (Rule.of(BF16, first=1),)


def test_an_override_reaches_fields_that_a_file_s_rule_does_not_set(tmp_path: Path) -> None:
    changed, written = tmp_path / "changed.yaml", tmp_path / "written.yaml"
    rules = "rules: [{first: 1, dgrad: {hadamard: {block: 128}}}, {last: 1, dgrad: mxfp4_rht_sr}]\n"
    changed.write_text(f"base: mxfp4_rht_sr\n{rules}")
    written.write_text(f"base: mxfp4_rht_sr\ndgrad: {{grad_output: {{rounding: nearest_even}}}}\n{rules}")
    recipe = load_recipe(str(changed), ["dgrad.grad_output.rounding=nearest_even"])
    assert same_numerics(recipe, load_recipe(str(written)))
    found = [recipe.at(Layer(layer, "mlp.linear_fc1", 3)).dgrad.grad_output for layer in (1, 2, 3)]
    assert [each and each.rounding for each in found] == ["nearest_even", "nearest_even", "stochastic"]
    assert load_recipe(str(changed), ["dgrad=mxfp8"]).rules[0].dgrad == replace(
        get_recipe("mxfp8").dgrad, hadamard=HadamardSpec(128)
    )
    written.write_text("base: mxfp4_rht_sr\nphases: [{from_step: 9, dgrad: {weight: {rounding: half_away}}}]\n")
    with refused("phases[0].dgrad.weight lacks", "the overrides change what phases of the recipe build on"):
        load_recipe(str(written), ["dgrad.weight=null"])
    for override in ("rules=5", "phases=5"):  # fail by themselves
        with refused(match=f"^{override[:-2]} is 5, but must be a list$"):
            load_recipe("mxfp8", [override])


def test_an_override_changes_one_place_of_those_that_a_file_s_anchor_fills() -> None:
    path, override = "configs/recipes/ufp4.yaml", ["fprop.input.rounding=stochastic"]
    before, after = load_recipe(path), load_recipe(path, override)
    assert after.fprop == replace(before.fprop, input=replace(before.fprop.input, rounding="stochastic"))
    assert (after.dgrad, after.wgrad) == (before.dgrad, before.wgrad)


def test_rules_and_phases_that_are_null_are_none() -> None:
    assert load_recipe("mxfp4_rht_sr", [*TEXT, "rules=null", "phases=null", "name=x"]).all_rules == ()
    assert load_recipe("mxfp4_rht_sr", ["phases=[{from_step: 1, rules: null}]"]).phases == (Phase(from_step=1),)


def test_a_recipe_without_rules_is_stored_as_before_there_were_any() -> None:
    """Stored runs are compared by these fields."""
    assert not {"rules", "phases"} & recipe_to_dict(FP4).keys()
    ends = get_recipe("fp8_current_bf16_ends")
    assert recipe_to_dict(ends)["keep_bf16"] == {"first_layers": 1, "last_layers": 1, "names": []}


def test_keep_bf16_is_rules_in_front_of_others() -> None:
    recipe = replace(ruled(Rule.of(FP8)), keep_bf16=KeepBf16(first_layers=1, names=("*.linear_qkv",)))
    assert recipe.all_rules == (Rule.of(BF16, first=1), Rule.of(BF16, layers=("*.linear_qkv",)), Rule.of(FP8))
    assert KeepBf16().rules == ()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rules={first: 1}", "rules is {'first': 1}, but must be a list"),
        ("rules=[3]", "rules[0] is 3, but must be a mapping of fields"),
        ("rules=[{layer: ['*']}]", "rules[0] has no field 'layer': did you mean layers"),
        ("rules=[{layers: '*'}]", "rules[0].layers is '*', but must be a list such as ['layers.1.*']"),
        ("rules=[{first: -1}]", "rules[0]: first is -1, but must be a number of layers, 0 or more"),
        ("rules=[{last_fraction: 1.5}]", "rules[0]: last_fraction is 1.5, but must be a fraction of the layers"),
        ("rules=[{fprop: mxpf8}]", "there is no recipe 'mxpf8': did you mean mxfp8"),
        ("rules=[{dgrad: {input: {format: e4m3}}}]", "dgrad multiplies grad_output and weight; dgrad.input must be"),
        ("rules=[{gemms: {first: 1}}]", "rules[0].gemms is {'first': 1}, but must be the name of a recipe"),
        (
            "phases=[{from_step: 1, gemms: bf61}]",
            "phases[0].gemms takes registered recipes, no files: there is no recipe",
        ),
        ("rules=[{gemms: mxfp8_input}]", "rules[0].gemms takes registered recipes, no files: there is no recipe"),
        ("rules=[{gemm: bf16}]", "rules[0] has no field 'gemm': did you mean gemms"),
        (
            "rules=[{fprop: {grad_output: {format: e4m3}}}]",
            "rules[0]: fprop multiplies input and weight; fprop.grad_out",
        ),
        ("phases=[{from_step: 1, rules: [{dgrad: {wieght: null}}]}]", "phases[0].rules[0].dgrad has no field 'wieght'"),
        ("rules=[{gemms: bf16, fprop: {input: {format: e4m3}}}]", "rules[0].fprop.input lacks granularity: give it a"),
        ("phases=[{fprop: null}]", "phases[0]: a phase begins at from_step or at from_fraction of the run: give one"),
        ("phases=[{from_step: 1, from_fraction: 0.5}]", "give one of the two"),
        ("phases=[{from_step: 0}]", "from_step is 0, but must be at least 1"),
        ("phases=[{from_fraction: 82}]", "from_fraction is 82.0, but must lie between 0 and 1"),
    ],
)
def test_a_bad_rule_or_phase_is_named(override: str, message: str) -> None:
    with refused(message):
        load_recipe("mxfp8", [override])


# ---- in a model
SITES = [LinearSite(n, name, 64, 64, "column") for n in (1, 2, 3) for name in ("mlp.linear_fc1", "mlp.linear_fc2")]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule(layers=("layers.2.mlp.linear_fc3",)), "named like layers.2.mlp.linear_fc2"),
        (Rule(layers=("decoder.*fc1",)), r"named like .*; give a glob of module paths as modules"),
        (Rule(modules=("decoder.layers.3.mlp.linear_fc1",)), "named like decoder.layers.2.mlp.linear_fc1"),
        (Rule(first=4), "a rule {first: 4} of recipe mxfp4_rht_sr: first is 4, but the model has 3 layers; lower it"),
        (Rule(first=1, layers=("layers.2.*",)), r"a rule {layers: \['layers.2.\*'\], first: 1} .* matches no linear"),
        (Rule(last=1, modules=("decoder.layers.0.*",)), r"matches no linear layer; none .*: change one of the two"),
    ],
)
def test_a_rule_that_matches_nothing_is_refused_with_the_nearest_path(rule: Rule, message: str) -> None:
    for recipe in (ruled(rule), ruled(phases=(Phase(from_step=1, rules=(rule,)),))):
        with pytest.raises(UserError, match=message):
            check_sizes(recipe, SITES, 3, 1)


def test_sizes_are_checked_for_every_rule_and_phase() -> None:
    wide = load_recipe("mxfp8", [f"fprop.{operand}.granularity=1x128" for operand in ("input", "weight")])
    for recipe in (ruled(Rule.of(wide, last=1)), ruled(phases=(Phase(from_step=3, fprop=wide.fprop),))):
        with pytest.raises(UserError, match=r"fprop of layers\.\d\.mlp\.linear_fc1 has .* block 1x128, but 64 input"):
            check_sizes(recipe, SITES, 3, 1)


def test_phases_are_shown_in_the_order_in_which_they_begin() -> None:
    phases = (Phase(from_step=5000), Phase(from_fraction=0.5), Phase(from_step=9))
    recipe = ruled(phases=phases)
    late, half, early = "iteration 5,001, not in this run", "iteration 51, 50% of the run", "iteration 10"
    (line,) = describe_phases(recipe, Progress(60, 100))
    assert line == f"phases of the recipe: 3 from {early}; 2 from {half}; 1 from {late}; in force: 2"
    titles = [line for line in explain(recipe, SITES, 3, "cpu", train_iters=100).split("\n") if "iteration" in line]
    assert titles == [f"from {when}:" for when in (early, half, late)]
    assert phase_starts(recipe) == [(3, early), (1, "iteration 5,001"), (2, "50% of the run")]


def test_two_phases_at_one_step_are_refused_once_the_length_is_known() -> None:
    recipe = ruled(phases=(Phase(from_fraction=0.5), Phase(from_step=50)))
    recipe.check_phases(None)
    recipe.check_phases(98)
    message = "phases 1 and 2 of recipe mxfp4_rht_sr both begin at iteration 51 of 100, so phase 1 would never run"
    with pytest.raises(UserError, match=message):
        explain(recipe, SITES, 3, "cpu", train_iters=100)
    with pytest.raises(UserError, match=r"phases 2 and 3 .* both begin at iteration 51, so phase 2 would"):
        replace(recipe, phases=(*recipe.phases, Phase(from_step=50))).check_phases(None)


def test_an_explanation_has_a_part_for_each_phase() -> None:
    recipe = ruled(Rule.of(BF16, last_fraction=0.5), phases=(Phase(from_fraction=0.9, fprop=FP8.fprop),))
    for steps, title in ((None, "from 90% of the run:"), (10, "from iteration 10, 90% of the run:")):
        before, after = explain(recipe, SITES, 3, "cpu", train_iters=steps).split(f"\n{title}\n")
        for text in (before, after):
            assert "layer 1: mlp.linear_fc1 [64 -> 64]\n" in text
            assert "layers 2-3: mlp.linear_fc2 [64 -> 64]  kept in the compute dtype" in text
        assert "fprop  not quantized" in before
        assert "fprop  emulated" in after
