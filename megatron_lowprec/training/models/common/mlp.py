"""The dense MLP: GELU, squared ReLU or gated SiLU between linear_fc1 and linear_fc2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.coverage import LinearSite
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.interface import Sharding
from megatron_lowprec.training.models.common.rank_sizes import stream_entries, tokens_of, width_of
from megatron_lowprec.training.models.common.saved_tensor import SavedTensor
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


def activations(config: Config, layer: int) -> list[SavedTensor]:
    """Input of the MLP, and of both sides of its activation."""
    return [
        SavedTensor("input of the MLP", stream_entries(config), input_of="mlp.linear_fc1", behind_norm=True),
        *around_activation(config, "mlp", _widest(config)),
    ]


def around_activation(config: ModelOptions, name: str, entries: float) -> list[SavedTensor]:
    """Input and output of the activation of an MLP of that name; ``entries`` are the output's."""
    before = SavedTensor(
        "output of linear_fc1",
        entries * gates(config),
        activation="swiglu_input",
        in_format="input of SwiGLU in {}",
    )
    return [before, SavedTensor("input of linear_fc2", entries, input_of=f"{name}.linear_fc2", computed_from=before)]


def backward_bytes(config: Config) -> float:
    """Bytes of the widest activation, for all tokens of a microbatch."""
    return _widest(config) * width_of(config)


def _widest(config: Config) -> float:
    """Entries of the input of linear_fc2."""
    return tokens_of(config) * config.shape.ffn_hidden_size / config.tensor_model_parallel_size
