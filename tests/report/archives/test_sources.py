"""Archives are read safely, beside folders; the shipped one gives the table of its page."""

import io
import lzma
import re
import tarfile
from pathlib import Path

import pytest

from megatron_lowprec.commands import report_page as report
from megatron_lowprec.errors import UserError
from megatron_lowprec.report.amounts import number, percent, signed
from megatron_lowprec.report.archives import sources
from megatron_lowprec.report.groups import group_runs
from megatron_lowprec.report.runs import Run, Status, find_runs
from megatron_lowprec.report.statistics import Fit
from tests.environment import ROOT
from tests.report.synthetic import add_cells, cell, operand_row, write_run, write_snapshots, write_sweep

RESULTS = ROOT / "docs/results"


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def packed(archive: Path, *folders: Path) -> Path:
    """An archive made by hand: members in any order, with times and owners."""
    with tarfile.open(archive, "w:xz") as tar:
        for folder in folders:
            tar.add(folder, folder.name)
    return archive


def found(scratch: Path, *paths: Path | str) -> list[Run]:
    return find_runs([str(path) for path in paths], 0.5, scratch)[0]


def test_archives_folders_and_patterns_mix(tmp_path: Path, scratch: Path) -> None:
    sweep, single = write_sweep(tmp_path / "a", {"bf16": 3.7}, seeds=2), write_run(tmp_path / "single", seed=8)
    (tmp_path / "empty").mkdir()
    archive = packed(tmp_path / "one.tar.xz", sweep, single, tmp_path / "empty")
    packed(tmp_path / "two.tar.xz", write_run(tmp_path / "b", "mxfp4"))
    runs, notes = find_runs([str(tmp_path / "*.tar.xz"), str(single), str(archive)], 0.5, scratch)
    assert notes == []
    places = ["one.tar.xz/a/bf16-s1", "one.tar.xz/a/bf16-s2", "one.tar.xz/empty", "one.tar.xz/single"]
    assert [run.place for run in runs] == [str(tmp_path / name) for name in (*places, "two.tar.xz/b", "single")]
    assert [run.status for run in runs].count(Status.FAILED) == 1
    assert [run.sweep for run in runs][:2] == ["synthetic"] * 2


def test_texts_name_the_archive_and_not_the_temporary_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_snapshots(write_run(tmp_path / "run"), [operand_row(1, "layer.0", 20.0)] * 2)
    text = (run / "quantization.jsonl").read_text()
    (run / "quantization.jsonl").write_text("nonsense\n" + text)
    other = write_run(tmp_path / "other")
    (other / "metrics.jsonl").write_text("nonsense\n{}\n")
    archive = packed(tmp_path / "runs.tar.xz", run, other)
    assert report.main([str(archive), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"{archive}/run/quantization.jsonl" in said
    assert f"{archive}/other/metrics.jsonl: dropped, as no row of such a file: line 1" in said
    assert "/report-" not in said


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (member("../evil/metrics.jsonl"), "unsafe"),
        (member("run/../../evil"), "unsafe"),
        (member("run/link", tarfile.SYMTYPE, "/etc/passwd"), "unsafe"),
        (member("run/link", tarfile.SYMTYPE, "metrics.jsonl"), "unsafe"),
        (member("run/pipe", tarfile.FIFOTYPE), "unsafe"),
        (member("notes.txt"), "holds no runs"),
    ],
    ids=["above", "up and out", "link out", "link", "pipe", "no run"],
)
def test_members_outside_and_links_are_refused(tmp_path: Path, scratch: Path, bad: tarfile.TarInfo, words: str) -> None:
    archive = tmp_path / "bad.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        tar.addfile(bad, io.BytesIO())
    with pytest.raises(UserError, match=f"^{re.escape(str(archive))}: .*{words}"):
        found(scratch, archive)
    assert not list(tmp_path.rglob("evil"))


