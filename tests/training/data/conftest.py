"""A small vocabulary, and a corpus made with it."""

from pathlib import Path

import pytest

from megatron_lowprec.training.data import corpus_writer
from megatron_lowprec.training.data.tokenizer import Tokenizer
from tests.training.data.corpora import DOCUMENTS, bpe, write_text


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    return bpe("tiny_bpe")


@pytest.fixture
def made(tmp_path: Path, tiny: Tokenizer) -> str:
    prefix = str(tmp_path / "made")
    corpus_writer.write([write_text(tmp_path / "text.jsonl", DOCUMENTS)], {"text": prefix}, tiny)
    return prefix
