"""Work that all workers of xdist share."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

_DONE = ".made"


def once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder that ``make`` has filled: the first worker that asks for the name calls it, the others wait."""
    common = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        common = common.parent
    folder = common / name
    with (common / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            make(folder)
            (folder / _DONE).touch()
    assert (folder / _DONE).exists(), f"making {name} failed in another worker, or before"
    return folder
