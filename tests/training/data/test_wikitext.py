"""WikiText as lm-evaluation-harness's task reads it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.data.wikitext import detokenize, pages, read


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("a guest @-@ starring role of 1 @,@ 000 at 2 @.@ 5 %", "a guest-starring role of 1,000 at 2.5 %"),
        ("film , television ; and theatre . He : she ! they ? we", "film, television; and theatre. He: she! they? we"),
        ('a role as " Craig " in " Teddy \'s Story "', 'a role as "Craig" in "Teddy\'s Story"'),
        ("the boys ' film ( 2002 ) and [ sic ] { x }", "the boys' film (2002) and [sic] {x}"),
        (" = Title = \n \n = = Part = = \n text", " = Title =\n\n== Part ==\ntext"),
        ("at 5 ° C it is 's N times", "at 5°C it is's 1 times"),
    ],
)
def test_text_is_put_back_together(raw: str, text: str) -> None:
    assert detokenize(raw) == text


def test_articles_begin_at_their_headings() -> None:
    raw = " \n = One = \n \n a b \n = = Part = = \n c \n = Two = \n d"
    one, two = pages(raw)
    assert one.text == " = One =\n\na b\n== Part ==\nc "
    assert two.text == " = Two =\nd"
    # Words as the text came: runs of space part them, at both ends there are empty ones.
    assert two.words == len(["", "=", "Two", "=", "d"])
    assert two.size == len(" = Two = \n d")


def test_the_shipped_file_is_the_task_s_test_set() -> None:
    found = read(str(SHIPPED / "data/wikitext-test.raw.txt.xz"))
    # Counted, and detokenized, by the task's own functions.
    assert (len(found), sum(page.words for page in found), sum(page.size for page in found)) == (62, 241335, 1290527)
    digest = hashlib.sha256("".join(page.text + "\0" for page in found).encode()).hexdigest()
    assert digest == "da61ba76b9daa5d5964a4e797206bb65bee7dd401fdbc16a83072f8cb94e08db"


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read(str(tmp_path / "nothing"))
    broken = tmp_path / "broken.xz"
    broken.write_bytes(b"no xz")
    with pytest.raises(UserError, match="not a WikiText file"):
        read(str(broken))
    broken.with_suffix(".txt").write_text(" \n")
    with pytest.raises(UserError, match="has no text"):
        read(str(broken.with_suffix(".txt")))
