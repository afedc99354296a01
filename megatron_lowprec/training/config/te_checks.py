"""Checks of a model for TransformerEngine's layers, and their import with the recipe's environment."""

from __future__ import annotations

import importlib
import os

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.te.te_config import TEConfig, te_config
from megatron_lowprec.te.translation import KINDS
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import check_packages
from megatron_lowprec.training.models.sizes import linear_sites


def check(config: Config, recipe: Recipe) -> TEConfig:
    """``te_config``, after checking this model's sizes and layout.

    Raises:
        UserError: as ``te_config``; FP8 weights that a CPU initializes; features that are no multiple of 16 (MXFP8: 32)
            on a rank; more bf16 layers than a stage has.
    """
    found = te_config(recipe)
    if found.kind is None:
        if config.fp8_param_gather:
            raise UserError(f"--fp8-param-gather needs an FP8 recipe, not --recipe {recipe.name}; leave it out")
        return found
    if config.fp8_param_gather and config.use_cpu_initialization:
        raise UserError(
            "--fp8-param-gather: TransformerEngine's kernels fault on FP8 weights that --use-cpu-initialization "
            "creates in host memory; leave one of the two out"
        )
    multiple = KINDS[found.kind].multiple
    for site in linear_sites(config):
        ranks = {"column": (1, config.tensor_model_parallel_size), "row": (config.tensor_model_parallel_size, 1)}
        into, out = ranks[site.split]
        for what, size in (("input", site.in_features // into), ("output", site.out_features // out)):
            if size % multiple:
                raise UserError(
                    f"{site.path} has {size} {what} features on a rank, no multiple of {multiple}, which "
                    "TransformerEngine's FP8 products need; change that size or use --transformer-impl local"
                )
    stage = config.shape.num_layers // config.pipeline_model_parallel_size
    if max(found.first_layers, found.last_layers) > stage:
        raise UserError(
            f"the recipe asks {found.first_layers} first and {found.last_layers} last layers, but Megatron-core keeps "
            f"at most the {stage} layers of one pipeline stage in bf16; lower the numbers"
        )
    return found


def prepare(config: Config, recipe: Recipe) -> None:
    """Import TransformerEngine with the environment variables for ``recipe``, which it reads at import.

    Call it before any import of Megatron-core, which imports TransformerEngine itself. No-op for
    ``--transformer-impl local``.

    Raises:
        UserError: as ``check``; tokens on a rank that are no multiple of 16 (MXFP8: 32); NVTE_BACKWARD_OVERRIDE is set;
            no installation, or a broken one.
    """
    if config.transformer_impl != "transformer_engine":
        return
    found = check(config, recipe)
    tokens = config.steps.micro_batch_size * config.shape.seq_length // config.context_parallel_size
    multiple = 1 if found.kind is None else KINDS[found.kind].multiple
    if tokens % multiple:
        raise UserError(
            f"--micro-batch-size {config.micro_batch_size} x --seq-length {config.seq_length} make {tokens} tokens on "
            f"a rank, no multiple of {multiple}, which TransformerEngine's FP8 products need; change one of them"
        )
    override = os.environ.get("NVTE_BACKWARD_OVERRIDE")
    if found.kind is not None and override:
        raise UserError(
            f"NVTE_BACKWARD_OVERRIDE={override} makes TransformerEngine ignore the backward pass of --recipe "
            f"{recipe.name}; unset it"
        )
    os.environ.update(found.environment())
    try:
        # import by this name: transformer_engine itself suppresses errors of its submodules
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        check_packages(config)
        raise UserError(
            "--transformer-impl transformer_engine: TransformerEngine is installed but cannot be imported: "
            f"{' '.join(str(error).split())[:300]}; install what it names, or use --transformer-impl local"
        ) from None
