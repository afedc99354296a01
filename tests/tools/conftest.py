"""The driver in this process, for the tools that work on its checkpoints; a model and a WikiText to score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.commands import evaluate, export_hf
from megatron_lowprec.shipped import SHIPPED
from tests.training.conftest import Drive, drive, driving
from tests.training.helpers import argv
from tools.fuzz.readers import readers
from tools.fuzz.run import FuzzedReader
from tools.fuzz.template import TINY

__all__ = ["drive"]

BPE = SHIPPED / "data/tiny_bpe"
TEXT = {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": BPE / "vocab.json", "merge_file": BPE / "merges.txt"}
# 512 ids and 488 rows of padding.
MODEL: dict[str, Any] = {
    **TEXT,
    "vocab_size": None,
    "make_vocab_size_divisible_by": 1000,
    "lr": 0.02,
    "train_iters": 6,
    "lr_decay_style": "constant",
}
RAW = "\n".join(
    [
        " ",
        " = One = ",
        " ",
        ' A guest @-@ starring role , in 1 @,@ 000 films ; and " theatre " . It was the city \'s first ( or last ) . ',
        " = = Part = = ",
        " The boys ' film was seen in 2002 , and again in 2004 by the same people who had liked it , or not . ",
        " = Two = ",
        " ",
        " Another one . ",
        "",
    ]
)


def run(*flags: str) -> dict[str, Any]:
    """tools/evaluate.py in this process; its JSON."""
    assert evaluate.main([*flags, "--out", "results.json"]) == 0
    found: dict[str, Any] = json.loads(Path("results.json").read_text())
    return found


@pytest.fixture
def trained(drive: Drive) -> str:
    """A small model in fp32 and WikiText of two articles, in an empty folder."""
    Path("wiki.raw").write_text(RAW)
    drive(argv(**MODEL, save="run"))
    return "run"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``tools.fuzz.template`` makes, in this process."""
    folder = tmp_path_factory.mktemp("made")
    with driving(folder) as call:
        call([*TINY, "--mock-data", "--save", "run"])
        assert export_hf.main(["--load", "run", "--out", "hf"]) == 0
    return folder


@pytest.fixture(scope="session")
def known(made: Path) -> dict[str, FuzzedReader]:
    """The readers of the fuzz by their names."""
    return {reader.name: reader for reader in readers(made)}
