"""Tokens and bytes of a microbatch on one rank."""

from __future__ import annotations

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.recipe.coverage import ACTIVATION_BLOCK
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.execution import Execution
from megatron_lowprec.training.options.training_options import ParallelOptions, TrainingOptions


def tokens_of(config: Config) -> int:
    """Tokens of a microbatch on one rank, before sequence parallelism splits them."""
    return config.steps.micro_batch_size * config.shape.seq_length // config.context_parallel_size


def width_of(config: TrainingOptions) -> int:
    """Bytes of a value in the compute dtype."""
    return 2 if config.bf16 else 4


def sequence_ranks(config: ParallelOptions) -> int:
    """Ranks over which sequence parallelism splits norms, dropout and the residual stream."""
    return config.tensor_model_parallel_size if config.sequence_parallel else 1


def expert_tensor_ranks(config: ParallelOptions) -> int:
    """Ranks that shard each expert: none if experts are spread over ranks."""
    return 1 if config.expert_model_parallel_size > 1 else config.tensor_model_parallel_size


def stream_bytes(config: Config) -> float:
    """Bytes of the residual stream, equal to those of an input of linear_qkv or of the MLP."""
    return tokens_of(config) * config.shape.hidden_size * width_of(config) / sequence_ranks(config)


def saved_input(config: Config, runs: Execution | None, layer: int, linear: str, size: float) -> float:
    """Bytes of a linear layer's saved input of ``size`` bytes in the compute dtype; FP8 codes are 1 byte per value."""
    return size / width_of(config) if runs is not None and runs.keeps_codes(config, layer, linear) else size


def norm_output(config: Config, runs: Execution | None, layer: int, linear: str) -> float:
    """Bytes of the input that a linear layer saves behind a norm; none if it is computed again."""
    if runs is not None and runs.computes_again(config, layer, linear):
        return 0.0
    return saved_input(config, runs, layer, linear, stream_bytes(config))


def cached(runs: Execution | None, activation: str, name: str, entries: float) -> dict[str, float]:
    """Name and bytes of an activation of that many entries that the recipe saves in a format; empty without one.

    One E8M0 byte of scale for each block.

    Args:
        activation: a field of ``ActivationSpec``.
    """
    form = "none" if runs is None else runs.recipe.activations.formats[activation]
    if form == "none":
        return {}
    return {f"{name} in {form.upper()}": entries * (FORMATS[form].bits / 8 + 1 / ACTIVATION_BLOCK)}
