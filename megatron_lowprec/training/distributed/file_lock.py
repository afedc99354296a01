"""One process at a time makes what others then find."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def lock(path: str) -> Iterator[None]:
    """Only one process at a time; freed by the system if it dies.

    It only saves work: where a file system has no locks all processes write, each the same bytes, each by renaming.
    """
    with open(path, "w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
