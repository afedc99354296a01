"""The balancing biases of a model's routers, a state that moves outside of the optimizer."""

from collections.abc import Callable, Sequence

import torch
from torch import nn


def keep_expert_biases(chunks: Sequence[nn.Module]) -> Callable[[], None]:
    """A function that restores the biases of this moment.

    Megatron-core moves them with the gradients of a step, also if its update is skipped or never comes.
    """
    found = [getattr(module, "expert_bias", None) for chunk in chunks for module in chunk.modules()]
    biases = [bias for bias in found if isinstance(bias, torch.Tensor)]
    kept = [bias.clone() for bias in biases]

    @torch.no_grad()
    def restore() -> None:
        for bias, before in zip(biases, kept, strict=True):
            bias.copy_(before)

    return restore
