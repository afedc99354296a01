"""A corpus is what Megatron reads, holds the text it was made from, and is written whole or not at all."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.data import corpus_writer, encoding, indexed_dataset, jsonl
from megatron_lowprec.training.data.tokenizer import Tokenizer, build_tokenizer
from tests.training.data.corpora import DATA, DOCUMENTS, bpe, contents, read_back, write_text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "name", "documents", "tokens", "entropy"),
    [
        pytest.param("gpt2", "valid", 431, 729121, 7.5601, marks=pytest.mark.weekly),
        ("gpt2", "test", 460, 743154, 7.5816),
        ("tiny_bpe", "test", 460, 1705424, 5.3400),
    ],
)
def test_shipped_text_has_the_published_counts(
    tmp_path: Path, folder: str, name: str, documents: int, tokens: int, entropy: float
) -> None:
    source = str(DATA / f"enwiki-{name}.jsonl.xz")
    prefix = corpus_writer.prepare(source, bpe(folder), str(tmp_path), workers=1, report=lambda line: None)
    note = json.loads(Path(f"{prefix}.json").read_text())
    assert (note["documents"], note["tokens"], note["empty"]) == (documents, tokens, 0)
    assert os.path.getsize(f"{prefix}.bin") == 2 * tokens
    assert indexed_dataset.unigram_entropy(prefix) == pytest.approx(entropy, abs=5e-5)


def test_megatron_reads_every_document_and_its_end(made: str, tiny: Tokenizer) -> None:
    documents = read_back(made)
    assert [tiny.detokenize(ids[:-1]) for ids in documents] == [text for text in DOCUMENTS if text]
    assert all(ids[-1] == tiny.eod and tiny.eod not in ids[:-1] for ids in documents)
    indexed_dataset.check_prefix(made, tiny)


def test_without_eod_documents_end_with_their_text(tmp_path: Path, tiny: Tokenizer) -> None:
    source = write_text(tmp_path / "text.jsonl", DOCUMENTS)
    (note,) = corpus_writer.write([source], {"text": str(tmp_path / "out")}, tiny, append_eod=False)
    assert [tiny.detokenize(ids) for ids in read_back(str(tmp_path / "out"))] == [text for text in DOCUMENTS if text]
    assert (note.documents, note.empty, note.append_eod) == (6, 1, False)


@pytest.mark.parametrize(("ids", "dtype"), [(65498, np.uint16), (65499, np.int32), (70000, np.int32)])
def test_ids_that_do_not_fit_16_bits_take_32(tmp_path: Path, ids: int, dtype: type) -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=ids)
    prefix = str(tmp_path / "out")
    corpus_writer.write([write_text(tmp_path / "text.jsonl", [f"0 {ids - 1}"])], {"text": prefix}, tokenizer)
    assert np.fromfile(f"{prefix}.bin", dtype).tolist() == [0, ids - 1, ids]
    assert read_back(prefix) == [[0, ids - 1, ids]]
    indexed_dataset.check_prefix(prefix, tokenizer)


@pytest.mark.slow
def test_bytes_do_not_depend_on_workers(tmp_path: Path, tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_BATCH_BYTES", 3000)
    documents = [f"document {i}: {'words ' * (i % 40)}" for i in range(400)] + ["", "end"]
    sources = [write_text(tmp_path / "a.jsonl", documents), write_text(tmp_path / "b.jsonl", documents[::-1])]
    seen: list[corpus_writer.Progress] = []
    (alone,) = corpus_writer.write(sources, {"text": str(tmp_path / "one")}, tiny, progress=seen.append)
    (shared,) = corpus_writer.write(sources, {"text": str(tmp_path / "three")}, tiny, workers=3)
    assert contents(str(tmp_path / "one")) == contents(str(tmp_path / "three"))
    assert alone == shared
    assert (seen[-1].documents, seen[-1].tokens) == (alone.documents, alone.tokens)
    assert seen[-1].bytes_read == seen[-1].bytes_total == sum(map(os.path.getsize, sources))
    assert len(seen) > 20


def test_a_fault_in_a_worker_names_the_line(tmp_path: Path, tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_BATCH_BYTES", 1000)
    source = Path(write_text(tmp_path / "text.jsonl", ["some text"] * 300))
    lines = source.read_text().splitlines()
    lines[250] = "{}"
    source.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"text\.jsonl, line 251: no key 'text'"):
        corpus_writer.write([str(source)], {"text": str(tmp_path / "out")}, tiny, workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]


class DyingEncoder(encoding.Encoder):
    def __call__(self, batch: jsonl.Batch) -> encoding.EncodedBatch:
        os._exit(1)


def test_a_dead_worker_is_an_error_and_not_a_wait(tmp_path: Path, tiny: Tokenizer) -> None:
    source = write_text(tmp_path / "text.jsonl", ["some text"])
    encoder = DyingEncoder(tiny, ("text",), True, np.uint16)
    with pytest.raises(UserError, match="one of 2 worker processes died"):
        list(encoding.encode(encoder, jsonl.batches([source]), workers=2))


def test_a_failed_write_leaves_what_was_there(made: str, tmp_path: Path, tiny: Tokenizer) -> None:
    before = contents(made)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\nnot fine\n')
    with pytest.raises(UserError, match=r"bad\.jsonl, line 2"):
        corpus_writer.write([str(tmp_path / "bad.jsonl")], {"text": made}, tiny)
    assert contents(made) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    indexed_dataset.check_prefix(made, tiny)


@pytest.mark.parametrize("documents", [[], ["", ""]])
def test_text_without_a_token_is_refused(tmp_path: Path, tiny: Tokenizer, documents: list[str]) -> None:
    source = write_text(tmp_path / "text.jsonl", documents)
    with pytest.raises(UserError, match="no text under 'text'"):
        corpus_writer.write([source], {"text": str(tmp_path / "out")}, tiny)
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]
