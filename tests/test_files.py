"""A file is replaced whole or not at all."""

import os
from pathlib import Path

import pytest

from megatron_lowprec.files import atomic_write, default_mode


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
