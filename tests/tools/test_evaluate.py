"""tools/evaluate.py: the driver's validation loss, an independent word perplexity, the same on two processes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowprec.commands import evaluate, export_hf
from megatron_lowprec.training.data.tokenizer import Tokenizer, build_tokenizer
from megatron_lowprec.training.data.wikitext import detokenize
from megatron_lowprec.training.distributed import startup
from tests.launch import fork_ranks
from tests.tools.conftest import MODEL, RAW, TEXT, run
from tests.training.checkpoint.forms import change
from tests.training.conftest import Drive
from tests.training.convert.reference import logits
from tests.training.helpers import argv, largest_file, rows


def test_the_loss_equals_the_drivers_validation_loss(drive: Drive) -> None:
    # One document of whole samples: their order is all that differs between the two.
    text = " ".join(str(i * i % 251) for i in range(40 * 32 + 1))
    Path("text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    options = {"mock_data": None, "train_data_path": ["text.jsonl"], "valid_data_path": ["text.jsonl"]}
    drive(argv(save="run", **options, data_cache_path="cache", eval_iters=10, train_iters=3, recipe="bf16"))
    validation = [row["lm loss validation"] for row in rows(Path("run")) if "lm loss validation" in row][-1]
    found = run("--load", "run", "--data-path", "text.jsonl", "--data-cache-path", "cache", "--max-tokens", "1281")
    assert found["data"]["text.jsonl"]["tokens"] == 1280
    assert found["data"]["text.jsonl"]["loss"] == pytest.approx(validation, rel=1e-6)
    assert found["iteration"] == 3
    # As a prefix, and in parts.
    (prefix,) = (str(path.with_suffix("")) for path in Path("cache").glob("text*.bin"))
    again = run("--load", "run/iter_0000003", "--data-path", prefix, "--max-tokens", "1281")
    assert again["data"][prefix] == found["data"]["text.jsonl"]


def tokenizer() -> Tokenizer:
    """Of ``trained``."""
    return build_tokenizer("GPT2BPETokenizer", vocab_file=str(TEXT["vocab_file"]), merge_file=str(TEXT["merge_file"]))


def test_bits_a_byte_refer_to_the_text(trained: str) -> None:
    """End tokens and the first token, which is not scored, have no bytes; a character of several tokens has its own."""
    documents = ["The cat sat. \N{SNOWMAN}\N{GREEK SMALL LETTER ALPHA}", "Another  text\n\nof two lines."]
    Path("two.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    found = run("--load", trained, "--data-path", "two.jsonl", "--data-cache-path", "cache")["data"]["two.jsonl"]
    first = tokenizer().detokenize(tokenizer().tokenize(documents[0])[:1])
    assert first
    assert found["bytes"] == sum(len(text.encode()) for text in documents) - len(first)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * found["tokens"] / found["bytes"] / math.log(2))


@pytest.mark.parametrize(("most", "size"), [(9, 6), (3, 3), (4, 3), (6, 6)])
def test_a_character_cut_by_an_end_counts_where_its_last_token_is(trained: str, most: int, size: int) -> None:
    Path("two.jsonl").write_text(json.dumps({"text": "\N{SNOWMAN}" * 2}))
    assert len(tokenizer().tokenize("\N{SNOWMAN}")) == 3
    flags = ["--data-path", "two.jsonl", "--data-cache-path", "cache", "--max-tokens", str(most)]
    assert run("--load", trained, *flags)["data"]["two.jsonl"]["bytes"] == size


def reference_nats(folder: Path, ids: list[int], eod: int, length: int) -> float:
    """Negative log likelihood of one article in contiguous windows, the last one whole as well, by plain torch."""
    total = 0.0
    stream = [eod, *ids]
    for begin in range(0, len(ids), length):
        first = min(begin, max(0, len(ids) - length))
        labels = torch.tensor(stream[first + 1 : first + 1 + length])
        found = logits(folder, torch.tensor(stream[first : first + len(labels)])[None])[0].double().log_softmax(-1)
        total -= float(found.gather(1, labels[:, None])[begin - first :].sum())
    return total


def test_a_corpus_is_scored_without_the_rows_that_pad_the_vocabulary(trained: str) -> None:
    text = "The boys' film was seen in 2002, and again in 2004 by the same people who had liked it, or not."
    Path("one.jsonl").write_text(json.dumps({"text": text}) + "\n")
    found = run("--load", trained, "--data-path", "one.jsonl", "--data-cache-path", "cache")["data"]["one.jsonl"]
    assert export_hf.main(["--load", trained, "--out", "hf"]) == 0
    first, *ids = [*tokenizer().tokenize(text), tokenizer().eod]
    assert found["tokens"] == len(ids)
    assert found["loss"] == pytest.approx(reference_nats(Path("hf"), ids, first, 32) / len(ids), rel=1e-5)


def test_word_perplexity_is_lm_evaluation_harness_s(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("--load", trained, "--wikitext", "wiki.raw", "--micro-batch-size", "3")["wikitext"]
    assert export_hf.main(["--load", trained, "--out", "hf"]) == 0
    lines = RAW.split("\n")
    nats, words, size, tokens = 0.0, 0, 0, 0
    for article in ("\n".join(lines[1:6]), "\n".join(lines[6:])):
        ids = tokenizer().tokenize(detokenize(article))
        nats += reference_nats(Path("hf"), ids, tokenizer().eod, 32)
        words, size, tokens = words + len(re.split(r"\s+", article)), size + len(article.encode()), tokens + len(ids)
    assert (found["pages"], found["words"], found["bytes"], found["tokens"]) == (2, words, size, tokens)
    # The export has none of the rows that pad the vocabulary.
    assert found["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert found["word_perplexity"] == pytest.approx(math.exp(nats / words), rel=1e-4)
    assert found["byte_perplexity"] == pytest.approx(math.exp(nats / size), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-5)


def test_windows_and_recipes_are_the_user_s(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run("--load", trained, "--wikitext", "wiki.raw")
    sliding = run("--load", trained, "--wikitext", "wiki.raw", "--stride", "8")
    shorter = run("--load", trained, "--wikitext", "wiki.raw", "--seq-length", "8", "--recipe", "bf16")
    assert sliding["wikitext"]["tokens"] == whole["wikitext"]["tokens"] == shorter["wikitext"]["tokens"]
    assert len({found["wikitext"]["loss"] for found in (whole, sliding, shorter)}) == 3
    assert (sliding["window"], sliding["stride"]) == (32, 8)
    printed = capsys.readouterr().out
    assert "sliding by 8" in printed
    assert "contiguous" in printed


def test_several_recipes_are_scored_as_each_alone(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--load", trained, "--wikitext", "wiki.raw", "--recipe"]
    together = run(*flags, "checkpoint", "mxfp4", "mxfp8", "bf16")["evaluations"]
    printed = capsys.readouterr().out
    assert (printed.count("articles"), printed.count("windows")) == (3, 3), "a recipe given twice is scored once"
    assert [found["recipe"] for found in together] == ["bf16", "mxfp4", "mxfp8", "bf16"]
    assert together == [run(*flags, name) for name in ("checkpoint", "mxfp4", "mxfp8", "bf16")]
    assert len({found["wikitext"]["loss"] for found in together}) == 2, "mxfp4 quantizes no forward pass"


EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 64, "disable_bias_linear": True}


@pytest.mark.parametrize(
    ("layout", "model"),
    [([], {}), (["--tensor-model-parallel-size", "2"], {}), (["--expert-model-parallel-size", "2"], EXPERTS)],
    ids=["data", "tensor", "experts"],
)
def test_two_processes_find_the_same(layout: list[str], model: dict[str, Any], trained: str, drive: Drive) -> None:
    if model:
        trained = "experts"
        drive(argv(**MODEL, **model, save=trained))
    alone = run("--load", trained, "--wikitext", "wiki.raw", "--micro-batch-size", "1")
    flags = ["--load", trained, "--wikitext", "wiki.raw", "--micro-batch-size", "2", "--out", "two.json", *layout]
    printed = fork_ranks(2, ["tools/evaluate.py", *flags], Path())
    two = json.loads(Path("two.json").read_text())
    for name, value in alone["wikitext"].items():
        assert two["wikitext"][name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-6)), name
    assert printed.count("articles") == 1


def test_parts_of_a_corpus_are_training_s(trained: str) -> None:
    lines = [json.dumps({"text": "this document has that to say " * 3})] * 10
    Path("ten.jsonl").write_text("\n".join(lines) + "\n")
    flags = ["--load", trained, "--data-path", "ten.jsonl", "--data-cache-path", "cache", "--split", "70,20,10"]
    tokens = {part: run(*flags, "--part", part)["data"]["ten.jsonl"]["tokens"] for part in ("train", "valid", "test")}
    assert run(*flags)["data"]["ten.jsonl"]["tokens"] == tokens["valid"]
    whole = run(*flags[:-2])["data"]["ten.jsonl"]["tokens"]
    # The first token of each stream is not scored.
    assert sum(tokens.values()) + 3 == whole + 1
    assert tokens["train"] + 1 == 7 * (tokens["test"] + 1)


def test_a_finished_run_s_folder_is_enough(drive: Drive) -> None:
    drive(argv(**{**MODEL, "train_iters": 4, "save_interval": 2}))
    Path("wiki.raw").write_text(RAW)
    assert run("--load", "runs/gpt-bf16", "--wikitext", "wiki.raw")["iteration"] == 4
    assert run("--load", "runs/gpt-bf16", "--iteration", "2", "--wikitext", "wiki.raw")["iteration"] == 2


def test_another_tokenizer_s_files_are_refused(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By evaluate and by export, whether they are named anew or have changed where the run had them."""
    ids = json.loads(Path(TEXT["vocab_file"]).read_text())
    ids["a"], ids["b"] = ids["b"], ids["a"]
    Path("other.json").write_text(json.dumps(ids))
    assert evaluate.main(["--load", trained, "--wikitext", "wiki.raw", "--vocab-file", "other.json"]) == 2
    assert "the same ids mean other text; give the checkpoint's tokenizer" in capsys.readouterr().err
    folder, other = Path(trained, "iter_0000006"), str(Path("other.json").resolve())
    config = (folder / "config.yaml").read_text().replace(str(TEXT["vocab_file"]), other)
    change(folder, "config.yaml", config.encode())
    assert export_hf.main(["--load", trained, "--out", "hf"]) == 2
    assert "the same ids mean other text; give the checkpoint's tokenizer" in capsys.readouterr().err


