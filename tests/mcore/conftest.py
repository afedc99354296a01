"""A world of one process for a module's tests."""

from collections.abc import Iterator

import pytest

from tests.mcore.one_process import one_process
from tests.mcore.recomputation import bounded_recomputation


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    with one_process():
        yield


@pytest.fixture(scope="module")
def bounded() -> Iterator[None]:
    """Fails where a recomputation starts itself."""
    with bounded_recomputation():
        yield
