"""An archive of runs gives the report of their folders, in equal bytes each time, and shows nothing of the machine."""

import tarfile
from pathlib import Path

import pytest

from megatron_lowprec.commands import report_page as report
from megatron_lowprec.shipped import SHIPPED
from tests.report.synthetic import add_cells, cell, operand_row, write_run, write_snapshots, write_sweep

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
    command = f"{Path.home()}/bin/python {SHIPPED.parent}/pretrain_gpt.py --save {run}"
    (run / "log.txt").write_bytes(
        f"# {command}\nread \udcff from {tmp_path}/corpora/wiki\n".encode(errors="surrogateescape")
    )
    (run / "cell.json").write_text(f'{{"exit_code": 0, "command": ["{run}"]}}')
    (run / "tensorboard").mkdir()
    (run / "tensorboard/events").write_text("x")
    (run / "iter_0000400").mkdir()
    return folder


def test_the_report_on_an_archive_is_the_one_on_its_folders(sweep: Path, tmp_path: Path, capsys: Capture) -> None:
    out, archive = tmp_path / "out", tmp_path / "new" / "runs.tar.xz"
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


def test_an_archive_is_reproducible_and_has_what_reports_need(sweep: Path, tmp_path: Path, capsys: Capture) -> None:
    archives = [tmp_path / f"{name}.tar.xz" for name in ("a", "b", "c")]
    reported(capsys, sweep, "--out", tmp_path / "out", "--archive", archives[0])
    (sweep / "mxfp4-s1/metrics.jsonl").touch()
    reported(capsys, sweep, "--out", tmp_path / "out", "--archive", archives[1])
    reported(capsys, archives[0], "--out", tmp_path / "out", "--archive", archives[2])
    assert len({archive.read_bytes() for archive in archives}) == 1
    with tarfile.open(archives[0]) as tar:
        members = tar.getmembers()
    names = [member.name for member in members]
    assert names == sorted(names)
    assert {(m.mtime, m.uid, m.gid, m.uname, m.mode & 0o777) for m in members} == {
        (0, 0, 0, "", 0o644),
        (0, 0, 0, "", 0o755),
    }
    assert [name.removeprefix("sweep/mxfp4-s1/") for name in names if "sweep/mxfp4-s1/" in name] == [
        *("cell.json", "config.yaml", "log.txt", "metrics.jsonl", "quantization.jsonl", "run.json")
    ]
    assert "sweep/sweep.json" in names


def test_nothing_of_the_machine_is_in_an_archive(sweep: Path, tmp_path: Path, capsys: Capture) -> None:
    archive = tmp_path / "runs.tar.xz"
    reported(capsys, sweep, "--out", tmp_path / "out", "--archive", archive)
    with tarfile.open(archive) as tar:
        files = {member.name: tar.extractfile(member) for member in tar if member.isreg()}
        texts = {name: file.read() for name, file in files.items() if file is not None}
    for name, text in texts.items():
        for secret in (tmp_path, Path.home() / "bin", SHIPPED.parent, "/opt/share"):
            assert str(secret).encode() not in text, name
    assert texts["sweep/mxfp4-s1/log.txt"] == (
        b"# HOME/bin/python REPOSITORY/pretrain_gpt.py --save RUNS/sweep/mxfp4-s1\nread \xff from FOLDER1/wiki\n"
    )
    assert b"- FOLDER1/wiki" in texts["sweep/mxfp4-s1/config.yaml"]
    original = (sweep / "mxfp4-s1/metrics.jsonl").read_bytes()
    assert texts["sweep/mxfp4-s1/metrics.jsonl"] == original


def test_what_cannot_be_archived_is_one_line(sweep: Path, tmp_path: Path, capsys: Capture) -> None:
    same = write_run(tmp_path / "more" / "sweep")
    outside = write_run(tmp_path / "runs/outside")
    for runs, archive, words in (
        ([sweep], "runs.zip", "the name must end in .tar.xz"),
        ([sweep, same], "runs.tar.xz", "would both be sweep; rename one of the folders"),
        ([sweep], "file/runs.tar.xz", "cannot be written"),
        ([tmp_path / "strange"], "runs.tar.xz", "but not in its folder; move it there"),
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
