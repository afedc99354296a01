"""Shards of titled articles: each title once, the same bytes however often it was interrupted and by how many workers.

The hub's path runs on a folder in the hub's own format, through the package datasets where that is installed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.data import indexed_dataset, shards
from megatron_lowprec.training.data.tokenizer import build_tokenizer
from tools import prepare_wikipedia

VOCAB, MERGES = (str(SHIPPED / "data" / "tiny_bpe" / name) for name in ("vocab.json", "merges.txt"))
TOKENIZER = build_tokenizer("GPT2BPETokenizer", vocab_file=VOCAB, merge_file=MERGES)
BPE = ["--vocab-file", VOCAB, "--merge-file", MERGES]

# 23 titles in 30 rows: repeated within a shard of 5, across shards, and at the end; one article is empty.
TITLES = [f"Title {i}" for i in range(20)] + ["Title 3", " Title 19 ", "Naïve", "Title 20", "Naïve", "title 3"]
TITLES += ["Title 0", "Title 1", "Title 2", "Title 4"]
ROWS = [
    {
        "id": str(i),
        "url": "",
        "title": title,
        "text": "" if title == "Title 7" else f"Article {i} — of {title.strip()}.",
    }
    for i, title in enumerate(TITLES)
]
UNIQUE = [row for i, row in enumerate(ROWS) if row["title"].strip() not in [t.strip() for t in TITLES[:i]]]


def jsonl_files(folder: Path) -> list[str]:
    lines = [json.dumps(row) + "\n" for row in ROWS]
    (folder / "a.jsonl").write_text("".join(lines[:13]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[13:]).encode()))
    return ["--input", str(folder / "a.jsonl"), str(folder / "b.jsonl.gz")]


def parquet_files(folder: Path, rows: list[dict[str, str]] = ROWS) -> list[str]:
    pa = pytest.importorskip("pyarrow", reason="pyarrow (extra 'datasets') is not installed")
    from pyarrow import parquet

    for name, part in (("a", rows[:13]), ("b", rows[13:])):
        parquet.write_table(pa.Table.from_pylist(part), folder / f"{name}.parquet", row_group_size=4)
    return ["--input", str(folder / "a.parquet"), str(folder / "b.parquet")]


def hub_folder(folder: Path) -> list[str]:
    pytest.importorskip("datasets", reason="datasets (extra 'datasets') is not installed")
    data = folder / "hub" / "20231101.en"
    data.mkdir(parents=True)
    parquet_files(data)
    for i, name in enumerate("ab"):
        (data / f"{name}.parquet").rename(data / f"train-{i:05d}-of-00002.parquet")
    features = "".join(f"  - name: {name}\n    dtype: string\n" for name in ROWS[0])
    (folder / "hub" / "README.md").write_text(
        "---\nconfigs:\n- config_name: 20231101.en\n  data_files:\n  - split: train\n    path: 20231101.en/train-*\n"
        f"dataset_info:\n- config_name: 20231101.en\n  features:\n{features}  splits:\n  - name: train\n"
        f"    num_bytes: 1000\n    num_examples: {len(ROWS)}\n  download_size: 1000\n  dataset_size: 1000\n---\n"
    )
    return ["--dataset", str(folder / "hub")]


SOURCES: dict[str, Callable[[Path], list[str]]] = {"jsonl": jsonl_files, "parquet": parquet_files, "hub": hub_folder}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return SOURCES[request.param](tmp_path)


def prepared(source: list[str], prefix: str, *flags: str) -> int:
    return prepare_wikipedia.main([*source, "--output-prefix", prefix, "--shard-documents", "5", *BPE, *flags])


def files(prefix: str) -> dict[str, str]:
    """Name after the prefix -> checksum of every shard's ids and index."""
    place = Path(prefix)
    found = sorted(place.parent.glob(f"{place.name}-*.*"))
    return {
        path.name.removeprefix(place.name): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in found
        if path.suffix != ".json"
    }


