"""Per-job state: the record, cell.json in the job's folder, and the lock of the process that runs the job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_lowprec.errors import UserError
from megatron_lowprec.files import atomic_write, read_json
from megatron_lowprec.recipe.parsing import in_current_form
from megatron_lowprec.sweep.jobs import NOT_THE_RUN, Job
from megatron_lowprec.training.config.options import OPTIONS
from megatron_lowprec.training.distributed import process_lock
from megatron_lowprec.training.distributed.process_lock import Holder, ProcessLock

RECORD = "cell.json"
LOCKS = "locks"
State = Literal["running", "done", "failed", "interrupted"]


@dataclass(frozen=True)
class Record:
    """State and history of a job."""

    id: str
    state: State  # only "done" is never run again; a killed process also leaves "running" (see ``holder``)
    exit_code: int | None  # of the last attempt
    attempts: int
    seconds: float  # of all finished attempts
    started: str
    ended: str | None
    iteration: int
    train_iters: int
    seq_length: int
    hash: str  # of ``resolved``, which is ``Job.resolved``
    resolved: Mapping[str, Any]
    command: list[str]  # of the last attempt


class Lock(ProcessLock):
    """Lock on one job of the sweep in ``out``. The job's own process outlives a killed sweep and still holds it."""

    def __init__(self, out: Path, job_id: str) -> None:
        super().__init__(out / LOCKS / job_id)

    def acquire(self) -> Holder | None:
        """Take the lock, or return its holder, as ``holder``."""
        found = super().acquire()
        return None if found is None else found.living()


def holder(out: Path, job_id: str) -> Holder | None:
    """The process that runs a job; None if the job is free, as ``process_lock.holder``."""
    found = process_lock.holder(out / LOCKS / job_id)
    return None if found is None else found.living()


def read(run: Path) -> Record | None:
    """The record in a job's folder, or None if it never started; UserError for a file of another kind."""
    path, remedy = run / RECORD, "move the folder away to run it anew"
    try:
        content = read_json(path, remedy)
    except FileNotFoundError:
        return None
    wrong = [name for name, valid in _VALID.items() if name not in content or not valid(content[name])]
    if wrong:
        raise UserError(f"{path}: cannot be read: {', '.join(wrong)} missing or of another type; {remedy}")
    return Record(**{name: content[name] for name in _VALID})


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_time(value: object) -> bool:
    try:
        return datetime.fromisoformat(str(value)).tzinfo is not None
    except ValueError:
        return False


_VALID: Mapping[str, Callable[[Any], bool]] = {
    "id": lambda value: type(value) is str,
    "state": lambda value: value in get_args(State),
    "exit_code": lambda value: value is None or type(value) is int,
    "attempts": _is_count,
    "seconds": lambda value: type(value) in (int, float) and value >= 0,
    "started": _is_time,
    "ended": lambda value: value is None or _is_time(value),
    "iteration": _is_count,
    "train_iters": _is_count,
    "seq_length": _is_count,
    "hash": lambda value: type(value) is str,
    "resolved": lambda value: type(value) is dict,
    "command": lambda value: type(value) is list,
}


def write(run: Path, record: Record) -> None:
    """Write ``record`` into a job's folder."""
    atomic_write(run / RECORD, json.dumps(asdict(record), indent=1) + "\n")


def begin(job: Job, run: Path, command: list[str]) -> Record:
    """Create and write the record of an attempt that starts now."""
    before = read(run)
    record = Record(
        id=job.id,
        state="running",
        exit_code=None,
        attempts=before.attempts + 1 if before else 1,
        seconds=before.seconds if before else 0.0,
        started=now(),
        ended=None,
        iteration=before.iteration if before else 0,
        train_iters=job.train_iters,
        seq_length=job.seq_length,
        hash=digest(job.resolved),
        resolved=job.resolved,
        command=command,
    )
    write(run, record)
    return record


def end(run: Path, record: Record, state: State, exit_code: int, seconds: float, iteration: int) -> Record:
    """Create and write the record of an attempt that ended now."""
    total = round(record.seconds + seconds, 3)
    record = replace(record, state=state, exit_code=exit_code, seconds=total, ended=now(), iteration=iteration)
    write(run, record)
    return record


def now() -> str:
    """The local time in ISO format, with its offset from UTC."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def digest(resolved: Mapping[str, Any]) -> str:
    """A short hash of a resolved run."""
    text = json.dumps(resolved, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def differences(record: Record, job: Job) -> list[str]:
    """Fields in which the job differs from the run that its folder was created for."""
    if record.hash == digest(job.resolved):
        return []
    older = _today(record.resolved)
    options = {name: value for name, value in job.resolved["options"].items() if not _is_as_before(name, value, older)}
    before, after = dict(_flat(older)), dict(_flat({**job.resolved, "options": options}))
    return [
        f"{name} {_shown(after.get(name))} (was {_shown(before.get(name))})"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _is_as_before(name: str, value: Any, older: Mapping[str, Any]) -> bool:
    """Whether a job names the value that an option had by default when an older record left it out."""
    return name not in older["options"] and value is not None and value == OPTIONS[name].formerly


def _today(resolved: Mapping[str, Any]) -> Mapping[str, Any]:
    """``resolved`` of an older version, with the options that count today; missing fields take their defaults."""
    options = {name: value for name, value in resolved.get("options", {}).items() if name not in NOT_THE_RUN}
    recipe = in_current_form(resolved.get("recipe", {}))
    return {
        **resolved,
        "options": options,
        "recipe": {name: value for name, value in recipe.items() if name not in ("summary", "source")},
    }


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted names, without nulls; options lose their prefix, and lists are leaves."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            inner = f"{name}.{key}" if name and name != "options" else str(key)
            yield from _flat(item, inner)
    elif value is not None:
        yield name.replace("_", "-") if "." not in name else name, list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return "not set" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)
