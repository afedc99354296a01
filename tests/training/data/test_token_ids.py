"""The ids of a corpus: checked where they are read, verified once, counted for their entropy."""

import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron_lowprec.commands import preprocess_data
from megatron_lowprec.errors import UserError
from megatron_lowprec.training.data import corpus_writer, indexed_dataset
from megatron_lowprec.training.data.tokenizer import Tokenizer, build_tokenizer
from tests.training.data.corpora import read_back, write_text


@pytest.mark.parametrize(("bad", "shown"), [(600, 600), (65535, 65535)])
def test_an_id_outside_of_the_vocabulary_is_refused_where_it_is_read(
    made: str, tiny: Tokenizer, bad: int, shown: int
) -> None:
    """A corpus with a note is not read at a start; each id is checked before the model gets it."""
    ids = np.fromfile(f"{made}.bin", np.uint16)
    ids[7] = bad
    ids.tofile(f"{made}.bin")
    indexed_dataset.check_prefix(made, tiny)
    with pytest.raises(UserError, match=rf"made\.bin holds id {shown}, but the vocabulary has 512 ids"):
        indexed_dataset.tokens_of(made, tiny.vocab_size)
    reader = indexed_dataset.TokenReader(made, tiny.vocab_size)
    assert list(reader.read(np.uint16, 7, 0)) == list(ids[:7])
    with pytest.raises(UserError, match=f"holds id {shown}"):
        reader.read(np.uint16, 8, 0)


def test_a_negative_id_is_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=70000)
    prefix = str(tmp_path / "out")
    corpus_writer.write([write_text(tmp_path / "text.jsonl", ["1 2 3"])], {"text": prefix}, tokenizer)
    np.array([1, -1, 3, 70000], np.int32).tofile(f"{prefix}.bin")
    os.remove(f"{prefix}.json")
    with pytest.raises(UserError, match="holds id -1"):
        indexed_dataset.check_prefix(prefix, tokenizer)


def test_verify_reads_all_of_a_corpus(made: str, tiny: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = indexed_dataset.read_index(made).tokens
    said = f"{made}: 6 documents, {tokens:,} tokens, ids below 512, the bytes that were written"
    assert indexed_dataset.verify(made) == said
    assert preprocess_data.main(["--verify", made]) == 0
    assert capsys.readouterr().out == f"{said}\n"
    content = bytearray(Path(f"{made}.bin").read_bytes())
    content[-4] ^= 0b10  # another id of the vocabulary
    Path(f"{made}.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"made: checksums are .*, and were .*; copy or prepare"):
        indexed_dataset.verify(made)
    assert preprocess_data.main(["--verify", made]) == 1
    assert capsys.readouterr().out.count("\n") == 1


def test_verify_of_a_corpus_of_another_tool_compares_ids(made: str) -> None:
    os.remove(f"{made}.json")
    assert "ids not compared, for lack of a vocabulary's size, no checksums" in indexed_dataset.verify(made)
    assert "ids below 512, no checksums" in indexed_dataset.verify(made, 512)
    with pytest.raises(UserError, match="holds id 511"):
        indexed_dataset.verify(made, 511)


def test_files_are_verified_once(made: str, tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        indexed_dataset.verify_once(made, 512, tmp_path / "cache", said.append)
    assert len(said) == 1
    (tmp_path / "cache" / "verified.json").write_text("{")
    indexed_dataset.verify_once(made, 512, tmp_path / "cache", said.append)
    indexed_dataset.verify_once(made, 600, tmp_path / "cache", said.append)
    assert len(said) == 3
    content = Path(f"{made}.bin").read_bytes()
    Path(f"{made}.bin").write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(UserError, match="checksums are"):
        indexed_dataset.verify_once(made, 600, tmp_path / "cache", said.append)
    with pytest.raises(UserError, match="name another --data-cache-path"):
        indexed_dataset.verify_once(made, 512, Path(f"{made}.bin"), said.append)


def test_a_file_truncated_after_the_check_is_one_line(made: str, tiny: Tokenizer) -> None:
    """A memory map of it would end the process by SIGBUS."""
    reader = indexed_dataset.TokenReader(made, tiny.vocab_size)
    assert len(reader.read(np.uint16, 100, 0)) == 100
    os.truncate(f"{made}.bin", 100)
    with pytest.raises(UserError, match=r"made\.bin was truncated: 100 bytes of at least 200; copy or prepare"):
        reader.read(np.uint16, 100, 0)


def test_unigram_entropy_is_that_of_the_counts(made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_dataset, "_WINDOW", 1000)
    counts = Counter(i for ids in read_back(made) for i in ids)
    total = sum(counts.values())
    expected = -sum(n / total * math.log(n / total) for n in counts.values())
    assert indexed_dataset.unigram_entropy(made) == pytest.approx(expected, rel=1e-12)

    even = str(tmp_path / "even")
    null = build_tokenizer("NullTokenizer", vocab_size=64)
    source = write_text(tmp_path / "even.jsonl", [" ".join(map(str, range(64)))])
    corpus_writer.write([source], {"text": even}, null, append_eod=False)
    assert indexed_dataset.unigram_entropy(even) == pytest.approx(math.log(64), rel=1e-12)