def documents(prefix: str) -> list[str]:
    dataset = IndexedDataset(prefix)
    return [TOKENIZER.detokenize(dataset[i]) for i in range(len(dataset))]


def test_each_title_once_in_shards_with_a_manifest(source: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert prepared(source, "out/en") == 0
    manifest = json.loads(Path("out/en.manifest.json").read_text())
    texts: list[str] = []
    for number, shard in enumerate(manifest["shards"]):
        prefix = f"out/en-{number:05d}_text_document"
        assert shard["prefix"] == prefix
        assert manifest["data_path"][number] == Path(prefix).name
        indexed_dataset.check_prefix(prefix, TOKENIZER)
        found = documents(prefix)
        assert len(found) == shard["documents"]
        assert indexed_dataset.read_index(prefix).tokens == shard["tokens"]
        for suffix, checksum in shard["sha256"].items():
            assert hashlib.sha256(Path(prefix + suffix).read_bytes()).hexdigest() == checksum
        texts += found
    assert texts == [f"{row['text']}<|endoftext|>" for row in UNIQUE if row["text"]]
    assert [shard["documents"] + shard["empty"] for shard in manifest["shards"]] == [5, 5, 5, 5, len(UNIQUE) - 20]
    assert manifest["documents"] + manifest["empty"] == len(UNIQUE) == 23
    assert manifest["duplicates"] == sum(shard["duplicates"] for shard in manifest["shards"]) == 30 - 23
    assert manifest["empty"] == 1
    assert manifest["tokens"] == sum(shard["tokens"] for shard in manifest["shards"])
    assert "5 shards, 22 documents" in capsys.readouterr().out
    assert not list(Path("out").glob("*.partial.json"))
    assert not list(Path("out").glob("*.titles"))
    # Again: nothing to do, and nothing done.
    assert prepared(source, "out/en") == 0
    assert "is there already" in capsys.readouterr().out


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_interrupted_preparation_goes_on(
    source: list[str], after: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepared(source, "whole/en") == 0
    written = 0
    write = shards.write_batches

    def interrupted(batches: Iterator[Any], *args: Any, **options: Any) -> Any:
        nonlocal written
        if written == after:
            next(batches)  # articles are read, and their titles seen, when it happens
            raise KeyboardInterrupt
        written += 1
        return write(batches, *args, **options)

    monkeypatch.setattr(shards, "write_batches", interrupted)
    assert prepared(source, "part/en") == 130
    assert "the same command continues" in capsys.readouterr().err
    assert len(list(Path("part").glob("*.bin"))) == after
    assert not Path("part/en.manifest.json").exists()
    monkeypatch.setattr(shards, "write_batches", write)
    assert prepared(source, "part/en") == 0
    printed = capsys.readouterr().out
    assert (f"going on after {after} whole shards" in printed) == (after > 0)
    assert files("part/en") == files("whole/en")
    whole, part = (json.loads(Path(f"{name}/en.manifest.json").read_text()) for name in ("whole", "part"))
    for content in (whole, part):
        for shard in content["shards"]:
            shard["prefix"] = Path(shard["prefix"]).name
    assert part == whole


def test_titles_beyond_the_last_whole_shard_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process leaves behind: titles appended, the note of the shard not yet written."""
    monkeypatch.chdir(tmp_path)
    source = jsonl_files(tmp_path)
    assert prepared(source, "whole/en") == 0
    replace = shards.atomic_write

    def killed(path: Path, content: str) -> None:
        if path.name == "en.partial.json" and len(json.loads(content)["shards"]) == 3:
            raise KeyboardInterrupt
        replace(path, content)

    monkeypatch.setattr(shards, "atomic_write", killed)
    assert prepared(source, "part/en") == 130
    assert len(np.fromfile("part/en.titles", np.uint64)) == 15
    assert json.loads(Path("part/en.partial.json").read_text())["titles"] == 10
    monkeypatch.setattr(shards, "atomic_write", replace)
    unfinished = Path("part/.en-00002_text_document.abc")
    unfinished.mkdir()
    (unfinished / "corpus.bin").write_bytes(b"half")
    assert prepared(source, "part/en") == 0
    assert files("part/en") == files("whole/en")
    # Nothing but the shards and the manifest is left.
    assert len(list(Path("part").iterdir())) == 3 * 5 + 1


def test_the_work_of_another_process_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source, admitted = jsonl_files(tmp_path), shards.lock

    def waited_for(path: str) -> AbstractContextManager[None]:
        monkeypatch.setattr(shards, "lock", admitted)
        assert prepared(source, "out/en") == 0  # by the process before
        monkeypatch.setattr(shards, "write_batches", None)
        return admitted(path)

    monkeypatch.setattr(shards, "lock", waited_for)
    assert prepared(source, "out/en") == 0
    assert "is there already" in capsys.readouterr().out


@pytest.mark.slow
def test_workers_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = jsonl_files(tmp_path)
    assert prepared(source, "one/en") == 0
    assert prepared(source, "two/en", "--workers", "2") == 0
    assert files("one/en") == files("two/en")


def test_another_preparation_is_not_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = jsonl_files(tmp_path)
    assert prepared(source, "out/en") == 0
    assert prepared(source, "out/en", "--no-append-eod") == 2
    assert "another preparation: append eod False (there: True)" in capsys.readouterr().err
    assert prepared(["--input", "a.jsonl"], "out/en") == 2
    assert "source 'a.jsonl'" in capsys.readouterr().err
    assert prepared(source, "out/en", "--text-key", "url") == 2
    assert "text key 'url' (there: 'text')" in capsys.readouterr().err
    assert prepared(source, "out/en", "--title-key", "id") == 2
    assert "title key 'id' (there: 'title')" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("texts", "empty_of_shards"),
    [(["a", "b", ""], [0]), (["a", "", ""], [1]), (["a", "b", "", "", "c", ""], [0, 3]), (["", "", "a"], [2])],
)
def test_shards_without_text_count_as_empty_articles(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    texts: list[str],
    empty_of_shards: list[int],
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"title": str(i), "text": text}) + "\n" for i, text in enumerate(texts)]
    Path("a.jsonl").write_text("".join([*lines, lines[0]]))
    assert prepared(["--input", "a.jsonl"], "out/en", "--shard-documents", "2") == 0
    assert f"{texts.count('')} empty articles dropped" in capsys.readouterr().out
    manifest = json.loads(Path("out/en.manifest.json").read_text())
    assert [shard["empty"] for shard in manifest["shards"]] == empty_of_shards
    assert (manifest["empty"], manifest["duplicates"]) == (texts.count(""), 1)
    found = [text for number in range(len(empty_of_shards)) for text in documents(f"out/en-{number:05d}_text_document")]
    assert found == [f"{text}<|endoftext|>" for text in texts if text]


def test_verify_finds_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert prepared(jsonl_files(tmp_path), "out/en") == 0
    Path("out").rename("moved")
    assert prepare_wikipedia.main(["--verify", "moved/en.manifest.json"]) == 0
    path = Path("moved/en-00001_text_document.bin")
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    Path("moved/en-00002_text_document.idx").unlink()
    capsys.readouterr()
    assert prepare_wikipedia.main(["--verify", "moved/en.manifest.json"]) == 1
    printed = capsys.readouterr().out
    assert "en-00001_text_document.bin: other bytes" in printed
    assert "en-00002_text_document.idx: missing" in printed
    assert prepare_wikipedia.main(["--verify", "nowhere.json"]) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--output-prefix is missing"),
        (["--output-prefix", "out", "--input", "nothing.jsonl"], "no such file"),
        (["--output-prefix", "out", "--input", "text.txt"], "neither .jsonl"),
        (["--output-prefix", "out", "--input", "empty.jsonl"], "no article with text under 'text'"),
        (["--output-prefix", "out", "--input", "untitled.jsonl"], "'title'"),
        (["--output-prefix", "out", "--input", "empty.jsonl", "--workers", "0"], "at least 1"),
    ],
)
def test_errors_are_one_line(
    flags: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (("text.txt", ""), ("empty.jsonl", ""), ("untitled.jsonl", '{"text": "x"}\n')):
        Path(name).write_text(content)
    assert prepare_wikipedia.main([*flags, *BPE]) == 2
    assert words in capsys.readouterr().err


def test_the_hub_needs_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    assert prepare_wikipedia.main(["--output-prefix", "out", *BPE]) == 2
    assert "pip install 'megatron-lowprec[datasets]'" in capsys.readouterr().err


def test_a_dataset_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets", reason="datasets (extra 'datasets') is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing").mkdir()
    assert prepare_wikipedia.main(["--output-prefix", "out", "--dataset", str(tmp_path / "nothing"), *BPE]) == 2
    assert "error: --dataset" in capsys.readouterr().err


def test_rows_of_another_form_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = parquet_files(tmp_path, [{"title": "a", "text": "b"}] * 13 + [{"title": "c"}] * 2)  # type: ignore[list-item]
    assert prepared(source, "out/en") == 2
    assert "text" in capsys.readouterr().err


def test_the_shipped_text_is_of_the_listed_corpus(tmp_path: Path) -> None:
    """Checksums, documents, bytes and GPT-2 tokens are those that the data's page states; no article is dropped."""
    text, prefix = SHIPPED / "data" / "enwiki-valid.jsonl.xz", str(tmp_path / "valid")
    page = (SHIPPED / "data" / "README.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith("| `enwiki-valid.jsonl.xz` |"))
    size, articles, text_bytes, tokens = (int(cell) for cell in row.strip("| ").split(" | ")[1:5])
    words = ["--checksums", "data/corpus.sha256", "--workers", "2"]
    assert prepare_wikipedia.main(["--input", str(text), "--output-prefix", prefix, *words]) == 0
    manifest = json.loads(Path(f"{prefix}.manifest.json").read_text())
    assert (manifest["documents"], manifest["tokens"]) == (articles, tokens)
    assert (manifest["duplicates"], manifest["empty"]) == (0, 0)
    with lzma.open(text) as lines:
        texts = [json.loads(line)["text"] for line in lines]
    assert (text.stat().st_size, sum(len(each.encode()) for each in texts)) == (size, text_bytes)
    listed = (SHIPPED / "data" / "corpus.sha256").read_text().split()
    for name in ("enwiki-valid.jsonl.xz", "enwiki-test.jsonl.xz"):
        checksum = listed[listed.index(name) - 1]
        assert hashlib.sha256((SHIPPED / "data" / name).read_bytes()).hexdigest() == checksum
        assert f"{checksum}  {name}" in page


def test_another_file_than_the_list_s_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list_of, damaged, other = (tmp_path / name for name in ("list.sha256", "a.jsonl", "b.jsonl"))
    list_of.write_text(f"{hashlib.sha256(b'whole').hexdigest()} *a.jsonl\n")  # as sha256sum -b writes it
    damaged.write_text("damaged")
    other.write_text("")
    arguments = ["--output-prefix", str(tmp_path / "out"), *BPE, "--checksums", str(list_of)]
    for inputs, words in (
        ([damaged], "another than in"),
        ([other], "has no b.jsonl"),
        ([], "is for the files of --input"),
    ):
        assert prepare_wikipedia.main([*arguments, *(["--input", *map(str, inputs)] if inputs else [])]) == 2
        assert words in capsys.readouterr().err
    for content in (b"\xff", None):
        list_of.write_bytes(content) if content else list_of.unlink()
        assert prepare_wikipedia.main([*arguments, "--input", str(damaged)]) == 2
        assert f"--checksums {list_of}: not a list" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_a_tokenizer_that_the_type_does_not_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--output-prefix", str(tmp_path / "out"), "--input", "a.jsonl", "--tokenizer-model", "m"]
    assert prepare_wikipedia.main(arguments) == 2
    assert "--tokenizer-model is not read by --tokenizer-type GPT2BPETokenizer" in capsys.readouterr().err
