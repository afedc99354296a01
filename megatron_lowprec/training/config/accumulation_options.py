"""Whether cuBLASLt adds FP8 weight gradients to main_grad (``--fp8-accumulate-wgrad``)."""

from __future__ import annotations

from dataclasses import replace

from megatron_lowprec.linear.backends.hopper_fp8.why_not import operands_of
from megatron_lowprec.linear.backends.table import ROWS, emulated_rows, native_gemms
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.training.config.memory_options import is_large
from megatron_lowprec.training.config.options import OPTIONS, Config, unmet
from megatron_lowprec.training.config.resolve import data_parallel_size
from megatron_lowprec.training.models.sizes import has_experts
from megatron_lowprec.training.options.training_options import TrainingOptions


def resolve_accumulation(
    config: Config, recipe: Recipe, world_size: int, arch: str | None = None, stored: bool | None = None
) -> tuple[Config, list[str]]:
    """Fill --fp8-accumulate-wgrad if it is not given, and a note about it if it is on or as in a checkpoint.

    No rank's share of a layer decides: ranks, and layouts with several microbatches, have one choice.

    Args:
        world_size: ranks of the run; --explain-recipe may have fewer than the layout needs.
        arch: of a plan's GPUs; None for those here, whose torch needs cuBLASLt.
        stored: the choice of the checkpoint from which a run resumes. It stays where it is possible.
    """
    if config.fp8_accumulate_wgrad is not None:
        return config, []
    possible = unmet(config, OPTIONS["fp8_accumulate_wgrad"].needs) is None
    arch = _arch_here() if arch is None else arch
    possible = possible and _has_products(config, recipe, arch)
    # tokens of an expert vary, and so would cuBLASLt's plans
    by_default = possible and is_large(config) and not has_experts(config) and _accumulates(config, world_size)
    by_default = by_default and arch in ROWS["hopper_fp8"].ran_on
    on = by_default if stored is None else stored and possible
    config = replace(config, fp8_accumulate_wgrad=on)
    if on != by_default:
        return config, [f"--fp8-accumulate-wgrad: {'on' if on else 'off'}, as in the checkpoint's run"]
    note = (
        "--fp8-accumulate-wgrad is on, as from 1e9 parameters on with several microbatches: "
        "--no-fp8-accumulate-wgrad adds in a second pass"
    )
    return config, [note] if on else []


def _accumulates(config: Config, world_size: int) -> bool:
    """Whether a step has several microbatches, of which the first overwrites; also before ``resolve_run``."""
    size, samples, ranks = config.micro_batch_size, config.global_batch_size, data_parallel_size(config, world_size)
    return size is not None and samples is not None and samples > size * max(1, ranks)


def _has_products(config: TrainingOptions, recipe: Recipe, arch: str) -> bool:
    """Whether a layer may have a native weight gradient of one scale a tensor, whatever its sizes."""
    target = Target(arch, dtype="bfloat16" if config.bf16 else "float32")
    emulate = emulated_rows(config.emulate, config.native)
    return any(
        "wgrad" in native_gemms(linear, target, emulate)
        and all(operand.granularity == "tensor" for operand in operands_of("wgrad", linear.wgrad))
        for linear in recipe.linear_recipes
    )


def _arch_here() -> str:
    from megatron_lowprec.kernels.dispatch import arch_here
    from megatron_lowprec.kernels.fp8_accumulate import cublaslt

    return "cpu" if cublaslt.library() is None else arch_here()
