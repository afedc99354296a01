"""Figures of losses draw what the tables count."""

from pathlib import Path

import pytest

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
