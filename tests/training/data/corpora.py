"""Small corpora: their documents, their vocabularies, and what was written of them."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.data.tokenizer import Tokenizer, build_tokenizer

DATA = SHIPPED / "data"
DOCUMENTS = [
    "Hello world",
    "",
    "naïve 東京 😀 e\u0301\u2028 “quotes”",
    "a literal <|endoftext|> stays text",
    "long " * 20000,
    "unbroken" * 4000,
    "last\n",
]


def bpe(folder: str) -> Tokenizer:
    vocab, merges = str(DATA / folder / "vocab.json"), str(DATA / folder / "merges.txt")
    return build_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)


def write_text(path: Path, documents: Sequence[str], key: str = "text") -> str:
    path.write_text("".join(json.dumps({key: document}) + "\n" for document in documents), encoding="utf-8")
    return str(path)


def read_back(prefix: str) -> list[list[int]]:
    """The documents as Megatron's own reader gives them."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))
    return [list(map(int, dataset[i])) for i in range(len(dataset))]


def contents(prefix: str) -> list[bytes]:
    return [Path(prefix + suffix).read_bytes() for suffix in (".bin", ".idx")]
