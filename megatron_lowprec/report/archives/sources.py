"""Finds the folders of runs and sweeps that a command line names, also in archives."""

from __future__ import annotations

import errno
import glob
import json
from dataclasses import dataclass
from pathlib import Path

from megatron_lowprec.errors import UserError
from megatron_lowprec.report.archives.container import ARCHIVE, LARGEST, read
from megatron_lowprec.sweep.job_record import RECORD
from megatron_lowprec.sweep.jobs import EVALUATION, MANIFEST

TEXTS = (RECORD, "config.yaml", EVALUATION, "run.json")
"""The files of a run that reports read whole."""
METRICS, SNAPSHOTS = "metrics.jsonl", "quantization.jsonl"
"""The files of a run whose rows they read."""
_OLD_ARCHIVE = ".tar.xz"


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
        elif each.name.endswith(_OLD_ARCHIVE) and each.is_file():
            raise UserError(f"{each}: archives of this form are not read; unpack it by tar, and name its folders")
    if not sources:
        raise UserError(
            f"{path}: no such folder or {ARCHIVE} archive; name a run's folder, a sweep's, an archive, or a pattern"
        )
    return sources


def unpack(archive: Path, root: Path) -> list[Source]:
    """Write the runs of an archive into the new folder ``root``; its sweeps and runs, by path.

    Raises:
        UserError: as ``container.read``, or an archive without runs.
    """
    content = read(archive)
    try:
        for folder in content.folders:
            (root / folder).mkdir(parents=True, exist_ok=True)
        for name, text in content.texts.items():
            _file(root / name).write_bytes(text.encode("utf-8", errors="surrogateescape"))
        left = LARGEST
        for table in content.tables:
            for folder, rows in table.lines():
                with _file(root / folder / table.file).open("a", encoding="utf-8") as file:
                    for row in rows:
                        left -= file.write(json.dumps(row) + "\n")
                        if left < 0:
                            raise ValueError(f"more than {LARGEST:,} characters")
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"{archive}: damaged ({error}); copy it again") from None
    folders = sorted(folder for folder in [root, *root.rglob("*")] if folder.is_dir() and _holds_runs(folder))
    if not folders:
        raise UserError(f"{archive}: holds no runs; make it with megatron-lowprec report RUNS --archive")
    return [Source(folder, archive, root) for folder in folders]


def _file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _holds_runs(folder: Path) -> bool:
    """Whether a folder is a sweep's or a run's; one without content is a run that wrote nothing."""
    names = {each.name for each in folder.iterdir()}
    return not names or not names.isdisjoint((MANIFEST, METRICS, SNAPSHOTS, *TEXTS))
