"""Update of the amax histories of many tensors at the end of a step."""

import torch


def update_history_(
    newest: torch.Tensor, window: torch.Tensor, in_effect: torch.Tensor, take_max: bool, hold: bool = False
) -> None:
    """Shift ``newest`` into the window, drop the oldest entry, and update ``in_effect``; all in place.

    A tensor that was not recorded, whose newest amax is not above 0, keeps its window and its ``in_effect``, as in
    TransformerEngine's fused update.

    Args:
        newest: fp32 [N], the largest amax of the step; zeroed.
        window: fp32 [length, N], newest step first.
        in_effect: fp32 [N]; unchanged where the new value is 0, Inf or NaN.
        take_max: the new value is the window's maximum, else its newest entry.
        hold: an entry is replaced by 0 if it is not finite, or while the window has another: one of ``length`` counts.
    """
    rolls = newest > 0
    if hold:
        newest.masked_fill_((window[:-1] > 0).any(dim=0) | ~newest.isfinite(), 0.0)
    _update(newest, window, in_effect, take_max or hold, rolls)


def always_roll_history_(newest: torch.Tensor, window: torch.Tensor, in_effect: torch.Tensor, take_max: bool) -> None:
    """As ``update_history_``, but shifts zeros as well, as TransformerEngine's update in Python does.

    For comparisons with that; no kernel does it.
    """
    _update(newest, window, in_effect, take_max, torch.ones_like(newest, dtype=torch.bool))


def _update(
    newest: torch.Tensor, window: torch.Tensor, in_effect: torch.Tensor, take_max: bool, rolls: torch.Tensor
) -> None:
    window.copy_(torch.where(rolls, torch.cat((newest.unsqueeze(0), window[:-1])), window))
    found = window.amax(dim=0) if take_max else newest
    in_effect.copy_(torch.where(rolls & (found > 0) & found.isfinite(), found, in_effect))
    newest.zero_()
