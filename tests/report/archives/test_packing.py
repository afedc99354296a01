"""An archive of runs gives the report of their folders, in equal bytes each time, and shows nothing of the machine."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.commands import report_page as report
from megatron_lowprec.report.archives.container import read
from megatron_lowprec.report.archives.packing import write_archive
from megatron_lowprec.report.archives.sources import unpack
from megatron_lowprec.report.runs import find_runs
from megatron_lowprec.shipped import SHIPPED
from tests.report.synthetic import add_cells, cell, operand_row, write_run, write_snapshots, write_sweep

JOBS = ("bf16-s1", "bf16-s2", "mxfp4-s1", "mxfp4-s2", "mxfp4_rht-s1", "mxfp4_sr-s1")

Capture = pytest.CaptureFixture[str]


def reported(capsys: Capture, *arguments: object) -> list[str]:
    """The terminal text of a report, without the places of its files."""
    assert report.main([str(each) for each in arguments]) == 0, capsys.readouterr().err
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if not line.startswith(("report: ", "archive: "))]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep with every kind of end, of options with absolute paths."""
    options = {"train_data_path": [str(tmp_path / "corpora" / "wiki")], "vocab_file": "/opt/share/gpt2/vocab.json"}
    folder = write_sweep(tmp_path / "runs/sweep", {"bf16": 3.7, "mxfp4": 3.81}, seeds=2, options=options)
    write_run(folder / "mxfp4_sr-s1", "mxfp4_sr", nan_from=200, options=options)
    (folder / "mxfp4_rht-s1").mkdir()
    add_cells(folder, "synthetic", [cell("mxfp4_sr", 1), cell("mxfp4_rht", 1), cell("mxfp4_rht", 2)])
    run = folder / "mxfp4-s1"
    write_snapshots(run, [operand_row(400, "layer.0", 20.0)])
    (run / "log.txt").write_text(f"read {tmp_path}/corpora/wiki")
    (run / "cell.json").write_text(f'{{"exit_code": 0, "command": ["{Path.home()}/bin/python", "{run}"]}}')
    (run / "tensorboard").mkdir()
    (run / "tensorboard/events").write_text("x")
    (run / "iter_0000400").mkdir()
    return folder


def test_the_report_on_an_archive_is_the_one_on_its_folders(sweep: Path, tmp_path: Path, capsys: Capture) -> None:
    out, archive = tmp_path / "out", tmp_path / "new" / "runs.safetensors.xz"
    other = write_run(tmp_path / "then", options={"train_iters": 800})
    before = reported(capsys, sweep, other, "--out", out, "--archive", archive)
    assert before[0].startswith(
        "8 runs in 2 groups that are not compared with each other: 5 finished, 1 diverged, 1 failed, 1 not started."
    )
    # The options that separate the groups are paths.
    paths = {"FOLDER1": f"{tmp_path}/corpora", "FOLDER2": "/opt/share/gpt2"}
    after = "\n".join(reported(capsys, archive, "--out", out))
    for placeholder, folder in paths.items():
        assert placeholder in after
        after = after.replace(placeholder, folder)
    assert after.split("\n") == before
    page = (out / "report.html").read_text(encoding="utf-8")
    assert f"{archive}/sweep/mxfp4-s1" in page
    assert "/report-" not in page  # the temporary folder


def test_the_latest_value_of_a_repeated_iteration_counts_in_an_archive_too(tmp_path: Path) -> None:
    """The later rows have other keys than the first ones, so an archive keeps them in another table."""
    folder, archive, scratch = write_run(tmp_path / "run"), tmp_path / "a.safetensors.xz", tmp_path / "out"
    scratch.mkdir()
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    later = [row for row in rows if row["iteration"] > 350 and "lm loss" in row]
    again = [{**row, "grad-norm": 1.0, "lm loss": row["lm loss"] + 0.1} for row in later]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows + again))
    (run,), _ = find_runs([str(folder)], 0.5)
    write_archive(archive, [run], print)
    (packed,), _ = find_runs([str(archive)], 0.5, scratch)
    assert run.curve is not None
    assert packed.curve is not None
    assert packed.curve.final_train == run.curve.final_train


def test_an_empty_file_of_rows_is_told_as_that_of_a_folder(tmp_path: Path, scratch: Path) -> None:
    folder, archive = write_run(tmp_path / "run"), tmp_path / "a.safetensors.xz"
    (folder / "metrics.jsonl").write_text("")
    (run,), _ = find_runs([str(folder)], 0.5)
    write_archive(archive, [run], print)
    (packed,), _ = find_runs([str(archive)], 0.5, scratch)
    assert run.why == f"{folder}/metrics.jsonl holds no loss yet; train for an iteration at least"
    assert packed.why == run.why.replace(str(folder.parent), str(archive))


