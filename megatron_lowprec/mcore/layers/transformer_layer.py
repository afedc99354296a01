"""Megatron-core's TransformerLayer under a recipe: derives its own spec and reports its passes to a step tracker."""

import sys
from typing import Any

from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore.layers.attention import SdpaAttention
from megatron_lowprec.mcore.layers.gpt_spec import check_supported, gpt_block_spec
from megatron_lowprec.mcore.step_tracker import StepTracker, megatron_lm_args


class LowPrecTransformerLayer(TransformerLayer):
    """``TransformerLayer`` under a recipe, for ``GPTModel``.

    Without ``submodules`` the layer derives those of Megatron-core's local spec from its config and number, so
    one spec serves all layers, dense or with experts, on every pipeline stage. ``GPTModel`` calls ``finish_init`` at
    the end of its construction.

    Attributes:
        tracker: of the recipe; shared by all layers of the process. Set by ``mcore.layer_spec.layer_spec``.

    Raises:
        UserError: as ``gpt_block_spec`` and ``StepTracker.check``, or an attention mask that would not be read.
    """

    tracker: StepTracker

    def __init__(
        self, config: TransformerConfig, submodules: Any = None, layer_number: int = 1, **options: Any
    ) -> None:
        check_supported(config)
        self.tracker.check(config)
        if submodules is None:
            groups = options.get("pg_collection")
            unfused = config.attention_backend in (AttnBackend.local, AttnBackend.unfused)
            if not unfused and getattr(megatron_lm_args(), "reset_attention_mask", False):
                raise UserError(
                    "--reset-attention-mask needs --attention-backend unfused: torch's attention, the default under a "
                    "recipe, reads no mask"
                )
            block = gpt_block_spec(
                config,
                attention_backend="local" if unfused else "auto",
                vp_stage=options.get("vp_stage"),
                pp_rank=None if groups is None else groups.pp.rank(),
            )
            submodules = block.layer_specs[layer_number - 1].submodules
        super().__init__(config, submodules, layer_number, **options)

    def finish_init(self, quantization_config: object) -> None:
        """Bind the layer's linears to the recipe; RuntimeError if one is not this project's."""
        # the caller is the model, which gives its layers no reference to itself
        model = sys._getframe(1).f_locals.get("self")
        self.tracker.bind(self, model if isinstance(model, nn.Module) else self)

    def create_mcore_cudagraph_manager(self, config: TransformerConfig) -> None:
        """Nothing: ``--cuda-graph-impl local`` means this project's graphs, which the tracker has."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As ``TransformerLayer``; tells the tracker first."""
        self.tracker.enter(self)
        if isinstance(getattr(self.self_attention, "core_attention", None), SdpaAttention):
            # not read, and another tensor in each microbatch, which no CUDA graph could take
            kwargs |= {"attention_mask": None}
        return super().__call__(*args, **kwargs)
