"""Which steps of torch's optimizers are outermost. ``ZeroRedundancyOptimizer`` has a step of its shard within its own.

Not all ranks may have a step within, so what ranks do together waits for the outermost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

stepping: list[Optimizer] = []
"""Steps under way, each within the one before, but those that raised. A forward pass in training is in no step, but in
closures, and clears the list.
"""


@cache
def call_after_steps(ended: Callable[[Optimizer], None]) -> None:
    """Call a function after each outermost step, with its optimizer."""

    def after(optimizer: Optimizer, *_: Any) -> None:
        while stepping and stepping.pop() is not optimizer:
            pass  # one that raised
        if not stepping:
            ended(optimizer)

    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(after)


def _before(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Note a step, which is not under way in its closure: that runs passes, and may step other optimizers."""
    stepping.append(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # behind the optimizer itself
    if not callable(closure):
        return None

    @wraps(closure)
    def outside(*of_closure: Any, **options: Any) -> Any:
        if inside := optimizer in stepping:
            stepping.remove(optimizer)
        try:
            return closure(*of_closure, **options)
        finally:
            if inside:
                stepping.append(optimizer)

    return ((optimizer, outside, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": outside})
