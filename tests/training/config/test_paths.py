"""What is written in the end is refused in the beginning where it cannot be."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.paths import check_folder, output_file, output_folder


def test_an_output_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert output_file(str(tmp_path / "new/deep/out.json")).parent.is_dir()
    with pytest.raises(argparse.ArgumentTypeError, match="is a folder"):
        output_file(str(tmp_path))
    with pytest.raises(argparse.ArgumentTypeError, match="file is a file"):
        output_file(str(file / "out.json"))
    assert output_folder(str(tmp_path / "new/folder")).is_dir()
    with pytest.raises(argparse.ArgumentTypeError, match="file is a file"):
        output_folder(str(file))
    with pytest.raises(UserError, match=r"--out .*file is a file"):
        check_folder(file / "deep", "--out")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # who runs the tests may be allowed everything
    with pytest.raises(UserError, match="cannot be written to"):
        check_folder(tmp_path / "new", "--out")
