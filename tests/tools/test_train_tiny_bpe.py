"""The committed vocabulary is what the script makes of the committed text."""

from pathlib import Path

from tools import train_tiny_bpe


def test_training_again_gives_the_committed_bytes(tmp_path: Path) -> None:
    train_tiny_bpe.save(train_tiny_bpe.train(), tmp_path)
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / name).read_bytes() == (train_tiny_bpe.DESTINATION / name).read_bytes()
