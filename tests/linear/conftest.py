"""Fixtures of the layers without Megatron."""

from collections.abc import Iterator

import pytest
import torch._dynamo


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """torch.compile compiles: a driver's run in the same process has turned it off."""
    with torch._dynamo.config.patch(disable=False):
        yield
