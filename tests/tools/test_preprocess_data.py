"""Megatron's flags, Megatron's files, and faults as one line with exit code 2."""

import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_lowprec.commands import preprocess_data
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.data import indexed_dataset
from megatron_lowprec.training.data.tokenizer import build_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
VOCAB, MERGES = (str(SHIPPED / "data" / "tiny_bpe" / name) for name in ("vocab.json", "merges.txt"))
BPE = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", VOCAB, "--merge-file", MERGES]


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    rows = [json.dumps({"text": f"text {i}", "title": f"title {i}"}) for i in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows[:20]))
    (tmp_path / "b.jsonl.xz").write_bytes(lzma.compress("\n".join(rows[20:]).encode()))
    return [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.xz")]


def test_each_key_becomes_a_corpus_by_megatrons_name(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = build_tokenizer("GPT2BPETokenizer", vocab_file=VOCAB, merge_file=MERGES)
    prefix = str(tmp_path / "new" / "out")
    arguments = ["--input", *inputs, "--json-keys", "text", "title", "--output-prefix", prefix, "--append-eod", *BPE]
    assert preprocess_data.main([*arguments, "--log-interval", "25"]) == 0
    for key in ("text", "title"):
        indexed_dataset.check_prefix(f"{prefix}_{key}_document", tokenizer)
        dataset = IndexedDataset(f"{prefix}_{key}_document")
        assert [tokenizer.detokenize(dataset[i]) for i in range(len(dataset))] == [
            f"{key} {i}<|endoftext|>" for i in range(30)
        ]
    said = capsys.readouterr()
    assert "out_text_document.bin: 30 documents" in said.out
    assert "tokens/s with --workers 1" in said.out
    assert "40 documents" in said.err  # both keys of the first file, past the 25 asked for


@pytest.mark.slow
def test_as_a_program_with_workers_it_writes_the_same(inputs: list[str], tmp_path: Path) -> None:
    alone, shared = str(tmp_path / "alone"), str(tmp_path / "shared")
    assert preprocess_data.main(["--input", *inputs, "--output-prefix", alone, *BPE]) == 0
    program = [sys.executable, "-m", "megatron_lowprec", "preprocess"]
    command = [*program, "--input", *inputs, "--output-prefix", shared, "--workers", "2", *BPE]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    for suffix in (".bin", ".idx", ".json"):
        one, two = (Path(f"{prefix}_text_document{suffix}").read_bytes() for prefix in (alone, shared))
        assert one == two
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--json-keys", "body"], "a.jsonl, line 1: no key 'body'; found: 'text', 'title'; name the right one"),
        (["--vocab-file", "nowhere.json"], "--vocab-file nowhere.json: no such file"),
        (["--workers", "0"], "--workers 0: must be at least 1"),
        (["--tokenizer-model", "x"], "--tokenizer-model is not read by --tokenizer-type GPT2BPETokenizer; give --t"),
        (
            ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"],
            "--vocab-file is not read by --tokenizer-type Nul",
        ),
        (["--output-prefix", f"{VOCAB}/x"], f"cannot write --output-prefix {VOCAB}/x: "),
    ],
)
def test_a_fault_is_one_line_and_exit_code_2(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    usual = ["--input", *inputs, "--output-prefix", str(tmp_path / "out"), *BPE]
    assert preprocess_data.main([*usual, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("preprocess_data.py: error: ")
    assert message in said.err
    assert said.err.count("\n") == 1
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("arguments", "idle"),
    [
        (["--input", "a.jsonl", "--append-eod"], "--input, --append-eod"),
        (["--output-prefix", "new", "--workers", "2"], "--output-prefix, --workers"),
        (
            ["--json-keys", "body", *BPE, "--log-interval", "9"],
            "--json-keys, --vocab-file, --merge-file, --log-interval",
        ),
    ],
)
def test_flags_that_verify_does_not_read_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], idle: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        preprocess_data.main(["--verify", "made", "--vocab-size", "9", *arguments])
    assert stop.value.code == 2
    assert f"error: --verify only reads corpora, with no use for {idle}: leave it out" in capsys.readouterr().err
