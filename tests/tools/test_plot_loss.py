"""The curve is read as it was written, and the summary's numbers are its numbers."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_lowprec.shipped import SHIPPED
from tests.refusal import refused
from tools import plot_loss

DATA = SHIPPED / "data"


def write_run(folder: Path, offset: float = 0.0, iterations: int = 60) -> Path:
    folder.mkdir(parents=True)
    rows: list[dict[str, float]] = []
    for i in range(1, iterations + 1):
        rows.append({"iteration": i, "consumed samples": 4 * i, "lm loss": 4.0 + offset + 4.0 / i})
        if i % 20 == 0:
            rows.append({"iteration": i, "lm loss validation": 4.5 + offset})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "gpt_none-mxfp4_rht_sr")
    options = {
        "recipe": "some/file.yaml",
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_file": "data/tiny_bpe/vocab.json",
        "merge_file": "data/tiny_bpe/merges.txt",
        "valid_data_path": [str(tmp_path / "valid.jsonl")],
        "data_cache_path": str(tmp_path / "cache"),
    }
    config = {"options": options, "recipe": {"name": "mxfp4_rht_sr"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "valid.jsonl").write_text(json.dumps({"text": "!\"#$%&'"}) + "\n")  # 7 different ids and eod
    (folder / "checkpoints").mkdir()
    return folder


def test_a_run_gives_a_picture_and_its_numbers(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = write_run(tmp_path / "reference", offset=-0.25)
    assert plot_loss.main([str(run), "--reference", str(reference / "metrics.jsonl")]) == 0
    said = capsys.readouterr().out
    last = np.mean([4.0 + 4.0 / i for i in range(41, 61)])
    assert f"training loss      {last:.4f}, mean of the last 20 iterations" in said
    assert "validation loss    4.5000 (bf16 run: 4.2500)" in said
    assert f"perplexity         {math.exp(4.5):.2f}" in said
    assert "unigram entropy    2.0794; validation loss is 2.4206 nats above" in said
    assert f"checkpoint         {run / 'checkpoints'}" in said
    assert "TensorBoard files  none" in said
    assert plot_loss._title(run, plot_loss._config(run)) == "gpt_none, recipe mxfp4_rht_sr"
    picture = (run / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000


def test_several_bf16_runs_are_a_range(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offsets = (-0.25, 0.125, -0.5)
    paths = [
        write_run(tmp_path / f"reference{i}", offset, 60 - 20 * i) / "metrics.jsonl" for i, offset in enumerate(offsets)
    ]
    assert plot_loss.main([str(run), "--reference", *map(str, paths)]) == 0
    assert "validation loss    4.5000 (bf16, 3 seeds: 4.0000 to 4.6250)" in capsys.readouterr().out
    alone = (run / "loss.png").read_bytes()
    assert plot_loss.main([str(run), "--reference", *map(str, paths[:2])]) == 0
    assert (run / "loss.png").read_bytes() != alone


def test_the_shipped_bf16_runs_are_three_seeds_that_end_within_the_stated_spread() -> None:
    curves = plot_loss._references(None, Path("gpt_tiny-mxfp4"), 240)
    finals = [curve.final_validation for curve in curves]
    assert len(set(finals)) == 3
    assert max(finals) - min(finals) <= 0.03


def test_a_run_of_another_length_is_not_compared_with_the_shipped_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "gpt_tiny-mxfp4", iterations=40)
    assert plot_loss.main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "not compared: the shipped bf16 runs have 240 iterations, this one 40" in said
    assert "validation loss    4.5000\n" in said


def test_missing_files_are_left_out_with_a_note(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "valid.jsonl").unlink()
    assert plot_loss.main([str(run)]) == 0
    said = capsys.readouterr().out
    assert "no bf16 curve for comparison: docs/results/gpt_none_bf16.metrics.jsonl does not exist" in said
    assert "no unigram entropy: " in said
    assert "validation loss    4.5000\n" in said


def test_a_run_without_validation_or_configuration_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "short"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"iteration": 1, "lm loss": 5.0}\n')
    assert plot_loss.main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "short: 1 iterations" in said
    assert "validation loss" not in said
    assert (folder / "loss.png").exists()


def test_a_continued_run_counts_once_and_a_cut_last_line_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"iteration": 1, "lm loss": 9}\n{"iteration": 2, "lm loss": 8}\n{"iteration": 2, "lm loss": 7}\n'
        '{"iteration": 2, "lm loss validation": 6.5}\n{"iteration": 3, "lm lo'
    )
    curve = plot_loss.read_curve(path, print)
    assert [list(series) for series in curve.train] == [[1, 2], [9.0, 7.0]]
    assert [list(series) for series in curve.validation] == [[2], [6.5]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file; name the folder of a run"),
        ("", "holds no loss yet"),
        ('{"iteration": 1}\n', "holds no loss yet"),
        ("nonsense\n", "holds no loss yet"),
    ],
)
def test_metrics_that_are_none_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_text(content)
    with refused(match=message):
        plot_loss.read_curve(path, print)


@pytest.mark.parametrize("line", [b"nonsense", b'{"lm loss": 2}', b'{"iteration": 1, "lm loss": "x"}', b"\xff"])
def test_a_damaged_row_is_dropped_with_a_note(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1, "lm loss": 9}\n' + line + b'\n{"iteration": 2, "lm loss": 8}\n')
    said: list[str] = []
    assert list(plot_loss.read_curve(path, said.append).train[1]) == [9.0, 8.0]
    assert len(said) == 1
    assert "dropped, as no row of such a file: line 2 (" in said[0]


@pytest.mark.parametrize("config", [None, "[", "recipe: bf16", "3"])
def test_a_fault_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str | None
) -> None:
    if config is not None:  # else the metrics are missing
        write_run(tmp_path / "run")
        (tmp_path / "run" / "config.yaml").write_text(config)
    assert plot_loss.main([str(tmp_path / "run"), "--reference", str(tmp_path / "run" / "metrics.jsonl")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("plot_loss.py: error: ")
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_smoothing_keeps_lines_and_leaves_out_ends_and_what_is_not_finite() -> None:
    def smoothed(values: list[float], reach: int) -> list[list[float]]:
        iterations = np.arange(1, len(values) + 1)
        return [part.tolist() for part in plot_loss.smooth((iterations, np.array(values)), reach)]

    assert smoothed([0, 1, 2, 3, 4, 5, 6], 2) == [[3, 4, 5], [2, 3, 4]]
    assert smoothed([0, 0, 0, 3, 0, 0, 9], 1) == [[2, 3, 4, 5, 6], [0, 1, 1, 1, 3]]
    assert smoothed([0, math.nan, 1, 2, math.inf, 3], 1) == [[3, 4], [1, 2]]
    assert smoothed([1, 2, 6], 9) == [[2], [3]]
    assert smoothed([7], 1) == [[1], [7]]
    assert smoothed([], 1) == [[], []]
