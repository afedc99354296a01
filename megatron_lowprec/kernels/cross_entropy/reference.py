"""Cross entropy of logits whose vocabulary may be cut over ranks: each rank's sums, and the gradient of its logits."""

from typing import NamedTuple

import torch


class LogitSums(NamedTuple):
    """What one rank's part of the vocabulary contributes to the loss of each token, all fp32 [T].

    Attributes:
        maximum: of the logits.
        total: sum of ``exp(logit - maximum)``.
        target: the target's logit; 0 where the target lies on another rank.
    """

    maximum: torch.Tensor
    total: torch.Tensor
    target: torch.Tensor


def logit_sums(logits: torch.Tensor, targets: torch.Tensor, first: int) -> LogitSums:
    """One pass over the logits.

    Args:
        logits: [T, V].
        targets: int64 [T], numbers in the whole vocabulary.
        first: number of the first of these V.
    """
    x = logits.float()
    maximum = x.amax(1)
    place = targets - first
    here = (place >= 0) & (place < logits.shape[1])
    target = x.gather(1, place.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    return LogitSums(maximum, (x - maximum[:, None]).exp().sum(1), torch.where(here, target, 0.0))


def logits_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, first: int, log_total: torch.Tensor, dloss: torch.Tensor
) -> torch.Tensor:
    """``(softmax - one at the target) * dloss``, written over the logits and returned.

    Args:
        logits, targets, first: as in ``logit_sums``.
        log_total: fp32 [T], logarithm of the sum of ``exp(logit)`` over the whole vocabulary.
        dloss: fp32 [T], gradient of each token's loss.
    """
    gradient = (logits.float() - log_total[:, None]).exp()
    here = torch.arange(logits.shape[1], device=logits.device) == (targets - first)[:, None]
    return logits.copy_((gradient - here.float()) * dloss[:, None])
