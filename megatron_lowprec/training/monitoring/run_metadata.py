"""run.json: hardware, versions and options of a run. Written at the start and the end of training."""

from __future__ import annotations

import datetime
import json
import secrets
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megatron_lowprec.shipped import SHIPPED

PHASES = "gemms_of_phases"  # of a recipe with phases: number of the phase -> GEMM -> its backend


class RunRecord:
    """The metadata file of one launch; a no-op on ranks that do not write.

    A run that never ends keeps ``"ended": null``. A launch that resumes a run keeps the larger memory peak, the id
    under which Weights & Biases knows the run, and what earlier phases of the same recipe ran.

    Args:
        path: the file.
        writes: whether this rank writes it.
        facts: values known at the start, as JSON.
        continues: whether the launch resumes the run whose record exists.

    Attributes:
        run_id: 8 hex digits, of W&B's run; None on ranks that do not write.
    """

    def __init__(self, path: Path, writes: bool, facts: Mapping[str, Any], *, continues: bool) -> None:
        self._path, self._writes = path, writes
        self.run_id: str | None = None
        if not writes:
            return
        before = _read(path) if continues else {}
        self.run_id = str(before.get("run_id") or secrets.token_hex(4))
        peak = before.get("peak_memory_bytes")
        self._facts: dict[str, Any] = {
            **facts,
            "commit": commit(),
            "started": _now(),
            "ended": None,
            "iteration": None,
            "run_id": self.run_id,
            "peak_memory_bytes": peak if isinstance(peak, int) else None,
        }
        phases = before.get(PHASES)
        if isinstance(phases, dict) and before.get("recipe") == facts.get("recipe"):
            self._facts[PHASES] = phases
        self._write()

    def enter_phase(self, number: int, gemms: Mapping[str, str]) -> None:
        """Record the backends of a phase of the recipe, which is 0 before the first."""
        if self._writes:
            self._facts[PHASES] = {**self._facts.get(PHASES, {}), str(number): dict(gemms)}
            self._write()

    def native_check(self, checks: Mapping[str, Any], fell_back: Collection[str]) -> None:
        """Record the checks of native products; ``fell_back``: backends whose GEMMs are emulated since."""
        if self._writes:
            gemms = self._facts["gemms"].items()
            emulated = {gemm: how for gemm, how in gemms if how.split(" ")[0] in fell_back}
            self._facts["gemms"] |= {gemm: f"emulated ({how}: failed its check)" for gemm, how in emulated.items()}
            self._facts["native_check"] = dict(checks)
            self._write()

    def end(self, iteration: int, peak_memory_bytes: int | None) -> None:
        """Record the end of training, for whatever reason; the peak is the fullest GPU's, None without a GPU."""
        if not self._writes:
            return
        peaks = [peak for peak in (self._facts["peak_memory_bytes"], peak_memory_bytes) if peak is not None]
        self._facts |= {"ended": _now(), "iteration": iteration, "peak_memory_bytes": max(peaks, default=None)}
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._facts, indent=1) + "\n", encoding="utf-8")


def commit(*beside: str) -> str | None:
    """The package's git commit, "with changes" if tracked files of it or of folders ``beside`` it differ.

    None for an installed package, also in a virtual environment within another checkout.
    """
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", ".", *(f"../{folder}" for folder in beside))
    return head if changed == "" else f"{head} with changes"


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=20, cwd=SHIPPED, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _read(path: Path) -> dict[str, Any]:
    """The previous launch's record; empty if it is missing or unreadable."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
