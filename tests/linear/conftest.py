"""Fixtures of the layers without Megatron."""

import pytest


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile compiles, here and in processes that a test starts."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
