"""Figures of losses draw what the tables count."""

import os
from pathlib import Path

import pytest
import yaml

from megatron_lowprec.commands import report_page as report
from megatron_lowprec.report import plot_style, plots
from megatron_lowprec.report.groups import group_runs
from megatron_lowprec.report.runs import find_runs
from tests.report.synthetic import write_run


def test_a_repeated_seed_is_drawn_as_the_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        write_run(tmp_path / "a", final=3.7),
        write_run(tmp_path / "b", final=3.8),
        write_run(tmp_path / "c", seed=2, final=3.6),
        write_run(tmp_path / "d", "mxfp8", final=3.9),
        write_run(tmp_path / "e", "mxfp8", seed=2, final=3.9),
    ]
    (group,), _ = group_runs(find_runs([str(run) for run in runs], 0.5)[0], "bf16")
    ends: list[float] = []
    monkeypatch.setattr(plots, "band", lambda axes, x, mean, *rest: ends.append(float(mean[-1])))
    plots.losses("validation loss", group, plot_style.styles(group.labels, "bf16"), plot_style.LIGHT)
    bf16 = (3.75 + 3.6) / 2
    assert ends == pytest.approx([bf16, 3.9, 3.9 - bf16])


@pytest.mark.usefixtures("rendered")
def test_labels_are_drawn_as_they_are(tmp_path: Path) -> None:
    """Dollar signs are no mathematics, and a folder's name need not be UTF-8."""
    runs = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", "mxfp8", final=3.9),
        tmp_path / os.fsdecode(b"\xff\x1b"),
    ]
    write_run(runs[2], "mxfp4", final=4.0)
    for run, label in zip(runs, (r"ref$\frac$", r"a$\nothing{$b", None), strict=True):
        content = yaml.safe_load((run / "config.yaml").read_text())
        content["recipe"]["name"], content["options"]["config"] = label, r"m$\x$.yaml"
        if label is None:
            del content["recipe"]
        (run / "config.yaml").write_text(yaml.safe_dump(content))
    out = tmp_path / "out"
    assert report.main([*map(str, runs), "--reference", r"ref$\frac$", "--out", str(out)]) == 0
    text = (out / "report.html").read_text(encoding="utf-8")
    assert r"a$\nothing{$b" in text
    assert r"\udcff\x1b" in text
    assert len(list(out.glob("*.png"))) > 2
