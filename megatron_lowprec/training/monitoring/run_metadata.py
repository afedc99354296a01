"""run.json: hardware, versions and options of a run. Written when training starts and when it ends."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]


class RunRecord:
    """The file of one launch; a rank that does not write does nothing.

    A run that never ends keeps ``"ended": null``. A launch that continues a run keeps the larger peak of memory.

    Args:
        path: where it goes.
        writes: whether this rank does.
        facts: what is known at the start, as JSON.
        continues: whether the launch goes on with the run whose record is there.
    """

    def __init__(self, path: Path, writes: bool, facts: Mapping[str, Any], *, continues: bool) -> None:
        self._path, self._writes = path, writes
        if not writes:
            return
        before = _read(path) if continues else {}
        self._facts = {
            **facts,
            "commit": commit("megatron_lowprec", "pretrain_gpt.py"),
            "started": _now(),
            "ended": None,
            "iteration": None,
            "peak_memory_bytes": before.get("peak_memory_bytes"),
        }
        self._write()

    def end(self, iteration: int, peak_memory_bytes: int | None) -> None:
        """Training is over, for whatever reason; the peak is that of the fullest GPU, None without one."""
        if not self._writes:
            return
        peaks = [peak for peak in (self._facts["peak_memory_bytes"], peak_memory_bytes) if peak is not None]
        self._facts |= {"ended": _now(), "iteration": iteration, "peak_memory_bytes": max(peaks, default=None)}
        self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps(self._facts, indent=1) + "\n", encoding="utf-8")


def commit(*paths: str) -> str | None:
    """The sources' git commit, "with changes" where tracked files in ``paths`` differ; None outside a checkout."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no", *paths)
    return head if changed == "" else f"{head} with changes"


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=20, cwd=REPOSITORY, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _read(path: Path) -> dict[str, Any]:
    """The record of the launch before; empty where there is none, or none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
