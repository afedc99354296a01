"""Writes what reports read of runs as a reproducible archive without machine-specific paths."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_lowprec.errors import UserError
from megatron_lowprec.files import Row
from megatron_lowprec.report.archives.columns import row_tables
from megatron_lowprec.report.archives.container import ARCHIVE, Content, write
from megatron_lowprec.report.archives.redaction import Redaction
from megatron_lowprec.report.archives.sources import METRICS, SNAPSHOTS, TEXTS, Source
from megatron_lowprec.report.curve import COLUMNS, SECONDS, read_columns, typical_seconds
from megatron_lowprec.report.operands import SNAPSHOT_COLUMNS, read_all_rows
from megatron_lowprec.report.runs import Run
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.sweep.jobs import MANIFEST
from megatron_lowprec.training.monitoring.metrics_file import read_metrics


def write_archive(path: Path, runs: Sequence[Run], say: Callable[[str], None]) -> None:
    """Write the ``TEXTS`` of every run, the columns of its rows that reports read, and each ``sweep.json``.

    Values keep every bit; of the times of iterations only the typical one is kept. Equal runs give equal bytes. Each
    named folder keeps its last part. Absolute paths in texts are replaced (``Redaction``).

    Args:
        say: called with a message about rows that cannot be read, which are dropped.

    Raises:
        UserError: another suffix, two folders of one name, a job outside of its sweep's folder, or a path that cannot
            be written.
    """
    if not path.name.endswith(ARCHIVE):
        raise UserError(f"--archive {path}: the name must end in {ARCHIVE}, by which reports recognize archives")
    folders, files = _members(runs)
    redact = Redaction(_known_folders(runs))
    read = {name: files[name].read_text(encoding="utf-8", errors="surrogateescape") for name in sorted(files)}
    texts = {name: redact(text) for name, text in read.items()}
    rows_of = {METRICS: _metrics, SNAPSHOTS: _snapshots}
    tables = [
        table
        for file, rows in rows_of.items()
        for table in row_tables(file, {name: rows(folders[name] / file, say) for name in sorted(folders)})
    ]
    # a file without rows is told apart from none
    present = {f"{name}/{file}": "" for file in rows_of for name in folders if (folders[name] / file).is_file()}
    with_rows = {f"{name}/{table.file}" for table in tables for name in table.rows}
    texts |= {name: empty for name, empty in present.items() if name not in with_rows}
    try:
        write(path, Content(set(folders), texts, tables))
    except OSError as error:
        raise UserError(f"--archive {path}: cannot be written ({error.strerror}); name another file") from None


def _metrics(path: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """Rows of a metrics.jsonl with the columns that reports read; the typical time of an iteration at the last one.

    Archives keep no order between rows of different keys. So every row of a repeated iteration gets its latest values.
    """
    rows = list(read_metrics(path, say))
    latest = {(row["iteration"], key): value for row in rows for key, value in row.items()}
    for row in rows:
        at = row["iteration"]
        kept = {key: latest[at, key] for key in ("iteration", *COLUMNS) if key in row and key != SECONDS}
        if len(kept) > 1:
            yield kept
    if path.is_file():
        seconds = read_columns(path, [SECONDS], lambda _: None)[SECONDS]
        if len(seconds[0]):
            yield {"iteration": int(seconds[0][-1]), SECONDS: typical_seconds(seconds)}


def _snapshots(path: Path, say: Callable[[str], None]) -> Iterator[Row]:
    for row in read_all_rows(path, say):
        yield {key: row[key] for key in SNAPSHOT_COLUMNS if key in row}


def _members(runs: Sequence[Run]) -> tuple[dict[str, Path], dict[str, Path]]:
    """Name -> path of folders, and of files that are kept whole."""
    folders: dict[str, Path] = {}
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
            folders[member] = run.folder
        wanted = {f"{member}/{name}": run.folder / name for name in TEXTS}
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
