"""Writes the files of a report's runs as a reproducible archive without machine-specific paths."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

from megatron_lowprec.errors import UserError
from megatron_lowprec.report.archives.redaction import Redaction
from megatron_lowprec.report.archives.sources import ARCHIVE, FILES, Source
from megatron_lowprec.report.runs import Run
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.sweep.jobs import MANIFEST


def write_archive(path: Path, runs: Sequence[Run]) -> None:
    """Write an xz-compressed tar of every run's ``FILES`` and of the sweeps' ``sweep.json``.

    Members are sorted, without times and owners: equal runs give equal bytes. Each named folder keeps its last part.
    Absolute paths in texts are replaced (``Redaction``).

    Raises:
        UserError: another suffix, two folders of one name, a job outside of its sweep's folder, or a path that cannot
            be written.
    """
    if not path.name.endswith(ARCHIVE):
        raise UserError(f"--archive {path}: the name must end in {ARCHIVE}, by which reports recognize archives")
    folders, files = _members(runs)
    redact = Redaction(_known_folders(runs))
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz", preset=9) as tar:
        for name in sorted(folders | files.keys()):
            member = tarfile.TarInfo(name)
            member.type, member.mode = (tarfile.REGTYPE, 0o644) if name in files else (tarfile.DIRTYPE, 0o755)
            data = b""
            if name in files:
                text = files[name].read_text(encoding="utf-8", errors="surrogateescape")
                data = redact(text).encode("utf-8", errors="surrogateescape")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.getvalue())
    except OSError as error:
        raise UserError(f"--archive {path}: cannot be written ({error.strerror}); name another file") from None


def _members(runs: Sequence[Run]) -> tuple[set[str], dict[str, Path]]:
    """Names of folders, and name -> path of files."""
    folders: set[str] = set()
    files: dict[str, Path] = {}
    named: dict[str, Source] = {}
    for run in runs:
        source = _source(run)
        top = _name(source)
        other = named.setdefault(top, source)
        if other != source:
            both = " and ".join(each.named(str(each.folder)) for each in (other, source))
            raise UserError(f"--archive: {both} would both be {top}; rename one of the folders")
        below = os.path.relpath(run.folder, source.folder)
        if below.startswith(os.pardir):
            raise UserError(
                f"--archive: {run.place} is a job of {source.named(str(source.folder))}, but not in its folder; "
                "move it there and mend sweep.json"
            )
        member = os.path.normpath(f"{top}/{below}")
        if run.folder.is_dir():
            folders.add(member)
        wanted = {f"{member}/{name}": run.folder / name for name in FILES}
        wanted[f"{top}/{MANIFEST}"] = source.folder / MANIFEST
        files |= {name: file for name, file in wanted.items() if file.is_file()}
    return folders, files


def _known_folders(runs: Sequence[Run]) -> dict[str, str]:
    """Absolute folder -> placeholder."""
    known: dict[str, str] = {}
    for source in map(_source, runs):
        for folder in (source.folder.absolute(), source.folder.resolve()):
            known[os.path.normpath(folder)] = f"RUNS/{_name(source)}"
    return {str(Path.home()): "HOME", str(SHIPPED.parent): "REPOSITORY", **known}


def _source(run: Run) -> Source:
    return run.source or Source(run.folder)


def _name(source: Source) -> str:
    return source.folder.resolve().name
