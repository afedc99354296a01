"""The pages that users read, taken apart: links, fenced blocks, commands, code spans."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from megatron_lowprec.shipped import SHIPPED

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", SHIPPED / "data/README.md", *(ROOT / "docs").rglob("*.md")]
)

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_COMMENT = re.compile(r"<!--.*?-->", re.S)
SCRIPTS = ("scripts/measure.sh", "scripts/study.sh", "scripts/prepare_corpus.sh")
PROGRAMS = ("python", "megatron-lowprec", "torchrun", "make", "sbatch", "srun", "pip", "lm_eval", *SCRIPTS)
ERROR = "pretrain_gpt.py: error: "
ELLIPSES = ("...", "…")


def name_of(page: Path) -> str:
    """For ids of tests and messages."""
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


@dataclass(frozen=True)
class Fence:
    """A fenced block: "" is a shell's, "text" is output, "python" and "yaml" are what they say."""

    page: Path
    language: str
    body: str
    # Nothing stands between it and the block before.
    follows: bool = False


@dataclass(frozen=True)
class Command:
    """One command of a page, split into words."""

    page: Path
    words: tuple[str, ...]
    fenced: bool

    def __str__(self) -> str:
        return f"{name_of(self.page)}: {shlex.join(self.words)}"


def fences(page: Path) -> list[Fence]:
    """Fenced blocks in order."""
    text, found, end = page.read_text(encoding="utf-8"), [], -1
    for match in _FENCE.finditer(text):
        follows = end >= 0 and not text[end : match.start()].strip()
        found.append(Fence(page, match["language"], match["body"], follows))
        end = match.end()
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks and comments."""
    return _COMMENT.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))


def spans(page: Path) -> list[str]:
    """Code in running text and tables."""
    return _SPAN.findall(prose(page))


def numbers(text: str) -> set[float]:
    """Decimal fractions, but for versions, dates and identifiers of papers."""
    return {float(number) for number in re.findall(r"(?<![\w./-])\d+\.\d{1,4}(?![\w.]|\d)", text)}


def lines_of(text: str) -> list[str]:
    """Lines of a shell, those that a backslash continues put together."""
    return text.replace("\\\n", " ").splitlines()


def commands_of(fence: Fence) -> list[Command]:
    """Commands of a shell's block; of a line with several, each."""
    if fence.language:
        return []
    return [Command(fence.page, words, True) for line in lines_of(fence.body) for words in _commands_in(line)]


def commands(page: Path) -> list[Command]:
    """Commands of fenced blocks and of code spans."""
    found = [command for fence in fences(page) for command in commands_of(fence)]
    return found + [Command(page, words, False) for span in spans(page) for words in _commands_in(span)]


def refusals(page: Path) -> list[tuple[Command, str]]:
    """Commands that a block of output with an error stands right under, and that error."""
    found = []
    for before, output in pairwise(fences(page)):
        if output.follows and output.body.startswith(ERROR):
            (command,) = commands_of(before)
            found.append((command, output.body.splitlines()[0].removeprefix(ERROR)))
    return found


def flag_lines(page: Path) -> list[tuple[str, ...]]:
    """Lines of shell blocks that are flags alone: the rest of a command of the driver."""
    return [
        words
        for fence in fences(page)
        if not fence.language
        for line in lines_of(fence.body)
        if line.startswith("--")
        for words in _split(line)
    ]


def _commands_in(line: str) -> Iterator[tuple[str, ...]]:
    try:
        parts = _split(line)
    except ValueError:  # a quote that does not end: no shell's line
        return
    for words in parts:
        while words and re.fullmatch(r"\w+=\S*|timeout|\d+", words[0]):
            words = words[1:]
        if words and words[0] in PROGRAMS and len(words) > 1:
            yield words


def _split(line: str) -> list[tuple[str, ...]]:
    """Words of each simple command of a line; what a shell would fill in becomes one word."""
    lexer = shlex.shlex(re.sub(r"\$\([^)]*\)", "FILLED_IN", line), posix=True, punctuation_chars=";&")
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set(";&|"):
            parts.append([])
        else:
            parts[-1].append(word)
    return [tuple(part) for part in parts if part]
