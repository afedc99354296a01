"""Archives are read safely, beside folders; the shipped one gives the table of its page."""

import json
import lzma
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import load, save

from megatron_lowprec.commands import report_page as report
from megatron_lowprec.errors import UserError
from megatron_lowprec.report.amounts import number, percent, signed
from megatron_lowprec.report.archives import columns, container, sources
from megatron_lowprec.report.archives.columns import Column, RowTable
from megatron_lowprec.report.archives.container import Content, write
from megatron_lowprec.report.archives.packing import write_archive
from megatron_lowprec.report.curve import Status
from megatron_lowprec.report.groups import group_runs
from megatron_lowprec.report.runs import Run, find_runs
from megatron_lowprec.report.statistics import Fit
from tests.environment import ROOT
from tests.report.synthetic import cell, write_run, write_sweep

RESULTS = ROOT / "docs/results"


def packed(archive: Path, *folders: Path) -> Path:
    write_archive(archive, find_runs([str(folder) for folder in folders], 0.5)[0], print)
    return archive


def hostile(archive: Path, content: Content | None = None, **arrays: Any) -> Path:
    """An archive of this content, with some arrays of its file replaced or added."""
    write(archive, content or Content({"run"}))
    if arrays:
        archive.write_bytes(lzma.compress(save(load(lzma.decompress(archive.read_bytes())) | arrays)))
    return archive


def table(name: str = "run", count: int = 2, columns: Mapping[str, Column] | None = None, **arrays: Any) -> Content:
    """An archive's content with one table of ``count`` rows."""
    kept = {"iteration": np.arange(2), **arrays}
    kinds: dict[str, Column] = {**dict.fromkeys(kept, "int"), **(columns or {})}
    return Content({"run"}, tables=[RowTable("metrics.jsonl", kinds, {name: count}, kept)])


# Its first column alone would fill the memory.
ONLY_NULL_FITS = Content(
    {"run"},
    tables=[
        RowTable("metrics.jsonl", {"loss": "null", "iteration": "int"}, {"run": 10**15}, {"iteration": np.arange(2)})
    ],
)


def found(scratch: Path, *paths: Path | str) -> list[Run]:
    return find_runs([str(path) for path in paths], 0.5, scratch)[0]


def test_archives_folders_and_patterns_mix(tmp_path: Path, scratch: Path) -> None:
    sweep, single = write_sweep(tmp_path / "a", {"bf16": 3.7}, seeds=2), write_run(tmp_path / "single", seed=8)
    (tmp_path / "empty").mkdir()
    archive = packed(tmp_path / "one.safetensors.xz", sweep, single, tmp_path / "empty")
    packed(tmp_path / "two.safetensors.xz", write_run(tmp_path / "b", "mxfp4"))
    runs, notes = find_runs([str(tmp_path / "*.safetensors.xz"), str(single), str(archive)], 0.5, scratch)
    assert notes == []
    members = [f"one.safetensors.xz/{name}" for name in ("a/bf16-s1", "a/bf16-s2", "empty", "single")]
    places = [*members, "two.safetensors.xz/b", "single"]
    assert [run.place for run in runs] == [str(tmp_path / name) for name in places]
    assert [run.status for run in runs].count(Status.FAILED) == 1
    assert [run.sweep for run in runs][:2] == ["synthetic"] * 2


def test_texts_name_the_archive_and_not_the_temporary_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = write_run(tmp_path / "run"), write_run(tmp_path / "other")
    (other / "config.yaml").write_text("[nonsense")
    archive = packed(tmp_path / "runs.safetensors.xz", run, other)
    assert report.main([str(archive), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"dropped: {archive}/other/config.yaml" in said
    assert "/report-" not in said


@pytest.mark.parametrize(
    "content",
    [
        Content(texts={"../evil/run.json": "{}"}),
        Content(texts={"run/../../evil": "{}"}),
        Content(texts={"/tmp/evil": "{}"}),
        Content(texts={"run/\x1b[2J": "{}"}),
        Content(folders={"../evil"}),
        table("../evil"),
    ],
    ids=["above", "up and out", "absolute", "steers a terminal", "folder", "table"],
)
def test_names_outside_are_refused(tmp_path: Path, scratch: Path, content: Content) -> None:
    archive = hostile(tmp_path / "bad.safetensors.xz", content)
    with pytest.raises(UserError, match=f"^{re.escape(str(archive))}: damaged.*") as error:
        found(scratch, archive)
    assert str(error.value).isprintable()
    assert not list(tmp_path.rglob("evil"))
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (table(count=3), "a column has not 3 values"),
        (table(count=-2), "-2 rows"),
        (table(columns={"lm loss": "int"}), r"no '0/lm loss'"),
        (table(columns={"iteration": "float"}), "floats are not 4 or 8 rows of bytes"),
        (table(loss=np.zeros(2)), "whole numbers are no row of int64"),
        (table(columns={"iteration": ["bf16"]}), "text is no index into a list"),
        (ONLY_NULL_FITS, "a column has not 1000000000000000 values"),
        (table(count=10**9, columns={"iteration": "null"}), "no column of metrics.jsonl has values"),
        (table(loss=np.array(2)), "a column has not 2 values"),
        (Content(texts={"a/run.json": cast(str, 1)}), "damaged"),
        (Content(texts={"a": "", "a/run.json": ""}), "damaged"),
        (Content(texts={"a/notes.txt": ""}), "holds no runs"),
    ],
)
def test_columns_that_do_not_fit_are_refused(tmp_path: Path, scratch: Path, content: Content, words: str) -> None:
    with pytest.raises(UserError, match=words):
        found(scratch, hostile(tmp_path / "bad.safetensors.xz", content))