def test_an_archive_is_reproducible_and_has_what_reports_need(sweep: Path, tmp_path: Path, capsys: Capture) -> None:
    archives = [tmp_path / f"{name}.safetensors.xz" for name in ("a", "b", "c")]
    reported(capsys, sweep, "--out", tmp_path / "out", "--archive", archives[0])
    (sweep / "mxfp4-s1/metrics.jsonl").touch()
    reported(capsys, sweep, "--out", tmp_path / "out", "--archive", archives[1])
    reported(capsys, archives[0], "--out", tmp_path / "out", "--archive", archives[2])
    assert len({archive.read_bytes() for archive in archives}) == 1
    content = read(archives[0])
    assert content.folders == {f"sweep/{job}" for job in JOBS}
    assert [name.removeprefix("sweep/mxfp4-s1/") for name in content.texts if "sweep/mxfp4-s1/" in name] == [
        *("cell.json", "config.yaml", "run.json")
    ]
    assert "sweep/sweep.json" in content.texts


def test_rows_keep_every_bit_of_the_columns_that_reports_read(sweep: Path, tmp_path: Path, scratch: Path) -> None:
    run, archive = sweep / "mxfp4-s1", tmp_path / "runs.safetensors.xz"
    rows: list[dict[str, Any]] = [
        {"iteration": 1, "lm loss": 10.904366493225098, "grad-norm": 0.1, "learning-rate": 1e-3, "iteration-time": 9.0},
        {"iteration": 2, "lm loss": math.nan, "grad-norm": 5e-324, "lm loss hex": "0x1p+3", "iteration-time": 0.25},
        {"iteration": 3, "lm loss": 4, "grad-norm": math.inf, "skipped iterations": 2**40, "iteration-time": 0.125},
        {"iteration": 3, "consumed samples": 96, "lm loss validation": 4.225693442604759},
        {"iteration": 4, "lm loss": -0.0, "throughput": 1.0},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    snapshots = [operand_row(2, "layer.0", 20.0, amax=None), operand_row(4, "layer.1", 1 / 3, recipe="bf16")]
    write_snapshots(run, snapshots)
    write_archive(archive, find_runs([str(sweep)], 0.5)[0], print)
    unpack(archive, scratch)

    def stored(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (scratch / "sweep/mxfp4-s1" / name).read_text().splitlines()]

    dropped = ("learning-rate", "lm loss hex", "throughput", "iteration-time")
    kept = [{key: value for key, value in row.items() if key not in dropped} for row in rows]
    kept.append({"iteration": 3, "iteration-time": 0.1875})  # the median of the second half

    def in_order(rows: list[dict[str, Any]]) -> list[str]:
        return sorted(json.dumps(row, sort_keys=True) for row in rows)

    assert in_order(stored("metrics.jsonl")) == in_order(kept)
    assert in_order(stored("quantization.jsonl")) == in_order(
        [{key: value for key, value in row.items() if key != "entries"} for row in snapshots]
    )


def test_nothing_of_the_machine_is_in_an_archive(sweep: Path, tmp_path: Path, capsys: Capture) -> None:
    archive = tmp_path / "runs.safetensors.xz"
    reported(capsys, sweep, "--out", tmp_path / "out", "--archive", archive)
    texts = read(archive).texts
    for name, text in texts.items():
        for secret in (tmp_path, Path.home() / "bin", SHIPPED.parent, "/opt/share"):
            assert str(secret) not in text, name
    command = ["HOME/bin/python", "RUNS/sweep/mxfp4-s1"]
    assert json.loads(texts["sweep/mxfp4-s1/cell.json"]) == {"exit_code": 0, "command": command}
    assert "- FOLDER1/wiki" in texts["sweep/mxfp4-s1/config.yaml"]


def test_what_cannot_be_archived_is_one_line(sweep: Path, tmp_path: Path, capsys: Capture) -> None:
    same = write_run(tmp_path / "more" / "sweep")
    outside = write_run(tmp_path / "runs/outside")
    for runs, archive, words in (
        ([sweep], "runs.zip", "the name must end in .safetensors.xz"),
        ([sweep, same], "runs.safetensors.xz", "would both be sweep; rename one of the folders"),
        ([sweep], "file/runs.safetensors.xz", "cannot be written"),
        ([tmp_path / "strange"], "runs.safetensors.xz", "but not in its folder; move it there"),
    ):
        (tmp_path / "file").write_text("")
        (tmp_path / "strange").mkdir(exist_ok=True)
        (tmp_path / "strange/sweep.json").unlink(missing_ok=True)
        add_cells(tmp_path / "strange", "strange", [cell("bf16", 1, run=str(outside))])
        arguments = [*map(str, runs), "--out", str(tmp_path / "out"), "--archive", str(tmp_path / archive)]
        assert report.main(arguments) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
