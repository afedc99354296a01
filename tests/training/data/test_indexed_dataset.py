"""A corpus is what Megatron reads, holds the text it was made from, and is refused when it is not whole or not ours."""

import gzip
import json
import lzma
import math
import multiprocessing
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import zstandard

from megatron_lowprec.commands import preprocess_data
from megatron_lowprec.errors import UserError
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.data import corpus_writer, encoding, indexed_dataset, jsonl
from megatron_lowprec.training.data.tokenizer import Tokenizer, build_tokenizer
from tests.launch import forks
from tests.refusal import refused
from tests.waiting import PATIENCE

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


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return bpe("tiny_bpe")


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


@pytest.fixture
def made(tmp_path: Path, tiny: Tokenizer) -> str:
    prefix = str(tmp_path / "made")
    corpus_writer.write([write_text(tmp_path / "text.jsonl", DOCUMENTS)], {"text": prefix}, tiny)
    return prefix


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


def cut(suffix: str, by: int) -> Callable[[str], None]:
    return lambda prefix: os.truncate(prefix + suffix, os.path.getsize(prefix + suffix) - by)


def replace(suffix: str, content: bytes) -> Callable[[str], None]:
    return lambda prefix: (Path(prefix + suffix).write_bytes(content), None)[1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda prefix: os.remove(f"{prefix}.bin"), r"no file .*made\.bin; prepare the text first"),
        (lambda prefix: os.remove(f"{prefix}.idx"), r"no file .*made\.idx; prepare the text first"),
        (cut(".bin", 2), r"made\.bin is truncated: \d+ bytes, but .*made\.idx describes \d+"),
        (cut(".bin", -2), r"made\.bin is too long"),
        (cut(".idx", 1), r"made\.idx is truncated: \d+ bytes of \d+"),
        (replace(".idx", b""), r"made\.idx is not an index"),
        (replace(".idx", b"MMIDIDX\x00\x00"), r"made\.idx is not an index"),
        (replace(".idx", b"PK" * 100), r"made\.idx is not an index"),
        (replace(".idx", b"MMIDIDX\x00\x00" + b"\x02" + bytes(90)), r"version 2 and type code 0"),
        (replace(".json", b"{"), r"made\.json: cannot be read"),
        (replace(".json", b'{"tokens": 1, "documents": 1}'), r"not of one corpus"),
    ],
)
def test_a_corpus_that_is_not_whole_is_refused(
    made: str, tiny: Tokenizer, damage: Callable[[str], None], message: str
) -> None:
    damage(made)
    with refused(match=message):
        indexed_dataset.check_prefix(made, tiny)


HEADER = 34  # bytes before the lengths


def patched(at: Callable[[int], int], value: int, size: int) -> Callable[[str], None]:
    """Another value of ``size`` bytes, at an offset that depends on the number of parts (of as many documents)."""

    def damage(prefix: str) -> None:
        content = bytearray(Path(f"{prefix}.idx").read_bytes())
        parts = int.from_bytes(content[18:26], "little")
        content[at(parts) : at(parts) + size] = value.to_bytes(size, "little", signed=True)
        Path(f"{prefix}.idx").write_bytes(content)

    return damage


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (patched(lambda parts: HEADER, -5, 4), "its part 0 has length -5"),
        (patched(lambda parts: HEADER + 4, -1, 4), "its part 1 has length -1"),
        (patched(lambda parts: HEADER + 4, 10**6, 4), "its part 2 begins at byte"),
        (patched(lambda parts: HEADER + 4 * parts, 2, 8), "its part 0 begins at byte 2, not 0"),
        (patched(lambda parts: HEADER + 4 * parts + 8, -2, 8), "its part 1 begins at byte -2"),
        (patched(lambda parts: HEADER + 12 * parts - 8, 2**60, 8), "its part 5 begins at byte 1152921504606846976"),
        (patched(lambda parts: HEADER + 12 * parts, 1, 8), "its first document begins at part 1"),
        (patched(lambda parts: HEADER + 12 * parts, -1, 8), "its document 0 begins at part -1"),
        (patched(lambda parts: HEADER + 12 * parts + 8, 5, 8), "its document 2 begins at part 2"),
        (patched(lambda parts: HEADER + 12 * parts + 8, 99, 8), "its document 1 begins at part 99 of 6"),
        (patched(lambda parts: HEADER + 20 * parts, 5, 8), "its documents end at part 5 of 6"),
        (patched(lambda parts: 26, 0, 8), "made.idx is too long"),
        (patched(lambda parts: 18, 2**62, 8), "made.idx is truncated"),
        (cut(".idx", -3), "made.idx is too long"),
    ],
)
def test_every_number_of_an_index_is_checked(
    made: str, tiny: Tokenizer, damage: Callable[[str], None], message: str, noted: bool
) -> None:
    """By Megatron-core none is: a bad one ends a run in the middle, or trains on other tokens."""
    if not noted:
        os.remove(f"{made}.json")
    damage(made)
    with refused(message, match=r"made\.idx is .*(; copy or prepare)"):
        indexed_dataset.check_prefix(made, tiny)


def test_an_index_is_checked_across_windows(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = indexed_dataset.read_index(made)
    monkeypatch.setattr(indexed_dataset, "_WINDOW", 2)
    assert indexed_dataset.read_index(made) == whole
    patched(lambda parts: HEADER + 12 * parts - 8, 0, 8)(made)
    with pytest.raises(UserError, match="its part 5 begins at byte 0"):
        indexed_dataset.read_index(made)


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


def test_a_suffix_is_not_part_of_a_prefix(made: str, tiny: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"name only the prefix: .*made "):
        indexed_dataset.check_prefix(f"{made}.bin", tiny)


def test_another_vocabulary_is_refused_even_if_its_ids_would_fit(made: str) -> None:
    with pytest.raises(UserError, match=r"GPT2BPETokenizer of 512 ids .* but the run's is GPT2BPETokenizer of 50257"):
        indexed_dataset.check_prefix(made, bpe("gpt2"))


def test_a_corpus_of_another_tool_is_judged_by_its_ids(made: str, tiny: Tokenizer) -> None:
    os.remove(f"{made}.json")
    indexed_dataset.check_prefix(made, tiny)
    indexed_dataset.check_prefix(made, bpe("gpt2"))
    with pytest.raises(UserError, match=r"holds id 511, but the vocabulary has 511 ids"):
        indexed_dataset.check_prefix(made, build_tokenizer("NullTokenizer", vocab_size=510))


def test_a_huge_corpus_is_judged_by_spread_windows(
    tmp_path: Path, tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed_dataset, "_WINDOW", 10)
    monkeypatch.setattr(indexed_dataset, "_MAX_WINDOWS", 3)
    prefix = str(tmp_path / "out")
    null = build_tokenizer("NullTokenizer", vocab_size=10)
    corpus_writer.write([write_text(tmp_path / "text.jsonl", [" ".join("1" * 499)])], {"text": prefix}, null)
    os.remove(f"{prefix}.json")
    with pytest.raises(UserError, match="holds id 10"):  # eod is the last of 500 ids, in the last window
        indexed_dataset.check_prefix(prefix, build_tokenizer("NullTokenizer", vocab_size=9))


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


def test_prefixes_survive_a_move(made: str, tmp_path: Path, tiny: Tokenizer) -> None:
    (tmp_path / "elsewhere").mkdir()
    for suffix in (".bin", ".idx", ".json"):
        shutil.move(made + suffix, tmp_path / "elsewhere")
    indexed_dataset.check_prefix(str(tmp_path / "elsewhere" / "made"), tiny)
