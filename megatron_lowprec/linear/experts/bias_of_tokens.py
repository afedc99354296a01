"""Biases of experts, for tokens that are sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_lowprec.linear.once_differentiable import once_differentiable


@once_differentiable("the biases of grouped experts")
class _ExpertBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens: Sequence[int], *biases: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.tokens = tokens
        return torch.cat([bias.expand(count, -1) for bias, count in zip(biases, tokens, strict=True)])

    @staticmethod
    def backward(ctx, dbias_TO):  # type: ignore[no-untyped-def]
        return None, *(rows.sum(dim=0) for rows in dbias_TO.split(ctx.tokens))


def bias_of_tokens(tokens: Sequence[int], biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bias of each token's expert, [T, O]; sums each expert's gradient as its own addition would.

    Args:
        tokens: rows of each expert; their sum is T.
        biases: [O] of each expert.
    """
    found: torch.Tensor = _ExpertBias.apply(list(tokens), *biases)
    return found
