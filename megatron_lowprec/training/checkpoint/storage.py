"""Checkpoint folders on disk: atomic publishing and pruning. No megatron, no tensors.

SAVE/iter_0000010/                      a complete checkpoint, renamed after all of it was written
SAVE/iter_0000020.partial.5a0c31d2/     one being written, or left over from a killed process
SAVE/iter_0000030.1/                    one that is not of the run's past (``writer.py``)
SAVE/latest_checkpointed_iteration.txt  the iteration to resume from
SAVE/run.lock                           names the process that writes to the folder (``save_lock.py``)
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from megatron_lowprec.errors import UserError
from megatron_lowprec.files import atomic_write
from megatron_lowprec.training.checkpoint import checksums

TRACKER = "latest_checkpointed_iteration.txt"
_WHOLE = re.compile(r"iter_([0-9]{7,18})")
_REPLACED = ".old"


def iteration_folder(folder: str, iteration: int) -> Path:
    """Megatron's folder name of a checkpoint."""
    return Path(folder) / f"iter_{iteration:07d}"


def tracked(folder: str) -> int | None:
    """The iteration in the tracker file; None if the file is missing, empty or not a number."""
    try:
        text = (Path(folder) / TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def checkpoints_of(folder: Path) -> Path:
    """The folder that holds checkpoints: ``checkpoints`` in a run's folder, if only that has any; else ``folder``."""
    inner = folder / "checkpoints"
    return inner if holds_checkpoint(str(inner)) and not holds_checkpoint(str(folder)) else folder


def holds_checkpoint(folder: str) -> bool:
    """Whether a complete checkpoint is there, or the tracker file names one."""
    return bool(whole(folder)) or tracked(folder) is not None


def whole(folder: str) -> dict[int, Path]:
    """iteration -> folder of the complete checkpoints, newest first.

    If the process died while a newer checkpoint of the same iteration replaced one, the old one counts, under its name.
    """
    found: dict[int, Path] = {}
    for path in Path(folder).glob("iter_*"):
        match = _WHOLE.fullmatch(path.name.removesuffix(_REPLACED))
        if match and path.is_dir() and not (path.name.endswith(_REPLACED) and int(match[1]) in found):
            found[int(match[1])] = path
    return dict(sorted(found.items(), reverse=True))


def at_iteration(folder: str, iteration: int) -> Path:
    """The complete checkpoint of an iteration; UserError, which lists the others, if there is none."""
    present = whole(folder)
    if iteration not in present:
        there = f"there are {', '.join(map(str, present))}" if present else "there is none"
        raise UserError(f"{folder}: no checkpoint of iteration {iteration}; {there}")
    return present[iteration]


def stage(folder: str, iteration: int) -> Path:
    """A new, empty folder to write a checkpoint to; removes leftovers of killed processes: hold ``SaveLock``.

    The name is new as well: the writer of a killed process may survive briefly and write to the old one.
    """
    for remains in Path(folder).glob("iter_*.partial.*"):
        shutil.rmtree(remains, ignore_errors=True)
    for replaced in Path(folder).glob(f"iter_*{_REPLACED}"):
        if (in_place := replaced.with_name(replaced.name.removesuffix(_REPLACED))).exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(in_place)
    final = iteration_folder(folder, iteration)
    partial = final.with_name(f"{final.name}.partial.{secrets.token_hex(4)}")
    partial.mkdir(parents=True)
    return partial


def track(folder: str, iteration: int) -> None:
    """Point the tracker to a checkpoint, atomically."""
    atomic_write(Path(folder) / TRACKER, f"{iteration}\n", durable=True)
    _sync(Path(folder))


def publish(partial: Path, folder: str, iteration: int) -> Path:
    """``seal`` a written checkpoint and ``place`` it."""
    seal(partial)
    return place(partial, folder, iteration)


def seal(partial: Path) -> None:
    """Give the files of a checkpoint their checksums, and sync them: nothing is written into it afterwards."""
    checksums.write(partial)
    for path in partial.iterdir():
        _sync(path)
    _sync(partial)


def place(partial: Path, folder: str, iteration: int, aside: Path | None = None) -> Path:
    """Rename a checkpoint to its final name, then point the tracker to it; both steps are atomic.

    A checkpoint that it replaces is renamed to ``aside``, or removed.
    """
    final = iteration_folder(folder, iteration)
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    _sync(Path(folder))
    track(folder, iteration)
    if aside is not None and replaced.exists():
        replaced.rename(aside)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def prune(folder: str, iteration: int, keep: int) -> list[Path]:
    """Remove all but the ``keep`` newest checkpoints up to ``iteration``; returns those removed.

    Later ones are not removed: they are another run's.
    """
    removed = []
    for path in [path for number, path in whole(folder).items() if number <= iteration][keep:]:
        # Rename first: a half-removed checkpoint must not be taken for a complete one.
        doomed = path.with_name(f"{path.name}.partial.{secrets.token_hex(4)}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
        removed.append(path)
    return removed


def _sync(path: Path) -> None:
    """Flush to disk; some file systems do not support this for folders."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