@pytest.mark.parametrize("where", ["array", "text of rows", "null columns", "members"])
def test_an_archive_has_a_size_limit(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A few kilobytes can hold more than any disk."""
    for module in (container, sources):
        monkeypatch.setattr(module, "LARGEST", 10**6)
    monkeypatch.setattr(container, "MOST_MEMBERS", 20)
    monkeypatch.setattr(columns, "MOST_VALUES", 10**4)
    archive = tmp_path / "bomb.safetensors.xz"
    if where == "array":
        hostile(archive, zeros=np.zeros(10**6, np.uint8))
    elif where == "members":
        hostile(archive, Content({f"run/{number}" for number in range(30)}))
    elif where == "null columns":
        hostile(
            archive, table(count=1000, columns=dict.fromkeys(map(str, range(20)), "null"), iteration=np.arange(1000))
        )
    else:
        hostile(archive, table(count=1000, columns={"iteration": ["x" * 10**4]}, iteration=np.zeros(1000, np.int64)))
    assert archive.stat().st_size < 10**4
    with pytest.raises(UserError, match=r"bomb\.safetensors\.xz: .*more than [\d,]+ "):
        found(scratch, archive)


def test_a_job_outside_of_its_archive_is_refused(tmp_path: Path, scratch: Path) -> None:
    sweep = json.dumps({"name": "synthetic", "cells": [cell("mxfp4", 1, run=str(write_run(tmp_path / "mine")))]})
    archive = hostile(tmp_path / "runs.safetensors.xz", Content(texts={"sweep/sweep.json": sweep}))
    with pytest.raises(UserError, match=r"sweep.json names .*mine, outside of it"):
        found(scratch, archive)


def test_a_damaged_archive_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = packed(tmp_path / "whole.safetensors.xz", write_run(tmp_path / "run")).read_bytes()
    archive = tmp_path / "runs.safetensors.xz"
    no_header = save({"header": np.frombuffer(b"[]", np.uint8)})
    cut = (whole[:-40], whole[:2000], whole[:3000] + b"??" + whole[3002:])
    for damaged in (b"", b"no archive", *cut, lzma.compress(no_header), lzma.compress(b"\xff" * 512)):
        archive.write_bytes(damaged)
        assert report.main([str(archive), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"report.py: error: {archive}: damaged, or no archive of this version (")
        assert error.count("\n") == 1


def test_an_archive_of_the_former_kind_is_to_be_unpacked(tmp_path: Path, scratch: Path) -> None:
    (tmp_path / "runs.tar.xz").write_bytes(b"")
    with pytest.raises(UserError, match=r"runs\.tar\.xz: .*; unpack it by tar, and name its folders"):
        found(scratch, tmp_path / "runs.tar.xz")


def test_an_archive_is_refused_without_a_place_for_its_content(tmp_path: Path) -> None:
    archive = packed(tmp_path / "runs.safetensors.xz", write_run(tmp_path / "run"))
    with pytest.raises(UserError, match="archives are not read here"):
        find_runs([str(archive)], 0.5)


def test_the_shipped_archive_gives_the_table_of_its_page(scratch: Path) -> None:
    page = (RESULTS / "paper-table2.md").read_text(encoding="utf-8")
    block = page.partition("\n## Small")[2].partition("```text\n")[2].partition("```")[0]
    rows = [re.split(r"\s{2,}", line) for line in block.splitlines()]
    table = {cells[0]: set(cells[1:]) for cells in rows}
    (group,), _ = group_runs(found(scratch, RESULTS / "paper-table2/runs.safetensors.xz"), "bf16")
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
