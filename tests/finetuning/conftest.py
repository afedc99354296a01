"""Fixtures of frozen layers."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile compiles, and each test begins without graphs of others, which count towards dynamo's limit."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    yield
    torch.compiler.reset()
