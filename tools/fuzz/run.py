"""Runs a reader on mutations of its files, in a process of its own, which may die."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.checkpoint.safe_load import Damaged
from tools.fuzz.mutations import mutated

SECONDS = 60
"""Time limit of one reading: far above any, also on a busy machine."""
_MEMORY = 4 * 2**30  # bytes that a process may take beside what it has when it begins
_STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_READY = "ready\n"
_MARKER = "it_ran"  # what code in a mutation would make


@dataclass(frozen=True)
class FuzzedReader:
    """A reader of one kind of file.

    Attributes:
        name: of the reader.
        files: paths below the folder, each mutated in turn.
        make: writes the files, and what else the reader needs, into the current folder.
        read: reads them there. UserError and Damaged refuse a file; any other exception is a fault.
        exact: whether every mutation must be refused, as under a checksum.
    """

    name: str
    files: tuple[str, ...]
    make: Callable[[], object]
    read: Callable[[], object]
    exact: bool = False


@dataclass
class Result:
    """Numbers of mutations of a reader's files that were read and refused; each fault in words."""

    name: str
    mutations: int = 0
    read: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)


def write(files: Mapping[str, bytes | str]) -> None:
    """Write files by their paths, with the folders that they need."""
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())


def copy(source: Path, name: str) -> None:
    """Copy a file or a folder."""
    if source.is_dir():
        shutil.copytree(source, name)
    else:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, name)


class _TooLong(BaseException):
    pass


def _too_long(number: int, frame: FrameType | None) -> None:
    raise _TooLong(f"no answer within {SECONDS} s")


def run(reader: FuzzedReader, folder: Path, count: int, seed: int, only: int | None = None) -> Result:
    """Read ``count`` mutations of the reader's files, in turn; ``only`` is the number of one."""
    folder.mkdir(parents=True)
    result, numbers = Result(reader.name), list(range(count)) if only is None else [only]
    result.mutations = len(numbers)
    while numbers:
        receive, send = os.pipe()
        child = os.fork()
        if not child:
            os.close(receive)
            code = 1
            try:
                with os.fdopen(send, "w", buffering=1) as answers:
                    _read_all(reader, folder, numbers, seed, answers.write)
                code = 0
            except BaseException:  # noqa: BLE001 - the parent's code must not go on here
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(send)
        with os.fdopen(receive) as answers:
            if answers.readline() != _READY:
                raise RuntimeError(f"{reader.name}: cannot make or read its files")
            for line in answers:
                number, outcome, words = json.loads(line)
                numbers.remove(number)
                if outcome == "fault":
                    result.faults.append(f"{_named(reader, number)}: {words}")
                else:
                    setattr(result, outcome, getattr(result, outcome) + 1)
        _, status = os.waitpid(child, 0)
        if numbers and status:
            result.faults.append(f"{_named(reader, numbers.pop(0))}: the process ended with status {status}")
    shutil.rmtree(folder)
    return result


def _named(reader: FuzzedReader, number: int) -> str:
    return f"{reader.files[number % len(reader.files)]}, mutation {number}"


def _read_all(
    reader: FuzzedReader, folder: Path, numbers: list[int], seed: int, answer: Callable[[str], object]
) -> None:
    """Answer with number, outcome and words for each mutation, in a line of JSON."""
    signal.signal(signal.SIGALRM, _too_long)
    taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY, taken + _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        reader.make()
    whole = {name: Path(name).read_bytes() for name in reader.files}
    outcome, words = _outcome(reader)
    if outcome != "read":
        raise AssertionError(f"{reader.name}: the file as it is: {words}")
    answer(_READY)
    for number in numbers:
        name = reader.files[number % len(reader.files)]
        Path(name).write_bytes(mutated(whole[name], Random(f"{seed} {reader.name} {number}")))
        outcome, words = _outcome(reader)
        if outcome == "read" and reader.exact:
            outcome, words = "fault", "accepted"
        if Path(_MARKER).exists():
            outcome, words = "fault", "code of the file ran"
            os.rmdir(_MARKER)
        answer(json.dumps([number, outcome, words]) + "\n")
        Path(name).write_bytes(whole[name])


def _outcome(reader: FuzzedReader) -> tuple[str, str]:
    """What became of one reading, and its words."""
    said = io.StringIO()
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            reader.read()
        outcome, words = "read", ""
    except (UserError, Damaged) as error:
        outcome, words = "refused", str(error)
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        last = traceback.extract_tb(sys.exc_info()[2])[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        outcome, words = "fault", f"{type(error).__name__} at {where}: {str(error)[:200]!a}"
    finally:
        signal.alarm(0)
    if outcome != "fault" and _STEERS.search(words + said.getvalue()):
        outcome, words = "fault", f"prints {_STEERS.search(words + said.getvalue())[0]!a}"  # type: ignore[index]
    if outcome == "refused" and "\n" in words:
        outcome, words = "fault", f"more than one line: {words[:100]!a}"
    return outcome, words


def all_results(
    readers: list[FuzzedReader], folder: Path, count: int, seed: int, only: int | None = None
) -> Iterator[Result]:
    """The result of each reader."""
    for number, reader in enumerate(readers):
        yield run(reader, folder / str(number), count, seed, only)
