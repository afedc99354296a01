"""Which layers a recipe reaches, which sizes it refuses, and what is said about it."""

import re
from dataclasses import replace
from itertools import dropwhile, takewhile
from typing import Any

import pytest

from megatron_lowprec import GemmSpec, KeepBf16, QuantSpec, Recipe, UserError, get_recipe, recipes
from megatron_lowprec.linear.backends.emulated.why_not import check_accumulator, fast_gemms
from megatron_lowprec.linear.backends.table import choose, native_gemms
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.recipe.coverage import (
    LinearSite,
    check_fp8_gather,
    check_primary_weights,
    check_sizes,
    keeps_all,
    primary_weight_spec,
    unmatched_globs,
    why_not_gathered,
)
from megatron_lowprec.recipe.explain import explain
from megatron_lowprec.recipe.layer_match import Layer, numbering_notes
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.quant_spec import TensorScaleSpec
from megatron_lowprec.recipe.registry import FP8_128X128, FP8_128X128_POW2, FP8_CURRENT, FP8_DELAYED
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from tests.refusal import refused


def sites_of(layers: int, hidden: int = 512, ffn: int = 2048) -> list[LinearSite]:
    return [
        LinearSite(layer, name, inputs, outputs, split)  # type: ignore[arg-type]
        for layer in range(1, layers + 1)
        for name, inputs, outputs, split in (
            ("self_attention.linear_qkv", hidden, 3 * hidden, "column"),
            ("self_attention.linear_proj", hidden, hidden, "row"),
            ("mlp.linear_fc1", hidden, ffn, "column"),
            ("mlp.linear_fc2", ffn, hidden, "row"),
        )
    ]


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


@pytest.mark.parametrize("name", recipes())
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_usual_sizes_pass(name: str, tensor_parallel: int) -> None:
    check_sizes(get_recipe(name), sites_of(2), 2, tensor_parallel)


def refusal(name: str, site: LinearSite, tensor_parallel: int = 1, recipe: Recipe | None = None) -> str:
    with pytest.raises(UserError) as error:
        check_sizes(recipe or get_recipe(name), [site], 2, tensor_parallel)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["first_layers", "last_layers"])
def test_more_layers_kept_than_there_are(name: str) -> None:
    recipe = replace(get_recipe("mxfp8"), keep_bf16=KeepBf16(**{name: 3}))
    site = LinearSite(1, "mlp.linear_fc1", 64, 64, "column")
    assert f"keep_bf16.{name} is 3, but the model has 2 layers" in refusal("", site, recipe=recipe)


def test_a_recipe_that_is_left_nothing_to_quantize() -> None:
    ends, sites = get_recipe("fp8_current_bf16_ends"), sites_of(3)
    assert not keeps_all(ends, sites, 3)
    assert keeps_all(ends, sites_of(2), 2)
    assert keeps_all(replace(ends, keep_bf16=KeepBf16(names=("layers.*",))), sites, 3)
    assert not keeps_all(get_recipe("bf16"), sites, 3)  # which has nothing to leave out


def test_refusal_names_layer_gemm_size_and_multiple() -> None:
    message = refusal("mxfp8", LinearSite(1, "mlp.linear_fc1", 80, 96, "column"))
    assert "recipe mxfp8: fprop of layers.1.mlp.linear_fc1 has" in message
    assert "80 input features are no multiple of 32" in message
    assert 'keep_bf16.names=["layers.1.mlp.linear_fc1"]' in message


def test_refusal_names_all_layers_that_do_not_fit() -> None:
    """Taken as it is, the override that it advises is accepted."""
    sites = [
        LinearSite(number, name, *sizes, "column")
        for number, width in ((1, 80), (2, 80), (3, 96))
        for name, sizes in (("mlp.linear_fc1", (64, 80)), ("mlp.linear_fc2", (width, 64)), ("linear_qkv", (64, 64)))
    ]
    recipe = load_recipe("mxfp8", ['keep_bf16.names=["*.linear_qkv"]'])
    with pytest.raises(UserError, match="keep the 5 such layers in bf16") as error:
        check_sizes(recipe, sites, 3, 1)
    (override,) = re.findall(r"--recipe-override '(.*)'", str(error.value))
    assert override == (
        'keep_bf16.names=["*.linear_qkv", "layers.*.mlp.linear_fc1", "layers.1.mlp.linear_fc2", '
        '"layers.2.mlp.linear_fc2"]'
    )
    check_sizes(load_recipe("mxfp8", [override]), sites, 3, 1)


