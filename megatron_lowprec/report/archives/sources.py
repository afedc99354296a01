"""Finds the folders of runs and sweeps that a command line names, also in archives."""

from __future__ import annotations

import errno
import glob
import io
import lzma
import tarfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO

from megatron_lowprec.errors import UserError
from megatron_lowprec.files import check_text
from megatron_lowprec.sweep.job_record import RECORD
from megatron_lowprec.sweep.jobs import EVALUATION, MANIFEST

ARCHIVE = ".tar.xz"
FILES = (RECORD, "config.yaml", EVALUATION, "log.txt", "metrics.jsonl", "quantization.jsonl", "run.json")
"""The files of a run that reports or their readers use."""
LARGEST, MOST_MEMBERS = 2**31, 10**5
"""Bytes of an archive's content, and its files and folders: a few kilobytes can hold more than any disk."""


@dataclass(frozen=True)
class Source:
    """Folder of a run or of a sweep. ``root`` is the temporary folder with the content of ``archive``, if any."""

    folder: Path
    archive: Path | None = None
    root: Path | None = None

    def named(self, text: str) -> str:
        """``text`` with the temporary folder replaced by the archive's path."""
        return text if self.root is None else text.replace(str(self.root), str(self.archive))

    def job_folder(self, run: str) -> Path:
        """Folder of a job by its path in sweep.json; UserError if it leads out of an archive."""
        folder = self.folder / run
        if self.root is not None and not folder.resolve().is_relative_to(self.root.resolve()):
            raise UserError(f"{self.archive}: its {MANIFEST} names {run}, outside of it; make the archive anew")
        return folder


def find_sources(path: str, scratch: Path | None) -> list[Source]:
    """Folders that a path or a pattern names; an archive is unpacked into a new folder in ``scratch``.

    Raises:
        UserError: no folder or archive of that name, an archive without ``scratch``, or as ``unpack``.
    """
    found = [Path(name) for name in sorted(glob.glob(path))] if glob.has_magic(path) else [Path(path)]
    sources: list[Source] = []
    for each in found:
        if each.is_dir():
            sources.append(Source(each))
        elif each.name.endswith(ARCHIVE) and each.is_file():
            if scratch is None:
                raise UserError(f"{each}: archives are not read here; unpack it, and name its folders")
            number = len(list(scratch.iterdir()))
            sources += unpack(each, scratch / str(number) / each.name.removesuffix(ARCHIVE))
    if not sources:
        raise UserError(
            f"{path}: no such folder or {ARCHIVE} archive; name a run's folder, a sweep's, an archive, or a pattern"
        )
    return sources


def unpack(archive: Path, root: Path) -> list[Source]:
    """Unpack an xz-compressed tar of runs into the new folder ``root``; its sweeps and runs, by path.

    Raises:
        UserError: a damaged archive, one that is too large, or a member that is no file or folder or lies outside.
    """
    members = count()

    def plain(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
        if next(members) >= MOST_MEMBERS:
            raise _TooLargeError(f"more than {MOST_MEMBERS:,} files and folders")
        return _plain(member, folder)

    try:
        with lzma.open(archive) as packed, _Limited(packed) as content, tarfile.open(fileobj=content, mode="r|") as tar:
            tar.extractall(root, filter=plain)
            while content.read(2**20):  # behind tar's end, which finds truncation and wrong checksums
                pass
    except tarfile.FilterError as error:
        raise UserError(f"{archive}: unsafe, nothing of it is read ({error}); ask its author for another") from None
    except _TooLargeError as error:
        raise UserError(f"{archive}: {error}; unpack it, and name its folders") from None
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"{archive}: damaged, or no xz-compressed tar ({error}); copy it again") from None
    folders = sorted(folder for folder in [root, *root.rglob("*")] if folder.is_dir() and _holds_runs(folder))
    if not folders:
        raise UserError(f"{archive}: holds no runs; make it with megatron-lowprec report RUNS --archive")
    return [Source(folder, archive, root) for folder in folders]


class _TooLargeError(Exception):
    """An archive holds more than is read."""


class _Limited(io.RawIOBase):
    """A stream of at most ``LARGEST`` bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._left = stream, LARGEST

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        content = self._stream.read(len(buffer))
        self._left -= len(content)
        if self._left < 0:
            raise _TooLargeError(f"more than {LARGEST:,} bytes")
        buffer[: len(content)] = content
        return len(content)


def _plain(member: tarfile.TarInfo, root: str) -> tarfile.TarInfo:
    """tarfile's data filter, without links, unprintable names, and files with holes, which take no bytes here."""
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
        raise tarfile.SpecialFileError(member)
    try:
        check_text(member.name)
    except ValueError:
        raise tarfile.OutsideDestinationError(member, ascii(member.name)) from None
    return tarfile.data_filter(member, root)


def _holds_runs(folder: Path) -> bool:
    """Whether a folder is a sweep's or a run's; one without content is a run that wrote nothing."""
    names = {each.name for each in folder.iterdir()}
    return not names or not names.isdisjoint((MANIFEST, *FILES))
