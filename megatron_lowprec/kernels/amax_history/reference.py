"""Update of the amax histories of many tensors at the end of a step."""

import torch


def update_history_(newest: torch.Tensor, window: torch.Tensor, in_effect: torch.Tensor, take_max: bool) -> None:
    """Shift ``newest`` into the window, drop the oldest entry, and update ``in_effect``; all in place.

    Args:
        newest: fp32 [N], the largest amax of the step; zeroed.
        window: fp32 [length, N], newest step first.
        in_effect: fp32 [N]; unchanged where the new value is 0, Inf or NaN.
        take_max: the new value is the window's maximum, else its newest entry.
    """
    window.copy_(torch.cat((newest.unsqueeze(0), window[:-1])))
    found = window.amax(dim=0) if take_max else newest
    in_effect.copy_(torch.where((found > 0) & found.isfinite(), found, in_effect))
    newest.zero_()
