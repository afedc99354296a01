"""Options of the recipe and of how it is executed."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lowprec.training.options.declaration import Group, Part, arg


@dataclass(frozen=True)
class RecipeOptions(Group):
    """low precision (ours)"""

    PART = Part.UPDATE

    recipe: str = arg(
        "bf16",
        "a named recipe (--list-recipes) or a YAML file with one; a run that resumes takes the checkpoint's",
        Part.RECIPE,
        sweep="recipes:",
        grouped=False,
        by_rank=True,
    )
    recipe_override: list[str] = arg(
        [],
        "change one field of the recipe, as in dgrad.hadamard.block=128; may be repeated",
        Part.RECIPE,
        was="recipe_set",
        sweep="recipes: {label, recipe, recipe_override}",
        grouped=False,
    )
    recipe_phase_iters: int | None = arg(
        None,
        "iterations of which a phase's from_fraction is a fraction, in place of train-iters; a run that resumes keeps "
        "the checkpoint's",
        least=1,
    )
    rerun_in_bf16: list[str] = arg(
        [],
        "run single GEMMs unquantized to see which one is at fault, as in layers.3.mlp.linear_fc1.dgrad; globs",
        needs="transformer_impl=local",
    )
    no_self_test: bool = arg(
        False, "skip the test of quantizers, random numbers and products on this device", Part.EXECUTION
    )
    list_recipes: bool = arg(False, "print the named recipes and stop", Part.OUTPUT, sweep="pretrain_gpt.py itself")
    explain_recipe: bool = arg(
        False,
        "print formats and backend of every GEMM in this model's linear layers, and stop",
        Part.OUTPUT,
        sweep="pretrain_gpt.py itself",
    )
    device: str | None = arg(
        None,
        "a GPU's compute capability such as sm100, for which --explain-recipe and --memory-plan answer, "
        "or cpu for the former",
        Part.OUTPUT,
        sweep="pretrain_gpt.py itself",
    )
    fp8_param_gather: bool | None = arg(
        None,
        "keep linear layers' weights as FP8 codes, without a bf16 copy, and gather them so; needs "
        "--use-distributed-optimizer, and a recipe with one FP8 weight for fprop and dgrad; by default on from 1e9 "
        "parameters on, where these allow it (ours)",
        Part.EXECUTION,
        formerly=False,
    )
    fp8_sequence_parallel_gather: bool = arg(
        False,
        "gather inputs and output gradients of linear layers as FP8 codes under --sequence-parallel: the same codes, "
        "half the bytes; needs a recipe of delayed scales (fp8_delayed, fp8_lm)",
        Part.EXECUTION,
        needs="sequence_parallel transformer_impl=local",
    )
    no_amax_reduce: bool = arg(
        False,
        "let each tensor-parallel rank take a current scale from its own part: no collective for it, but codes then "
        "depend on the tensor-parallel size",
        needs="transformer_impl=local",
        inference=True,
    )
    calibrate_amax: bool = arg(
        False,
        "delayed scaling: before a new run's first step, fill the amax histories by passes over its batch without an "
        "update; else that step is taken with scale 1, as TransformerEngine takes it",
        Part.START,
        was="fill_amax_histories",
    )
    share_rng_across_dp: bool = arg(
        False,
        "draw the same rounding noise and signs on every data-parallel rank (to study what that does)",
        needs="transformer_impl=local",
        was="same_noise_on_data_parallel",
    )
    no_lowprec_linears: bool = arg(
        False,
        "keep Megatron-core's own linear layers (for comparisons; the recipe must be bf16)",
        Part.EXECUTION,
        needs="recipe=bf16 transformer_impl=local",
        was="stock_linears",
        hidden=True,
        inference=True,
    )
