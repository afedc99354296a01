"""Cross entropy with a vocabulary that may be sharded over ranks: a rank's partial sums and logit gradient."""

from typing import NamedTuple

import torch


class LogitSums(NamedTuple):
    """Partial sums of the loss of each token over one rank's part of the vocabulary, all fp32 [T].

    Attributes:
        maximum: the largest logit.
        total: sum of ``exp(logit - maximum)``.
        target: the target's logit; 0 if another rank has the target.
    """

    maximum: torch.Tensor
    total: torch.Tensor
    target: torch.Tensor


def logit_sums(logits: torch.Tensor, targets: torch.Tensor, first: int) -> LogitSums:
    """``LogitSums`` of each token, from one pass over the logits.

    Args:
        logits: [T, V].
        targets: int64 [T], indices in the whole vocabulary.
        first: vocabulary index of the first logit.
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
    """``(softmax - one_hot(target)) * dloss``, written to ``logits`` and returned.

    Args:
        logits, targets, first: as in ``logit_sums``.
        log_total: fp32 [T], log of the sum of ``exp(logit)`` over the whole vocabulary.
        dloss: fp32 [T], gradient of each token's loss.
    """
    gradient = (logits.float() - log_total[:, None]).exp()
    here = torch.arange(logits.shape[1], device=logits.device) == (targets - first)[:, None]
    return logits.copy_((gradient - here.float()) * dloss[:, None])
