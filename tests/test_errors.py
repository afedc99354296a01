"""The command lines of all tools say what is wrong with them in one line, as a UserError does."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lowprec.errors import Parser, UserError, disk_is_full, printable, type_of
from tests.environment import python_path
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[1]
PROGRAMS = [
    *(file for file in sorted((ROOT / "tools").glob("*.py")) if file.stem != "__init__"),
    *sorted((ROOT / "tools").glob("*/__main__.py")),
    ROOT / "megatron_lowprec/sweep/cli.py",
]


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda file: str(file.relative_to(ROOT)))
def test_an_unknown_flag_is_one_line(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    monkeypatch.setattr(sys, "argv", ["tool.py", "--no-such-flag"])
    with pytest.raises(SystemExit) as stop:
        module.main(["--no-such-flag"]) if module.main.__code__.co_argcount else module.main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"\S.*: error: .* \(see --help\)\n", error)


def test_a_description_is_shown_as_it_is_written() -> None:
    parser = Parser(prog="tool.py", description="Line one.\n\n    python tool.py")
    assert "\n\n    python tool.py" in parser.format_help()
    assert isinstance(parser, argparse.ArgumentParser)


def ended(work: str, *, reader: bool) -> tuple[int, str]:
    """Exit code and stderr of a tool that does ``work`` after stdin's end; without ``reader``, into a closed pipe."""
    code = f"import sys; from megatron_lowprec.errors import run_tool; sys.exit(run_tool('tool.py', lambda: {work}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code.replace("lambda: ", "lambda: sys.stdin.read() or ")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **python_path()},
    )
    if not reader:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
    error = process.communicate("", timeout=PATIENCE)[1]
    return process.returncode, error


@pytest.mark.parametrize("work", ["print('x')", "print('x' * 10**6)"], ids=["at the end", "amid"])
def test_a_closed_pipe_ends_a_tool_quietly(work: str) -> None:
    assert ended(work, reader=True) == (0, "")
    assert ended(work, reader=False) == (141, "")


def test_another_broken_pipe_is_not_hidden() -> None:
    code, error = ended("exec('raise BrokenPipeError')", reader=True)
    assert (code, "BrokenPipeError" in error) == (1, True)


def test_a_full_disk_is_named() -> None:
    code, error = ended('exec(\'raise OSError(28, "No space left on device", "runs/x.json")\')', reader=True)
    assert (code, error) == (
        2,
        "tool.py: error: No space left on device: runs/x.json; make room, or name another folder\n",
    )
    assert isinstance(disk_is_full(OSError(errno.EDQUOT, "quota")), UserError)
    assert isinstance(disk_is_full(OSError(errno.EFBIG, "large")), UserError)
    assert disk_is_full(OSError(errno.EACCES, "denied")) is None


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("Error while serializing: I/O error: No space left on device (os error 28)", "No space left on device"),
        ("Worker failure: [Errno 28] No space left on device: 'runs/__0_0.distcp'", "No space left on device"),
        ("first [Errno 2], then [Errno 122] Disk quota exceeded", "Disk quota exceeded"),
        ("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598", "a file could not be written to its"),
        ("Error while serializing: I/O error: Permission denied (os error 13)", None),
        ("unexpected pos", None),
    ],
)
def test_a_full_disk_is_named_for_libraries_that_raise_other_types(message: str, shown: str | None) -> None:
    code, error = ended(f"exec({f'raise RuntimeError({message!r})'!r})", reader=True)
    if shown is None:
        assert (code, "RuntimeError" in error) == (1, True)
        assert disk_is_full(RuntimeError(message)) is None
    else:
        assert (code, error.count("\n")) == (2, 1)
        assert error.startswith(f"tool.py: error: {shown}")
        assert error.endswith("; make room, or name another folder\n")


def test_a_tool_without_words_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="tool.py", description="What it is for.")
    parser.add_argument("--out", required=True)
    for words, shown in ((["--outt"], False), ([], True)):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
        error = capsys.readouterr().err
        assert ("What it is for." in error) == shown
        assert "tool.py: error: " in error.splitlines()[-1]


def test_types_have_their_article() -> None:
    assert [type_of(value) for value in (1, "", {}, OSError(), None)] == [
        "an int",
        "a str",
        "a dict",
        "an OSError",
        "nothing",
    ]


def test_an_error_is_one_printable_line() -> None:
    """A file's text in a message neither steers the terminal nor ends the program that prints it."""
    assert str(UserError("a\nb \x1b[2J \x9b \ud800 é")) == r"a\nb \x1b[2J \x9b \ud800 é"
    assert printable("tab\t") == r"tab\t"


def test_an_error_that_quotes_a_large_value_stays_short() -> None:
    error = str(UserError("x" * 10**6 + "; remove it"))
    assert len(error) < 4100
    assert error.endswith("x; remove it")
