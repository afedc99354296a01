"""The dense MLP: GELU, squared ReLU or gated SiLU between linear_fc1 and linear_fc2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.coverage import LinearSite
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.execution import Execution
from megatron_lowprec.training.models.common.interface import Sharding
from megatron_lowprec.training.models.common.rank_sizes import cached, norm_output, saved_input, tokens_of, width_of
from megatron_lowprec.training.options.model_options import ModelOptions
from megatron_lowprec.training.options.parts import ModelShape
from megatron_lowprec.training.options.training_options import ParallelOptions


def gates(config: ModelOptions) -> int:
    """Number of halves of linear_fc1's output: a gated activation has two."""
    return 2 if config.swiglu else 1


def resolve(config: Config) -> Config:
    """The options with --ffn-hidden-size filled."""
    if config.swiglu and config.squared_relu:
        raise UserError("--swiglu and --squared-relu are two activations; leave one out")
    hidden = config.sizes.hidden_size
    default = int(4 * hidden * 2 / 3) // 64 * 64 if config.swiglu else 4 * hidden
    return replace(config, ffn_hidden_size=config.ffn_hidden_size or default)


def check_parallelism(config: ParallelOptions, data_parallel_size: int) -> None:
    """Reject expert parallelism: a dense MLP has no experts."""
    if config.expert_model_parallel_size > 1:
        raise UserError(f"--expert-model-parallel-size {config.expert_model_parallel_size} needs --num-experts")


def graph_obstacle(config: Config) -> str | None:
    """None: dense layers have constant sizes."""
    return None


def transformer_fields(config: Config) -> dict[str, Any]:
    """Fields of Megatron-core's TransformerConfig."""
    import torch.nn.functional as F
    from megatron.core.activations import squared_relu

    return {
        "ffn_hidden_size": config.shape.ffn_hidden_size,
        "gated_linear_unit": config.swiglu,
        "activation_func": F.silu if config.swiglu else squared_relu if config.squared_relu else F.gelu,
        # Megatron-core's fused bias + GELU is the tanh approximation that GPT-2 uses, so CPU and GPU must agree on it.
        # There is no fused form without a bias.
        "bias_activation_fusion": fuses_activation(config) or config.swiglu,
    }


def fuses_activation(config: ModelOptions) -> bool:
    """Whether one kernel computes the activation: GELU with a bias, SwiGLU without one."""
    return config.swiglu == config.disable_bias_linear and not config.squared_relu


def linear_sites(config: Config, layer: int) -> tuple[LinearSite, ...]:
    """linear_fc1 and linear_fc2."""
    return mlp_sites(config.shape, layer, "mlp", config.shape.ffn_hidden_size)


def mlp_sites(shape: ModelShape, layer: int, name: str, ffn: int) -> tuple[LinearSite, ...]:
    """linear_fc1 and linear_fc2 of an MLP of that name and width."""
    hidden, halves = shape.hidden_size, gates(shape)
    return (
        LinearSite(layer, f"{name}.linear_fc1", hidden, halves * ffn, "column", gated=halves == 2),
        LinearSite(layer, f"{name}.linear_fc2", ffn, hidden, "row"),
    )


def sharding(config: ParallelOptions, site: LinearSite) -> Sharding:
    """One copy, sharded over all tensor-parallel ranks."""
    return Sharding(config.tensor_model_parallel_size)


def other_weights(config: Config, layer: int) -> int:
    """Weights of a layer outside of its linear layers: none."""
    return 0


def activations(config: Config, runs: Execution | None, layer: int) -> dict[str, float]:
    """Bytes saved for backward; --recompute-gelu and a format of SwiGLU's input do not save linear_fc2's input."""
    wide = backward_bytes(config)
    saved = {
        "input of the MLP": norm_output(config, runs, layer, "mlp.linear_fc1"),
    }
    codes = swiglu_codes(config, runs, wide)
    if codes:
        return saved | codes
    saved["output of linear_fc1"] = wide * gates(config)
    if runs is None or not runs.recomputes_gelu(config):
        saved["input of linear_fc2"] = saved_input(config, runs, layer, "mlp.linear_fc2", wide)
    return saved


def swiglu_codes(config: Config, runs: Execution | None, wide: float) -> dict[str, float]:
    """Bytes of SwiGLU's input if the recipe saves it in a format, else empty; ``wide`` is the bytes of its output."""
    return cached(runs, "swiglu_input", "input of SwiGLU", wide / width_of(config) * gates(config))


def backward_bytes(config: Config) -> float:
    """Bytes of the widest activation, for all tokens of a microbatch."""
    return tokens_of(config) * config.shape.ffn_hidden_size * width_of(config) / config.tensor_model_parallel_size