def test_names_that_steer_a_terminal_and_files_with_holes_are_refused(tmp_path: Path, scratch: Path) -> None:
    sparse = member("run/metrics.jsonl")
    sparse.type = tarfile.GNUTYPE_SPARSE
    for bad in (member("run/\x1b[2J"), sparse):
        archive = tmp_path / "bad.tar.xz"
        with tarfile.open(archive, "w:xz") as tar:
            tar.addfile(bad, io.BytesIO())
        with pytest.raises(UserError, match=r"unsafe|damaged") as error:
            found(scratch, archive)
        assert str(error.value).isprintable()


@pytest.mark.parametrize("where", ["in a member", "behind the end", "members"])
def test_an_archive_has_a_size_limit(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A few kilobytes can hold more than any disk."""
    monkeypatch.setattr(sources, "LARGEST", 2 * 10**6)
    monkeypatch.setattr(sources, "MOST_MEMBERS", 20)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        large = member("run/metrics.jsonl")
        large.size = 3 * 10**6 if where == "in a member" else 10
        tar.addfile(large, io.BytesIO(bytes(large.size)))
        for number in range(30 if where == "members" else 0):
            tar.addfile(member(f"run/{number}"), io.BytesIO())
    archive = tmp_path / "bomb.tar.xz"
    archive.write_bytes(lzma.compress(content.getvalue() + bytes(3 * 10**6 if where == "behind the end" else 0)))
    assert archive.stat().st_size < 10**4
    with pytest.raises(UserError, match=r"bomb\.tar\.xz: more than .*; unpack it, and name its folders"):
        found(scratch, archive)


def test_a_job_outside_of_its_archive_is_refused(tmp_path: Path, scratch: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7}, seeds=1)
    add_cells(sweep, "synthetic", [cell("mxfp4", 1, run=str(write_run(tmp_path / "mine")))])
    assert len(found(scratch, sweep)) == 2
    with pytest.raises(UserError, match=r"sweep.json names .*mine, outside of it"):
        found(scratch, packed(tmp_path / "runs.tar.xz", sweep))


def test_a_damaged_archive_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = packed(tmp_path / "whole.tar.xz", write_run(tmp_path / "run")).read_bytes()
    archive = tmp_path / "runs.tar.xz"
    twice = io.BytesIO()
    with tarfile.open(fileobj=twice, mode="w") as tar:
        for name in ("run", "run/log.txt"):
            tar.addfile(member(name), io.BytesIO())
    cut = (whole[:-40], whole[:2000], whole[:3000] + b"??" + whole[3002:])
    for damaged in (b"", b"no archive", *cut, lzma.compress(twice.getvalue()), lzma.compress(b"\xff" * 512)):
        archive.write_bytes(damaged)
        assert report.main([str(archive), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"report.py: error: {archive}: damaged, or no xz-compressed tar (")
        assert error.count("\n") == 1


def test_an_archive_is_refused_without_a_place_for_its_content(tmp_path: Path) -> None:
    archive = packed(tmp_path / "runs.tar.xz", write_run(tmp_path / "run"))
    with pytest.raises(UserError, match="archives are not read here"):
        find_runs([str(archive)], 0.5)


def test_the_shipped_archive_gives_the_table_of_its_page(scratch: Path) -> None:
    page = (RESULTS / "paper-table2.md").read_text(encoding="utf-8")
    block = page.partition("\n## Small")[2].partition("```text\n")[2].partition("```")[0]
    rows = [re.split(r"\s{2,}", line) for line in block.splitlines()]
    table = {cells[0]: set(cells[1:]) for cells in rows}
    (group,), _ = group_runs(found(scratch, RESULTS / "paper-table2/runs.tar.xz"), "bf16")
    fit = Fit(group.final_losses(), 0.95)
    assert group.labels == ("bf16", "mxfp4", "mxfp4_rht", "mxfp4_sr", "mxfp4_rht_sr")
    for label in group.labels:
        finished = len(group.of(label, Status.FINISHED))
        cells = {f"{finished} of {len(group.of(label))}", number(fit.mean(label), 4), number(fit.deviation(label), 4)}
        if label != "bf16":
            gap = fit.difference(label, "bf16").value
            cells |= {signed(gap, 4), signed(percent(gap), 2)}
        assert cells <= table[label]
    assert f"pooled over all recipes, is {fit.sigma:.4f} nats a token" in block