def test_refusal_of_all_layers_advises_no_recipe_that_quantizes_nothing() -> None:
    sites = [LinearSite(number, "mlp.linear_fc1", 80, 80, "column") for number in (1, 2)]
    with pytest.raises(UserError, match=r"give another --recipe: this one's blocks fit none of the 2 layers$"):
        check_sizes(get_recipe("mxfp8"), sites, 2, 1)


V2_SCALES = "configs/recipes/tetrajet_v2_scales_only.yaml"


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "split", "tensor_parallel", "told"),
    [
        ("mxfp4", 80, 96, "column", 1, None),  # forward is bf16, wgrad contracts tokens: input features are free
        ("mxfp4", 96, 80, "column", 1, "dgrad of .* 80 output features are no multiple of 32"),
        ("mxfp4_rht", 64, 96, "column", 1, "dgrad of .* hadamard block 64, but 96 output features"),
        ("mxfp4_rht", 64, 192, "column", 3, None),
        ("mxfp4_rht", 64, 192, "column", 2, "96 output features on each of 2 tensor-parallel ranks"),
        ("mxfp4_rht", 64, 192, "row", 2, None),  # cuts the input features, which no backward GEMM blocks
        ("mxfp8", 96, 64, "row", 2, "48 input features on each of 2 tensor-parallel ranks are no multiple of 32"),
        ("fp8_blockwise", 200, 192, "column", 1, None),  # partial blocks at the ends
        ("fp8_blockwise", 200, 384, "column", 3, None),
        ("fp8_blockwise", 128, 384, "column", 2, "128x128, but 192 output features on each of 2 .* multiple of 128"),
        ("fp8_blockwise", 384, 192, "row", 2, "128x128, but 192 input features on each of 2 .* multiple of 128"),
        ("nvfp4_all", 72, 88, "column", 1, None),  # partial blocks at the ends
        ("nvfp4_all", 96, 96, "column", 3, None),
        ("nvfp4_all", 96, 96, "column", 4, "16x16, but 24 output features on each of 4 .* multiple of 16"),
        ("nvfp4_all", 96, 96, "row", 4, "block 16x16, but 24 input features on each of 4 .* multiple of 16"),
        ("quartet2", 96, 192, "column", 1, "dgrad of .* hadamard block 128, but 192 output features"),
        ("quartet2", 96, 256, "row", 2, None),
        (V2_SCALES, 384, 256, "row", 1, None),
        (V2_SCALES, 384, 256, "row", 2, "block 1x128, but 192 input features on each of 2 .* multiple of 128"),
        ("fp8_current", 33, 7, "column", 1, None),
        ("fp8_rowwise", 33, 7, "column", 1, None),
        ("bf16", 33, 7, "column", 1, None),
    ],
)
def test_sizes(name: str, inputs: int, outputs: int, split: str, tensor_parallel: int, told: str | None) -> None:
    site = LinearSite(1, "mlp.linear_fc1", inputs, outputs, split)  # type: ignore[arg-type]
    recipe = load_recipe(name)
    if told is None:
        check_sizes(recipe, [site], 2, tensor_parallel)
    else:
        assert re.search(told, refusal(name, site, tensor_parallel, recipe))


def test_tensor_parallel_size_that_does_not_divide() -> None:
    message = refusal("mxfp8", LinearSite(1, "mlp.linear_fc1", 64, 96, "column"), tensor_parallel=5)
    assert "has 96 output features, which --tensor-model-parallel-size 5 does not divide" in message


def test_kept_layers_may_have_any_size() -> None:
    recipe = get_recipe("fp8_current_bf16_ends")
    check_sizes(replace(recipe, fprop=get_recipe("mxfp8").fprop), [LinearSite(1, "x", 33, 7, "column")], 2, 1)


def test_shards_that_the_random_stream_cannot_place_are_refused() -> None:
    """A shard's draws begin at a multiple of 8 along the contracted dimension; 24 / 2 does not."""
    row = QuantSpec("e4m3", granularity="row", rounding="stochastic")
    recipe = Recipe("r", "", dgrad=GemmSpec(weight=row))
    message = refusal("", LinearSite(1, "mlp.linear_fc1", 24, 24, "column"), 2, recipe)
    assert "12 output features on each of 2 tensor-parallel ranks" in message


def test_outer_blocks_lie_within_a_rank() -> None:
    spec = QuantSpec("e2m1", "1x16", "e4m3", "product", tensor_scale=TensorScaleSpec(2688.0, "1x128"))
    recipe, site = Recipe("r", "", fprop=GemmSpec(input=spec)), LinearSite(1, "mlp.linear_fc1", 192, 64, "row")
    check_sizes(recipe, [site], 2, 1)
    assert "input block 1x128, but 96 input features on each of 2 " in refusal("", site, 2, recipe)


