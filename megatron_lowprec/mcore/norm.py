"""torch's norms as Megatron-core builds them, usable under sequence parallelism."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_lowprec.errors import UserError


class TorchNorm:
    """Builds ``nn.LayerNorm`` or ``nn.RMSNorm``, as ``config.normalization`` says.

    Megatron-core's own wrapper refuses sequence parallelism: its gradients would not be summed over the ranks.
    Marking the parameters ``sequence_parallel`` is all that ``finalize_model_grads`` needs to do so.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:  # type: ignore[misc]
        if config.layernorm_zero_centered_gamma:
            raise UserError(
                "--apply-layernorm-1p needs TransformerEngine's norm, which this build does not use; leave it out"
            )
        kinds = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}
        if config.normalization not in kinds:
            raise UserError(f"--normalization {config.normalization} is not available; use LayerNorm or RMSNorm")
        norm = kinds[config.normalization](hidden_size, eps=eps, dtype=torch.float32)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm.to(config.params_dtype)
