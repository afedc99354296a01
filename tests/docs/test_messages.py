"""Messages in the pages are those that the code prints: run where that is cheap, else found in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed.run import get_args_parser as torchrun_parser

from megatron_lowprec.errors import UserError
from megatron_lowprec.training import run as driver
from megatron_lowprec.training.distributed.startup import Ranks
from tests.docs.markdown import PAGES, ROOT, fences, refusals

QUOTING = [
    ROOT / name for name in ("docs/guide/troubleshooting.md", "docs/guide/quickstart.md", "docs/guide/nan-and-inf.md")
]
_PROGRAM = re.compile(r"^[\w. ]+\.py: (error: )?")
# In a template, what stands for a value.
_HOLE = "\0"
# Letters that a template must have of its own: f"{a}: {b}" would be found everywhere.
_LEAST = 8


_FEW = 6
# A row of a run's header.
_HEADER = re.compile(r"(\w+): {2,}(.*)")
_RUN = (ROOT / "megatron_lowprec/training/run.py").read_text(encoding="utf-8")
# Flag and value that a message about a flag begins with.
_FLAG = re.compile(r"^--[\w-]+( \S+)?: ")


# ---- the messages of the source
class Template(NamedTuple):
    """What the code may print: the text between its holes, and a pattern with a group for each."""

    parts: tuple[str, ...]
    pattern: re.Pattern[str]


def text_of(node: ast.expr) -> str | None:
    """A string in the source with a hole for each value; None for what is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else _HOLE for part in node.values)  # type: ignore[misc]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [text_of(side) for side in (node.left, node.right)]
        return None if sides == [None, None] else "".join(_HOLE if side is None else side for side in sides)
    return None


@cache
def templates() -> tuple[Template, ...]:
    """Every string of the source that could be a message."""
    texts: set[str] = set()
    files = [*(ROOT / "megatron_lowprec").rglob("*.py"), *(ROOT / "tools").rglob("*.py"), ROOT / "pretrain_gpt.py"]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.expr) and (found := text_of(node)) is not None:
                texts.add(found)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for echo in re.findall(r'echo ((?:"[^"]*"(?:\s*\\\n\s*)?)+)', makefile):
        texts.add(re.sub(r"\$\(\w+\)", _HOLE, " ".join(re.findall(r'"([^"]*)"', echo))))
    return tuple(
        Template(tuple(text.split(_HOLE)), re.compile("(.*)".join(re.escape(part) for part in text.split(_HOLE))))
        for text in texts
        if len(re.sub(r"[^A-Za-z]", "", text.replace(_HOLE, ""))) >= _LEAST and "\n" not in text
    )


def is_printed(line: str) -> bool:
    """Whether a template gives this line, and others what stands in its holes, if that is long."""
    if row := _HEADER.fullmatch(line):
        return f'("{row[1]}"' in _RUN and _is_value(row[2])
    for text in dict.fromkeys((line, _FLAG.sub("", line))):
        for template in templates():
            found = template.pattern.fullmatch(text) if all(part in text for part in template.parts) else None
            if found and all(_is_value(value) for value in found.groups()):
                return True
    return False


def _is_value(text: str) -> bool:
    """Few words, or a message itself with few words beside it."""
    if _words(text) <= _FEW:
        return True
    for template in templates():
        if all(part in text for part in template.parts):
            found = template.pattern.search(text)
            if found and _words(text[: found.start()] + text[found.end() :]) <= _FEW:
                return True
    return False


def _words(text: str) -> int:
    """How much of a sentence is there: paths, flags, numbers and lists of few are values."""
    return len(re.findall(r"(?<![/.\w-])[A-Za-z]{3,}(?![/.\w-])", text))


def quoted(page: Path) -> Iterator[str]:
    """Lines of output in a page."""
    for fence in fences(page):
        if fence.language == "text":
            for line in fence.body.splitlines():
                if line.strip() and not line.rstrip().endswith(("...", "…")):
                    yield _PROGRAM.sub("", line).strip()


@pytest.mark.parametrize("line", [line for page in QUOTING for line in quoted(page)])
def test_quoted_lines_are_in_the_source(line: str) -> None:
    assert is_printed(line), "no string in the source gives this line"


def test_reasons_in_the_table_are_in_the_source() -> None:
    page = (ROOT / "docs/guide/troubleshooting.md").read_text(encoding="utf-8")
    table = page.split("| reason | what to do |\n", 1)[1].split("\n\n", 1)[0]
    reasons = re.findall(r"^\| `([^`]+)`", table, re.M)
    assert len(reasons) == 4
    assert [reason for reason in reasons if not is_printed(reason)] == []


@pytest.mark.parametrize(
    "line",
    [
        "there is no recipes 'mxfp9': did you mean mxfp8?",
        "nothing to train: the checkpoint stands at iteration 240 of --train-iters 240",
        "--load x holds another model: whatever the author of this page liked to think that it says; give the "
        "checkpoint's options or another --load",
        "recipes:     mxfp8",
        "iteration 3 skipped: weights and moments stay as they were",
        "make: PYTHON='python3' is not Python 3.10; install one",
    ],
)
def test_a_wrong_line_is_noticed(line: str) -> None:
    assert not is_printed(line)


# ---- commands with their messages
CASES = [(command.words, message) for page in PAGES for command, message in refusals(page)]


def test_there_are_commands_with_messages() -> None:
    assert len(CASES) > 8


@pytest.mark.parametrize(("words", "message"), CASES, ids=lambda value: value if isinstance(value, str) else value[-1])
def test_command_prints_its_message(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processes, arguments = 1, list(words[2:])
    if words[0] == "torchrun":
        given = torchrun_parser().parse_args(list(words[1:]))
        processes, arguments = int(given.nproc_per_node), given.training_script_args

    def started(*_: object) -> None:
        raise AssertionError("the run would have started")

    monkeypatch.setattr(driver, "initialize", started)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # as the page's reader is told
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        driver.run(arguments, Ranks(0, processes, 0, processes))
    assert str(error.value) == message
