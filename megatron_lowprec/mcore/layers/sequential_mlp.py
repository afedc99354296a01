"""Megatron-core's experts one after the other, which may save SwiGLU's input in a format and be given codes."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from megatron_lowprec.mcore.fusion import ExpertChannels, GradOutputChannel, attach_metadata, attached_input
from megatron_lowprec.mcore.layers.cached_swiglu import CachedSwigluMLP
from megatron_lowprec.quantization.token_rows import split_rows


class LowPrecSequentialMLP(SequentialMLP):
    """``SequentialMLP`` of ``CachedSwigluMLP``, whose tokens may be a placeholder with codes of all rows attached."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for expert in self.local_experts:
            expert.__class__ = CachedSwigluMLP  # Megatron-core's code names MLP

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``SequentialMLP``: tokens [T, h] sorted by expert, int64 [experts], probabilities fp32 [T] -> [T, h]."""
        codes = attached_input(permuted_local_hidden_states, self.local_experts[0].linear_fc1.bound_gemms)
        tokens = tokens_per_expert.tolist()
        if codes is None or self.num_local_experts == 1:
            y, bias = super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
            if self.num_local_experts == 1:
                attach_channels(y, [y], tokens)
            return y, bias
        parts = zip(
            self.local_experts,
            permuted_local_hidden_states.split(tokens),
            split_rows(codes, tokens),
            permuted_probs.split(tokens),
            strict=True,
        )
        outputs = []
        for expert, x, of_expert, probs in parts:
            attach_metadata(x, quantized_input=(expert.linear_fc1.bound_gemms, of_expert))
            outputs.append(expert(x, probs)[0])
        y = torch.cat(outputs)
        attach_channels(y, outputs, tokens)
        return y, None


def attach_channels(y: torch.Tensor, outputs: Sequence[torch.Tensor], tokens: Sequence[int]) -> None:
    """Attach the channels of the experts' outputs to y [T, h], their concatenation, if all have one."""
    channels = [channel for output in outputs if (channel := GradOutputChannel.of(output)) is not None]
    if len(channels) == len(outputs):
        attach_metadata(y, expert_channels=ExpertChannels(tuple(channels), tuple(tokens)))
