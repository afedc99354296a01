"""WikiText as lm-evaluation-harness's task `wikitext` (version 2) defines it: pages, detokenized text, word counts.

WikiText is tokenized: `` @-@ ``, spaces around punctuation. A model reads the detokenized text, and its loss is divided
by the words of the original text, so that models with different vocabularies compare. Pure text, no torch.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_lowprec.errors import UserError

_LARGEST = 2**28  # bytes of text
SHIPPED = "data/wikitext-test.raw.txt.xz"  # in the repository

# Applied in this order: a pattern and its replacement.
_PUNCTUATION = [(re.escape(f" {mark} "), f"{mark} ") for mark in ":;.!?,"]
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        ("s '", "s'"),
        (r"/' [0-9]/", "/'[0-9]/"),  # as in the task: slashes and brackets are literal
        (" @-@ ", "-"),
        (" @,@ ", ","),
        (r" @\.@ ", "."),
        *_PUNCTUATION,
        (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
        (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
        (r"{\s*([^}]*?)\s*}", r"{\1}"),
        (r'"\s*([^"]*?)\s*"', r'"\1"'),
        (r"'\s*([^']*?)\s*'", r"'\1'"),
        ("= = = =", "===="),
        ("= = =", "==="),
        ("= =", "=="),
        (" ° ", "°"),
        (" \n", "\n"),
        ("\n ", "\n"),
        (" N ", " 1 "),
        (" 's", "'s"),
    ]
]


@dataclass(frozen=True)
class Page:
    """One article: the detokenized text, and the words and UTF-8 bytes of the original text."""

    text: str
    words: int
    size: int


def pages(raw: str) -> Iterator[Page]:
    """The articles of a WikiText file, each from its heading `` = Title = `` to the next."""
    lines: list[str] = []
    for line in raw.split("\n"):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            if "".join(lines).strip():
                yield _page("\n".join(lines))
            lines = []
        lines.append(line)
    yield _page("\n".join(lines))


def _page(raw: str) -> Page:
    return Page(detokenize(raw), len(re.split(r"\s+", raw)), len(raw.encode()))


def detokenize(raw: str) -> str:
    """Detokenize text."""
    for pattern, replacement in _RULES:
        raw = pattern.sub(replacement, raw)
    return raw


def read(path: str) -> list[Page]:
    """The articles of a file, plain or .xz.

    Raises:
        UserError: a missing file, or one that is not text or has none.
    """
    try:
        with (lzma.open if path.endswith(".xz") else open)(path, "rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise UserError(f"--wikitext {path}: more than {_LARGEST:,} bytes of text; WikiText has 11,000,000 at most")
        if not (text := content.decode()).strip():
            raise UserError(f"--wikitext {path}: has no text; the shipped one is {SHIPPED}")
        return list(pages(text))
    except FileNotFoundError:
        raise UserError(f"--wikitext {path}: no such file; the shipped one is {SHIPPED}") from None
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise UserError(f"--wikitext {path}: not a WikiText file in UTF-8, plain or .xz: {error}") from None
