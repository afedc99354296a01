"""File lock around work whose result other processes reuse."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def lock(path: str) -> Iterator[None]:
    """Admit one process at a time; the operating system releases the lock if the process dies.

    The lock only saves work: on a file system without locks all processes write the same bytes and rename them.
    """
    with open(path, "w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