# ---- --explain-recipe
@pytest.mark.parametrize("name", [name for name in recipes() if not get_recipe(name).phases])
def test_explanation_has_every_layer_gemm_and_operand(name: str) -> None:
    recipe, sites = get_recipe(name), sites_of(4)
    lines = explain(recipe, sites, 4, "cpu").splitlines()
    assert lines[0] == f"recipe {name}: {recipe.summary}"
    covered: set[tuple[int, str]] = set()
    for start, line in enumerate(lines):
        if not line.startswith("layer"):
            continue
        which, _, rest = line.partition(": ")
        ranges = [part.split("-") for part in which.partition(" ")[2].split(", ")]
        numbers = {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}
        linear, sizes = rest.split(" [")[0], rest.split("[")[1].split("]")[0]
        here = [s for s in sites if s.name == linear and s.layer_number in numbers]
        assert {f"{s.in_features} -> {s.out_features}" for s in here} == {sizes}
        covered |= {(s.layer_number, s.name) for s in here}
        is_kept = {not recipe.at(s.layer(4)).quantized for s in here}
        assert is_kept == {"kept in the compute dtype" in line}
        if is_kept == {True}:
            continue
        after = dropwhile(lambda other: other.startswith("layer"), lines[start:])
        text = "\n".join(takewhile(lambda other: other.startswith("  "), after))
        for gemm, operands in GEMM_OPERANDS.items():
            spec: GemmSpec = getattr(recipe, gemm)
            about = text[text.index(f"  {gemm}  ") :].split(
                "\n  " + {"fprop": "dgrad", "dgrad": "wgrad"}.get(gemm, "?")
            )[0]
            assert ("emulated" if spec.quantized else "not quantized") in about
            for operand in operands if spec.quantized else ():
                quant: QuantSpec | None = getattr(spec, operand)
                row = next(entry for entry in about.splitlines() if entry.strip().startswith(operand))
                wanted = (
                    ("compute dtype",) if quant is None else (quant.format.upper(), quant.granularity, quant.scale_rule)
                )
                assert all(word in row for word in wanted)
                if quant is not None:
                    assert quant.rounding.replace("_", " ") in row
            if spec.hadamard is not None:
                assert f"Hadamard {spec.hadamard.block} ({spec.hadamard.signs} signs)" in about
            if any((s := getattr(spec, o)) is not None and s.headroom != 1 for o in operands):
                assert "accumulator x 1.77778" in about  # 16/9
    assert covered == {(s.layer_number, s.name) for s in sites}


def test_explanation_of_layers_that_are_not_consecutive() -> None:
    """Experts in every other layer: a range would name layers that have none."""
    sites = [LinearSite(n, "mlp.experts.linear_fc1", 64, 64, "column") for n in (2, 4)]
    sites.append(LinearSite(3, "mlp.linear_fc1", 64, 64, "column"))
    lines = [line for line in explain(get_recipe("mxfp8"), sites, 4, "cpu").splitlines() if "experts" in line]
    assert not any(line.startswith("layers 2-4:") for line in lines)


def test_explanation_shows_equal_layers_once_and_others_apart() -> None:
    lines = explain(get_recipe("mxfp8"), sites_of(4), 4, "cpu").splitlines()
    assert sum(line.startswith("  fprop") for line in lines) == 1
    lines = explain(get_recipe("mxfp8"), sites_of(4), 4, "cpu", ["layers.2.mlp.linear_fc1.dgrad"]).splitlines()
    assert sum(line.startswith("  fprop") for line in lines) == 2
    apart = next(n for n, line in enumerate(lines) if line.startswith("layer 2: mlp.linear_fc1"))
    assert "  dgrad  not quantized" in lines[apart:]
    assert "layers 1, 3-4: mlp.linear_fc1 [512 -> 2048]" in lines


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fp8_delayed", "emulated (no GPU here; hopper_fp8 on sm89 and later)"),
        ("fp8_blockwise", "emulated (no GPU here; hopper_fp8 on sm90)"),
        ("mxfp8", "emulated (no GPU here; blackwell_mx on sm100, sm103, sm120)"),
    ],
)
def test_explanation_without_a_gpu_names_those_that_run_natively(name: str, said: str) -> None:
    assert f"  fprop  {said}, " in explain(get_recipe(name), sites_of(1, 256), 1, "cpu")
    assert "no GPU here" not in explain(get_recipe(name), sites_of(1, 256), 1, "sm90")


