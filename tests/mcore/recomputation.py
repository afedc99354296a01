"""A bound on recomputations, for tests: without it a circle of them takes all memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def bounded_recomputation(most: int = 4) -> Iterator[None]:
    """Fails where more than ``most`` of Megatron-core's recomputations lie one in another."""
    from megatron.core.tensor_parallel.random import CheckpointFunction

    inner, depth = CheckpointFunction.backward, 0

    def backward(ctx: Any, *args: Any) -> Any:
        nonlocal depth
        depth += 1
        assert depth <= most, "a recomputation starts itself"
        try:
            return inner(ctx, *args)
        finally:
            depth -= 1

    with patch.object(CheckpointFunction, "backward", staticmethod(backward)):
        yield
