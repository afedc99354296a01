"""Interface of an architecture: the parts of a layer, the options it adds, and its Hugging Face form.

A part is a module whose functions have the signatures of its protocol here; those that architectures share are beside
this file. Parts import neither torch nor Megatron at load time, since sweeps read them, and know no recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_lowprec.recipe.coverage import LinearSite
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.hugging_face import HuggingFace
from megatron_lowprec.training.models.common.saved_tensor import SavedTensor
from megatron_lowprec.training.options.declaration import Group

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


@dataclass(frozen=True)
class Sharding:
    """Copies of each linear layer of a part, and their sharding over ranks.

    ``tensor_ranks`` shard each copy. Experts are copies: ``copies`` in a layer, ``copies_on_rank`` on one rank, and
    ``copies_per_token`` that each token passes through.
    """

    tensor_ranks: int
    copies: int = 1
    copies_on_rank: int = 1
    copies_per_token: int = 1
    experts: bool = False


class Part(Protocol):
    """Attention or MLP of a layer."""

    def resolve(self, config: Config) -> Config:
        """The options with the part's sizes filled.

        Raises:
            UserError: options that exclude each other.
        """

    def check_parallelism(self, config: Config, data_parallel_size: int) -> None:
        """Reject parallel sizes that the part does not support."""

    def transformer_fields(self, config: Config) -> dict[str, Any]:
        """Fields of Megatron-core's TransformerConfig. Imports torch."""

    def linear_sites(self, config: Config, layer: int) -> tuple[LinearSite, ...]:
        """Linear layers that a recipe may change, in the order of the forward pass; unsharded sizes of one copy."""

    def sharding(self, config: Config, site: LinearSite) -> Sharding:
        """Copies of one of these linear layers."""

    def other_weights(self, config: Config, layer: int) -> int:
        """Weights of a layer outside of its linear layers and the two norms in front of the parts."""

    def activations(self, config: Config, layer: int) -> list[SavedTensor]:
        """Tensors that the part saves for one microbatch's backward pass."""


class Attention(Part, Protocol):
    """Attention of a layer."""

    def recomputed_bytes(self, config: Config) -> float:
        """Bytes that selective recompute recomputes at once."""

    def score_channels(self, config: Config) -> float:
        """Channels of a query and of a value, their mean, over all heads: the width of both GEMMs of attention."""


class Mlp(Part, Protocol):
    """MLP of a layer."""

    def graph_obstacle(self, config: Config) -> str | None:
        """Why CUDA graphs cannot capture the part, such as sizes that depend on data; None if they can."""

    def fuses_activation(self, config: Config) -> bool:
        """Whether one kernel computes the activation of the MLP, which --recompute-gelu needs."""

    def backward_bytes(self, config: Config) -> float:
        """Bytes of the widest activation's gradient: the input of linear_fc2 for the tokens of one GEMM."""


def gpt_block_spec(
    config: Config, transformer: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Layer specs of a pipeline stage: Megatron-core's GPT with this project's modules or TransformerEngine's."""
    from megatron_lowprec.mcore.layers import gpt_spec
    from megatron_lowprec.mcore.te.te_layers import te_block_spec

    if config.transformer_impl == "transformer_engine":
        return te_block_spec(transformer, vp_stage)
    masked = config.reset_attention_mask and config.attention_backend == "auto"
    return gpt_spec.gpt_block_spec(
        transformer,
        attention_backend="masked" if masked else config.attention_backend,
        no_lowprec_linears=config.no_lowprec_linears,
        vp_stage=vp_stage,
    )


@dataclass(frozen=True)
class Architecture:
    """An architecture: the options that select it, its parts, and the options that it adds.

    Args:
        selected: whether a configuration, resolved or not, is of this architecture.
        also_read: forms of models of this architecture under another name; they are written as ``hugging_face``.
        block_spec: layer specs of a pipeline stage.
        plans_fp8_inputs: whether the memory plan counts codes for inputs that are saved as such.
        options: groups of options that it reads besides a dense model's.
    """

    name: str
    selected: Callable[[Config], bool]
    attention: Attention
    mlp: Mlp
    hugging_face: HuggingFace | None = None
    also_read: tuple[HuggingFace, ...] = ()
    block_spec: Callable[[Config, TransformerConfig, int | None], TransformerBlockSubmodules] = gpt_block_spec
    plans_fp8_inputs: bool = True
    options: tuple[type[Group], ...] = ()