@pytest.mark.parametrize("arch", ["cpu", "sm90"])
def test_explanation_is_of_the_model_as_it_runs(arch: str) -> None:
    recipe, sites = get_recipe("fp8_current"), sites_of(1, 256, 1040)
    native = "hopper_fp8 on sm89 and later" if arch == "cpu" else "fprop  hopper_fp8"
    said = explain(recipe, sites, 1, arch)
    assert native in said
    assert "no multiple" not in said
    assert "this one is float32" in explain(recipe, sites, 1, arch, dtype="float32")
    assert native not in explain(recipe, sites, 1, arch, dtype="float32")
    assert "fprop  emulated (asked)" in explain(recipe, sites, 1, arch, emulate=True)
    assert native not in explain(recipe, sites, 1, arch, emulate=True)
    said = explain(recipe, sites, 1, arch, tensor_ranks=2)  # linear_fc1 has 520 output features on a rank
    assert native in said
    assert "out_features 520 is no multiple of 16" in said
    assert "in_features 520 is no multiple of 16" in said


@pytest.mark.parametrize(
    ("recipe", "arch", "native"),
    [
        ("fp8_delayed", "cpu", ""),
        ("fp8_delayed", "sm80", ""),
        ("fp8_delayed", "sm89", "fprop dgrad wgrad"),
        ("fp8_rowwise", "sm89", ""),
        ("fp8_rowwise", "sm90", "fprop dgrad wgrad"),
        ("fp8_rowwise_gw_hp", "sm90", "fprop dgrad"),
        ("fp8_blockwise", "sm90", "fprop dgrad wgrad"),
        ("fp8_blockwise", "sm100", ""),
        ("mxfp8", "sm90", ""),
        ("fp8_mxfp4_rht_sr", "sm90", "fprop"),
        ("bf16", "sm90", ""),
    ],
)
def test_native_gemms(recipe: str, arch: str, native: str) -> None:
    assert native_gemms(get_recipe(recipe), Target(arch, 256, 384)) == set(native.split())


def test_sizes_that_fp8_products_cannot_take() -> None:
    recipe = get_recipe("fp8_blockwise")
    assert (
        native_gemms(recipe, Target("sm90", 256, 200)) == set()
    )  # dgrad contracts 200, and columns must be multiples of 16
    assert native_gemms(recipe, Target("sm90", 256, 208)) == {"fprop", "wgrad"}
    assert native_gemms(recipe, Target("sm90", 208, 256)) == {"dgrad", "wgrad"}
    found = choose("fprop", recipe.fprop, Target("sm90", 200, 256))
    assert found == ("emulated", False, (("hopper_fp8", "in_features 200 is no multiple of 16"),))


@pytest.mark.parametrize(
    ("name", "arch", "fast", "words"),
    [
        ("bf16", "cpu", "", "no GEMM of recipe bf16 has fast_accumulation; leave it out, or set --recipe-override"),
        ("fp8_blockwise", "cpu", "", "no GEMM of recipe fp8_blockwise has fast_accumulation"),
        ("fp8_blockwise", "cpu", "fprop", "operands of granularity 1x128 are promoted to fp32 every 128 terms"),
        ("mxfp8", "cpu", "wgrad", "wgrad of recipe mxfp8: no MX GEMM on sm90; .*wgrad.fast_accumulation=false"),
        ("fp8_delayed", "sm90", "", "fprop may run on this GPU's own FP8 units; add --emulate"),
    ],
)
def test_accumulators_that_cannot_be_emulated(name: str, arch: str, fast: str, words: str) -> None:
    recipe = get_recipe(name)
    if fast:
        recipe = replace(recipe, **{fast: replace(recipe.gemms[fast], fast_accumulation=True)})
    with pytest.raises(UserError, match=words):
        check_accumulator(recipe, arch)


def test_accumulators_that_can_be_emulated() -> None:
    for name in ("fp8_delayed", "fp8_current_bf16_ends", "fp8_rowwise", "fp8_rowwise_gw_hp", "fp8_lm"):
        check_accumulator(get_recipe(name), "cpu")
        assert fast_gemms(get_recipe(name)) == ["fprop"]
    check_accumulator(get_recipe("fp8_rowwise"), "sm89")  # Ada has no GEMM of row scales


