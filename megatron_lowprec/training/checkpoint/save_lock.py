"""Allows one run at a time in a --save folder: a second would remove the checkpoint that the first is writing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.distributed.process_lock import DEAD_AFTER, Holder, ProcessLock, holder

FILE = "run.lock"


class SaveLock:
    """The lock of a --save folder, from ``acquire`` to the end of the context.

    Args:
        folder: the checkpoints' folder; None takes no lock, as for --no-save and on all ranks but the first.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = ProcessLock(folder / FILE, beats=True) if folder is not None else None

    def __enter__(self) -> SaveLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.release()

    def other(self) -> Holder | None:
        """Another process that holds the lock, or None; raises as ``acquire``."""
        if self._folder is None:
            return None
        with self._reaching_the_folder():
            return holder(self._folder / FILE)

    def acquire(self) -> None:
        """Take the lock; if already held, move it to where the folder is now.

        Raises:
            UserError: another process holds it, or its file cannot be read or written.
        """
        if self._lock is None:
            return
        with self._reaching_the_folder():
            other = self._lock.acquire()
        if other is not None:
            away = "" if other.is_here else f" (it counts as dead {DEAD_AFTER:.0f} s after its last heartbeat)"
            raise UserError(
                f"--save {self._folder} is held by {other.words}: wait for its end{away}, or name another --save"
            )

    @contextmanager
    def _reaching_the_folder(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"--save {self._folder}: its {FILE} cannot be read or written: {error.strerror}; name another folder"
            ) from None