def test_a_full_disk_is_one_line(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("one.jsonl").write_text(json.dumps({"text": "The cat sat on the mat."}) + "\n")
    flags = ["--load", trained, "--data-path", "one.jsonl", "--data-cache-path", "new"]
    with largest_file(1):
        assert evaluate.main(flags) == 2
    startup.finalize()
    error = capsys.readouterr().err
    assert error.startswith("evaluate.py: error: ")
    assert "File too large" in error
    flags += ["--out", "scores.json"]
    assert evaluate.main(flags) == 0
    with largest_file(1):
        assert evaluate.main(flags) == 2
    startup.finalize()
    error = capsys.readouterr().err
    assert error == "evaluate.py: error: File too large; make room, or name another folder\n"


def test_errors_are_one_line(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        (["--load", trained], "nothing to score"),
        (["--load", "nowhere", "--wikitext", "wiki.raw"], "no checkpoint there"),
        (["--load", trained, "--iteration", "99", "--wikitext", "wiki.raw"], "no checkpoint of iteration 99;"),
        (["--load", trained, "--wikitext", "nothing.raw"], "no such file"),
        (["--load", trained, "--wikitext", "wiki.raw", "--seq-length", "64"], "32 positions"),
        (["--load", trained, "--wikitext", "wiki.raw", "--seq-length", "0"], "--seq-length 0"),
        (["--load", trained, "--wikitext", "wiki.raw", "--stride", "33"], "--stride 33"),
        (["--load", trained, "--wikitext", "wiki.raw", "--stride", "0"], "--stride 0"),
        (["--load", trained, "--data-path", "corpus", "--split", "a"], "--split a"),
        (["--load", trained, "--data-path", "corpus", "--part", "valid"], "--part valid is a part of --split"),
        (["--load", trained, "--wikitext", "wiki.raw", "--split", "1,1,1"], "--split 1,1,1 is for --data-path only"),
        (["--load", trained, "--wikitext", "wiki.raw", "--part", "test"], "--part test is for --data-path only"),
        (["--load", trained, "--wikitext", "wiki.raw", "--max-tokens", "9"], "--max-tokens 9 is for --data-path only"),
        (
            ["--load", trained, "--wikitext", "wiki.raw", "--data-cache-path", "a"],
            "--data-cache-path a is for --data-path",
        ),
        (["--load", trained, "--wikitext", "wiki.raw", "--vocab-file", "moved.json"], "moved.json"),
        (["--load", trained, "--wikitext", "wiki.raw", "--recipe", "mxfp5"], "mxfp5"),
    ]
    for flags, words in cases:
        assert evaluate.main(flags) == 2, flags
        assert words in capsys.readouterr().err
    startup.finalize()