def test_recipes_with_primary_weights() -> None:
    for name in recipes():
        weights = get_recipe(name).fprop.weight, get_recipe(name).dgrad.weight
        shared = weights in [(spec, spec) for spec in (FP8_CURRENT, FP8_DELAYED, FP8_128X128, FP8_128X128_POW2)]
        assert (primary_weight_spec(get_recipe(name)) is not None) == shared, name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bf16", "fprop unquantized, dgrad unquantized"),
        ("mxfp8", "fprop e4m3 by 1x32, dgrad e4m3 by 1x32"),
        ("fp8_rowwise_gw_hp", "fprop e4m3 by row, dgrad e4m3 by tensor"),
        ("fp8_mxfp4_rht_sr", "fprop e4m3 by tensor, dgrad e2m1 by 1x32"),
    ],
)
def test_recipes_without_primary_weights_are_refused(name: str, words: str) -> None:
    with refused("use the GEMMs of fp8_delayed, fp8_current or fp8_blockwise", match=words):
        check_primary_weights(get_recipe(name))


def test_primary_weights_are_rounded_plainly_and_alike() -> None:
    spec = get_recipe("fp8_current").fprop.weight
    assert spec is not None
    changes: list[dict[str, Any]] = [{"rounding": "stochastic"}, {"headroom": 0.75}, {"format": "e2m1"}]
    changes += [{"granularity": name} for name in ("row", "1x128", "64x64")]
    for change in changes:
        other = replace(spec, **change)
        recipe = replace(get_recipe("fp8_current"), fprop=GemmSpec(weight=other), dgrad=GemmSpec(weight=other))
        assert primary_weight_spec(recipe) is None
        recipe = replace(get_recipe("fp8_current"), fprop=GemmSpec(weight=other))
        assert primary_weight_spec(recipe) is None


GATHERED = {"fp8_delayed", "fp8_lm", "fp8_lm_o1", "fp8_lm_o2", "fp8_lm_o3"}


def test_recipes_whose_codes_can_be_gathered() -> None:
    for name in recipes():
        reasons = [why_not_gathered(get_recipe(name), tensor) for tensor in ("input", "grad_output")]
        assert (reasons == [None, None]) == (name in GATHERED), (name, reasons)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bf16", "fprop takes input in the compute dtype"),
        ("fp8_current", "the current scale of input needs the amax over all ranks before the cast"),
        ("fp8_rowwise", "input has a scale per row, which in wgrad spans the tokens of all ranks"),
        ("fp8_rowwise_gw_hp", "wgrad takes input in the compute dtype"),
        ("fp8_blockwise", "input has blocks of 1x128: wgrad takes other codes than fprop, in blocks of tokens"),
        ("mxfp8", "input has blocks of 1x32: wgrad takes other codes than fprop, in blocks of tokens"),
        ("mxfp4_rht_sr", "fprop takes input in the compute dtype"),
        ("fp8_mxfp4_rht_sr", "wgrad takes input after a Hadamard transform"),
    ],
)
def test_recipes_whose_codes_cannot_be_gathered_are_refused(name: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"in recipe {name} {reason}: use fp8_delayed"):
        check_fp8_gather(get_recipe(name))


def delayed(**fields: str) -> Recipe:
    """fp8_delayed with these fields of its output gradient in both GEMMs."""
    recipe = get_recipe("fp8_delayed")
    spec = replace(recipe.dgrad.grad_output, **fields)  # type: ignore[type-var, arg-type]
    dgrad, wgrad = (replace(gemm, grad_output=spec) for gemm in (recipe.dgrad, recipe.wgrad))
    return replace(recipe, dgrad=dgrad, wgrad=wgrad)


def test_reasons_against_gathering_codes() -> None:
    check_fp8_gather(delayed(format="e4m3"))
    for fields, reason in (
        ({"format": "e2m3"}, "grad_output is e2m3, not FP8"),
        ({"rounding": "stochastic"}, "grad_output is rounded stochastically"),
        ({"scaling": "current"}, "the current scale of grad_output"),
    ):
        with pytest.raises(UserError, match=reason):
            check_fp8_gather(delayed(**fields))
    apart = delayed(format="e4m3")
    apart = replace(apart, wgrad=get_recipe("fp8_delayed").wgrad)
    with pytest.raises(UserError, match="dgrad and wgrad quantize grad_output differently"):
        check_fp8_gather(apart)


def test_scales_that_change_before_the_backward_pass_of_a_pipeline() -> None:
    moving = delayed(history_update="microbatch")
    check_fp8_gather(moving)
    with pytest.raises(UserError, match="history_update microbatch"):
        check_fp8_gather(moving, pipeline_parallel=2)
