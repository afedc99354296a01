"""The end of a step in delayed scaling's windows, for many tensors at once."""

import torch


def update_history_(newest: torch.Tensor, window: torch.Tensor, in_effect: torch.Tensor, take_max: bool) -> None:
    """A step's amaxes enter, the oldest leave, and what is in effect follows; all in place, in the same memory.

    Args:
        newest: fp32 [N], the largest amax of the step; zeros afterwards.
        window: fp32 [length, N], newest step first.
        in_effect: fp32 [N]; keeps its value where the one that follows is 0, Inf or NaN.
        take_max: the window's maximum follows, else its newest entry.
    """
    window.copy_(torch.cat((newest.unsqueeze(0), window[:-1])))
    found = window.amax(dim=0) if take_max else newest
    in_effect.copy_(torch.where((found > 0) & found.isfinite(), found, in_effect))
    newest.zero_()
