"""The committed vocabulary is what the script makes of the committed text."""

from pathlib import Path

import pytest

from tools import train_tiny_bpe


def test_training_again_gives_the_committed_bytes(tmp_path: Path) -> None:
    train_tiny_bpe.save(train_tiny_bpe.train(), tmp_path)
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / name).read_bytes() == (train_tiny_bpe.DESTINATION / name).read_bytes()


def test_a_folder_that_cannot_be_made_is_refused_before_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (Path("/proc/x"), tmp_path / "file"):
        with pytest.raises(SystemExit, match="2"):
            train_tiny_bpe.main(["--output", str(folder)])
        said = capsys.readouterr().err
        assert f"argument --output: {folder}: " in said
        assert said.count("\n") == 1
