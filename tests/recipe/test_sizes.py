"""Sizes of layers that a recipe refuses, and the way out that it tells."""

import re
from dataclasses import replace

import pytest

from megatron_lowprec import GemmSpec, KeepBf16, QuantSpec, Recipe, UserError, get_recipe, recipes
from megatron_lowprec.recipe.coverage import LinearSite, check_sizes
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.quant_spec import TensorScaleSpec
from tests.recipe.sites import sites_of


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
        ("mxfp4_rht", 64, 192, "column", 2, "96 output features on each of 2 ranks"),
        ("mxfp4_rht", 64, 192, "row", 2, None),  # cuts the input features, which no backward GEMM blocks
        ("mxfp8", 96, 64, "row", 2, "48 input features on each of 2 ranks are no multiple of 32"),
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
    assert "12 output features on each of 2 ranks" in message


def test_outer_blocks_lie_within_a_rank() -> None:
    spec = QuantSpec("e2m1", "1x16", "e4m3", "product", tensor_scale=TensorScaleSpec(2688.0, "1x128"))
    recipe, site = Recipe("r", "", fprop=GemmSpec(input=spec)), LinearSite(1, "mlp.linear_fc1", 192, 64, "row")
    check_sizes(recipe, [site], 2, 1)
    assert "input block 1x128, but 96 input features on each of 2 " in refusal("", site, 2, recipe)
