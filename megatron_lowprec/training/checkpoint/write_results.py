"""Results of Megatron-core's checkpoint writers, which are forked processes, for the rank that started them."""

from __future__ import annotations

import os
import pickle
import queue
from typing import Any

_LENGTH = 8  # bytes


class WriteResults:
    """A queue of pickled records in anonymous memory, which ends with the processes that share it.

    Megatron-core's own queue is a spawned process. It imports torch to hold what it passes on, outlives a killed rank
    for ever, and dies of a signal meant for the rank.
    """

    def __init__(self) -> None:
        self._memory = os.memfd_create("write-results")
        self._read = 0

    def put(self, item: Any) -> None:
        """Append a record; a forked process writes to the same memory."""
        record = pickle.dumps(item)
        with open(os.dup(self._memory), "ab") as file:
            file.write(len(record).to_bytes(_LENGTH, "little") + record)

    def get_nowait(self) -> Any:
        """The oldest record that this process has not read.

        Raises:
            queue.Empty: there is none.
        """
        start = self._read + _LENGTH
        end = start + int.from_bytes(os.pread(self._memory, _LENGTH, self._read), "little")
        if start > os.fstat(self._memory).st_size:
            raise queue.Empty
        self._read = end
        return pickle.loads(os.pread(self._memory, end - start, start))
