"""A text is prepared once, whatever its compression, however many processes ask for it."""

import gzip
import lzma
import multiprocessing
from pathlib import Path

import pytest
import zstandard

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.data import corpus_writer
from megatron_lowprec.training.data.tokenizer import Tokenizer
from tests.launch import forks
from tests.training.data.corpora import DOCUMENTS, bpe, contents, read_back, write_text
from tests.waiting import PATIENCE


def test_all_compressions_prepare_to_the_same_bytes(tmp_path: Path, tiny: Tokenizer) -> None:
    plain = Path(write_text(tmp_path / "text.jsonl", DOCUMENTS))
    expected = contents(corpus_writer.prepare(str(plain), tiny, str(tmp_path / "cache"), workers=1))
    forms = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}
    for suffix, compress in forms.items():
        packed = tmp_path / f"text.jsonl{suffix}"
        packed.write_bytes(compress(plain.read_bytes()))
        assert contents(corpus_writer.prepare(str(packed), tiny, str(tmp_path / "cache"), workers=1)) == expected


def test_prepare_works_once_for_the_same_text_and_vocabulary(tmp_path: Path, tiny: Tokenizer) -> None:
    source = write_text(tmp_path / "text.jsonl", ["one"])
    said: list[str] = []

    def prepare(tokenizer: Tokenizer = tiny, append_eod: bool = True) -> str:
        cache = str(tmp_path / "cache")
        return corpus_writer.prepare(source, tokenizer, cache, workers=1, append_eod=append_eod, report=said.append)

    first = prepare()
    assert (prepare(), len(said)) == (first, 2)
    prefixes = {first, prepare(append_eod=False), prepare(bpe("gpt2"))}
    write_text(tmp_path / "text.jsonl", ["another"])
    prefixes.add(prepare())
    assert len(prefixes) == 4
    assert tiny.fingerprint in first
    assert corpus_writer.prepare(first, tiny, "nowhere", workers=1) == first


def prepare_in_process(source: str, cache: str, results: "multiprocessing.Queue[tuple[str, int]]") -> None:
    said: list[str] = []
    prefix = corpus_writer.prepare(source, bpe("tiny_bpe"), cache, workers=1, report=said.append)
    results.put((prefix, len(said)))


@pytest.mark.slow
def test_processes_that_prepare_at_once_write_once(tmp_path: Path, tiny: Tokenizer) -> None:
    source = write_text(tmp_path / "text.jsonl", DOCUMENTS * 20)
    context = forks()
    results = context.Queue()
    arguments = (source, str(tmp_path / "cache"), results)
    processes = [context.Process(target=prepare_in_process, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=PATIENCE) for _ in processes]
    for process in processes:
        process.join()
    assert len({prefix for prefix, _ in answers}) == 1
    assert sorted(lines for _, lines in answers) == [0, 0, 0, 2]
    assert len(read_back(answers[0][0])) == 20 * 6


def test_a_missing_text_and_an_unwritable_cache_are_named(tmp_path: Path, tiny: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"nowhere\.jsonl\.xz: no such file"):
        corpus_writer.prepare("nowhere.jsonl.xz", tiny, str(tmp_path), workers=1)
    source = write_text(tmp_path / "text.jsonl", ["one"])
    with pytest.raises(UserError, match="name another --data-cache-path"):
        corpus_writer.prepare(source, tiny, source, workers=1)
