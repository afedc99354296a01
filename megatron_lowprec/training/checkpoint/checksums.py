"""CRC-32 of each file of a checkpoint: taken while it is written, compared before it is loaded. Imports no megatron.

Processes that write a checkpoint's tensors sum the bytes on their way to the file, so that a save reads nothing back.
torch computes a CRC-32 of each tensor too, with a slower algorithm, and compares it with nothing: it is switched off
meanwhile, which saves more time than the sums take (docs/results/checkpoint-checksums.md).
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.files import crc32_of, read_json

NAME = "checksums.json"
_BESIDE = ".crc32"  # suffix of a file with the sum of a file, until all are in NAME


class _SummedFile(io.BufferedWriter):
    """A new file that leaves its sum beside it when it is closed, unless it was not written in order."""

    def __init__(self, path: str) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._path, self._sum, self._in_order = path, 0, True

    def write(self, data: Any) -> int:
        self._sum = zlib.crc32(data, self._sum)
        return super().write(data)

    def seek(self, *arguments: int) -> int:
        self._in_order = False
        return super().seek(*arguments)

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._in_order:
            Path(self._path + _BESIDE).write_text(f"{self._sum:08x}", encoding="ascii")


def _open(path: str, mode: str = "r", *arguments: Any, **options: Any) -> IO[Any]:
    return _SummedFile(path) if mode == "wb" else open(path, mode, *arguments, **options)


@contextmanager
def summing() -> Iterator[None]:
    """Context in which processes forked by Megatron-core's writer sum what they write."""
    import torch
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megatron_lowprec.mcore.patches import bind

    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    bind("file_sums", open=_open)  # found before the builtin
    try:
        yield
    finally:
        del filesystem_async.open
        torch.serialization.set_crc32_options(before)


def write(folder: Path) -> None:
    """Write NAME with the size and the sum of every other file; those without a sum beside them are read."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix != _BESIDE and path.name != NAME:
            beside = path.with_name(path.name + _BESIDE)
            found[path.name] = [path.stat().st_size, beside.read_text("ascii") if beside.exists() else crc32_of(path)]
            beside.unlink(missing_ok=True)
    (folder / NAME).write_text(json.dumps({"crc32": found}, indent=1) + "\n", encoding="utf-8")


def exist(folder: Path) -> bool:
    """Whether a checkpoint has sums: older versions wrote none."""
    return (folder / NAME).exists()


def fault(folder: Path, sizes_only: bool = False) -> str | None:
    """The first file whose bytes are not those that were written, in words; None if there is none, or are no sums.

    ``sizes_only`` reads no file.
    """
    if not exist(folder):
        return None
    try:
        content = read_json(folder / NAME, "")["crc32"]
        expected = {name: (size, crc) for name, (size, crc) in content.items()}
        if any(name != os.path.basename(name) for name in expected) or any(
            (type(size), type(crc)) != (int, str) for size, crc in expected.values()
        ):
            raise ValueError
    except (UserError, KeyError, TypeError, ValueError, AttributeError):
        return f"{NAME} cannot be read"
    state = []
    for name, (size, _) in expected.items():
        try:
            stat = (folder / name).stat()
        except OSError:
            return f"{name} is missing"
        if stat.st_size != size:
            return f"{name} has {stat.st_size} bytes, and had {size}"
        state.append((name, stat.st_mtime_ns, stat.st_ino))
    return None if sizes_only else _compared(folder, tuple(expected.items()), tuple(state))


@lru_cache(maxsize=8)
def _compared(folder: Path, expected: tuple[tuple[str, tuple[int, str]], ...], state: tuple[Any, ...]) -> str | None:
    """``fault`` by the bytes; a start looks at a checkpoint several times, and reads it once while ``state`` lasts."""
    threads = os.environ.get("OMP_NUM_THREADS", "")  # this process's share of the cores
    with ThreadPoolExecutor(max(1, int(threads) if threads.isdecimal() else 1)) as pool:
        try:
            found = list(pool.map(crc32_of, [folder / name for name, _ in expected]))
        except OSError as error:
            return f"{error.filename or folder} cannot be read: {error.strerror or error}"
    wrong = [name for (name, (_, crc)), now in zip(expected, found, strict=True) if now != crc]
    by_hand = f" (after a change by hand, remove {NAME})" if wrong == ["config.yaml"] else ""
    return f"{', '.join(wrong)}: other bytes than were saved, by {NAME}{by_hand}" if wrong else None
