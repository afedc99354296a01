"""A file is replaced whole or not at all; a damaged one is read as far as it can be, or named in one line."""

import json
import os
from pathlib import Path

import pytest

from megatron_lowprec import files
from megatron_lowprec.errors import UserError
from megatron_lowprec.files import Row, atomic_write, check_text, default_mode, json_lines, read_json


@pytest.mark.parametrize("durable", [False, True])
def test_the_new_content_replaces_the_old_and_nothing_else_is_left(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    atomic_write(path, "old\n", durable=durable)
    atomic_write(path, "né\n", durable=durable)
    assert path.read_bytes() == "né\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    atomic_write(path, "old")
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        atomic_write(path, "new")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("file", "old")]


def test_a_file_gets_the_rights_of_newly_opened_ones(tmp_path: Path) -> None:
    private, opened = tmp_path / "private", tmp_path / "opened"
    private.touch(0o600)
    opened.touch()
    default_mode(private)
    assert private.stat().st_mode == opened.stat().st_mode


def rows(path: Path, tail: int | None = None) -> tuple[list[Row], list[str]]:
    said: list[str] = []

    def check(row: Row) -> None:
        check_text(row)
        if row["a"] < 0:
            raise ValueError("a is negative")

    return list(json_lines(path, said.append, check, tail)), said


def test_json_lines_drops_damaged_lines_with_one_note(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\n\xff\n{"a": 2}\n\n{"a": 3\n[4]\n{"b": 5}\n{"a": "x"}\n{"a": -1}\n{"a": 6}\n{"a": 7')
    found, said = rows(path)
    assert found == [{"a": 1}, {"a": 2}, {"a": 6}]
    assert said == [
        f"{path}: dropped, as no row of such a file: line 2 ('utf-8' codec can't decode byte 0xff in position 0: "
        "invalid start byte), line 5 (Expecting ',' delimiter at character 9), line 6 (not a JSON object "
        "but a list) and 3 more"
    ]


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a": 1, "b": "\\u001b[31m"}',
        b'{"a": 1, "b": ["\\ud800"]}',
        b'{"a": 1, "b": "' + b"x" * files.LONGEST_LINE + b'"}',
        b"\0" * 100,
    ],
    ids=["nested", "number", "escape", "surrogate", "long", "zeros"],
)
def test_json_lines_drops_what_no_row_has(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    found, said = rows(path)
    assert found == [{"a": 1}, {"a": 2}]
    assert len(said) == 1
    assert said[0].startswith(f"{path}: dropped, as no row of such a file: line 2 (")
    assert said[0].isprintable()


def test_a_line_that_is_being_written_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2, "b')
    assert rows(path) == ([{"a": 1}], [])
    assert rows(tmp_path / "none") == ([], [])


def test_the_tail_begins_with_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": 3}\n')
    assert rows(path, tail=10) == ([{"a": 3}], [])
    assert rows(path, tail=18) == ([{"a": 2}, {"a": 3}], [])
    assert rows(path, tail=100)[0] == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_json_lines_have_a_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\n' * 3)
    monkeypatch.setattr(files, "LARGEST_LINES", 20)
    with pytest.raises(UserError, match="27 bytes are more than the 20 that are read"):
        rows(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff", "can't decode byte 0xff"),
        (b"[1]", "not a JSON object but a list"),
        (b"{", "Expecting property name"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "a number of 5,000 digits"),
        (json.dumps({"a": {"\x1b[2J": 1}}).encode(), "a control character or half a character"),
    ],
)
def test_a_json_file_that_is_no_object_is_one_line(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"f\.json: cannot be read: .*; remove it$") as error:
        read_json(path, "remove it")
    assert why in str(error.value)
    assert str(error.value).isprintable()


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text('{"a": 1}', encoding="utf-8-sig")
    assert read_json(tmp_path / "f.json", "") == {"a": 1}


def test_a_text_file_has_a_size_limit(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text('{"a": 1}')
    with pytest.raises(ValueError, match="more than 7 bytes"):
        files.read_text(path, 7)
    assert read_json(path, "") == {"a": 1}
