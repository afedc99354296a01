"""The ladder figure: which lines it has, at which points, and what is said where one is missing."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib.figure import Figure

from megatron_lowprec.commands import report_page as report
from megatron_lowprec.report.groups import Group, group_runs, non_embedding_parameters
from megatron_lowprec.report.ladder.gap_plot import gap_by_tokens
from megatron_lowprec.report.ladder.gap_points import (
    Line,
    Point,
    best_measured,
    comparable_roundings,
    measured_lines,
    published_lines,
)
from megatron_lowprec.report.plot_style import DARK, LIGHT, gap_axis, styles
from megatron_lowprec.report.published.ladder import read_ladder
from megatron_lowprec.report.runs import find_runs
from megatron_lowprec.report.statistics import Fit
from megatron_lowprec.shipped import SHIPPED
from tests.report.synthetic import OPTIONS, write_run, write_sweep

LADDER = SHIPPED / "data/quartet2-runs.csv"
SIZE = 8 * (12 * 512**2 + 13 * 512) + 2 * 512  # of the synthetic GPT with biases: weights, biases and norms
MXFP8 = "{format: e4m3, granularity: 1x32, scale_format: e8m0, scale_rule: floor}"
GRAY_NOTE = "gap_by_tokens.png has no published runs"


def groups_of(*folders: Path, reference: str = "bf16") -> list[Group]:
    return group_runs(find_runs([str(folder) for folder in folders], 0.5)[0], reference)[0]


def lines_of(groups: list[Group]) -> tuple[list[Line], list[str]]:
    return measured_lines(groups, {group.name: Fit(group.final_losses(), 0.95) for group in groups})


def sweep(folder: Path, gap: float, recipe: str = "mxfp4_rht", **options: Any) -> Path:
    finals = {"bf16": [3.70, 3.72, 3.71], recipe: [3.70 + gap, 3.73 + gap, 3.71 + gap]}
    return write_sweep(folder, finals, options=options)


def test_budgets_of_one_size_are_points_of_one_line(tmp_path: Path) -> None:
    long, short = sweep(tmp_path / "long", 0.08, train_iters=800), sweep(tmp_path / "short", 0.05)
    wide = sweep(tmp_path / "wide", 0.03, hidden_size=1024)
    lines, unsized = lines_of(groups_of(long, short, wide))
    assert unsized == []
    small, large = lines
    assert (small.label, small.model, small.parameters) == ("mxfp4_rht", "25.2M", SIZE)
    tokens = 400 * 64 * 1024
    assert [point.tokens_per_parameter for point in small.points] == [tokens / SIZE, 2 * tokens / SIZE]
    assert [point.gap for point in small.points] == pytest.approx([0.05 + 0.01 / 3, 0.08 + 0.01 / 3])
    # sd .01 and .01528 over 3 seeds, pooled .01291; t(4) = 2.7764; half width t * sd * sqrt(2/3)
    assert small.points[0].half_width == pytest.approx(2.7764 * 0.01291 * math.sqrt(2 / 3), rel=1e-3)
    assert large.model == "101M"
    assert large.points[0].tokens_per_parameter == tokens / large.parameters


def test_the_figure_has_the_best_measured_recipes() -> None:
    def line(label: str, budgets: int, seeds: int) -> Line:
        return Line(label, "8M", 8e6, tuple(Point(1.0 + at, 0.1, seeds=seeds) for at in range(budgets)))

    ladder, six = line("ladder", 2, 2), [line(f"six{at}", 1, 6) for at in range(6)]
    two = [line(f"two{at}", 1, 2) for at in range(2)]
    assert best_measured([two[0], ladder, *six]) == ([two[0], ladder, *six], [])  # eight fit
    assert best_measured([*two, ladder, *six]) == ([two[0], ladder, *six], ["two1"])  # of equal ones the first
    many = [line(f"two{at}", 1, 2) for at in range(9)]
    rungs = [line("ladder", 1, 2), line("ladder", 1, 2)]  # of two models
    assert best_measured([*many, *rungs]) == ([*many[:7], *rungs], ["two7", "two8"])


def test_seeds_of_a_point_are_those_of_its_gap(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "sweep", 0.05)
    shutil.rmtree(folder / "mxfp4_rht-s2")
    write_run(folder / "mxfp4_rht-s2", "mxfp4_rht", 2, ends_at=200)
    (line,), _ = lines_of(groups_of(folder))
    assert line.points[0].seeds == 2


def test_the_report_names_the_recipes_that_the_figure_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipes = [f"mxfp4+dgrad.weight.headroom=0.{digit}" for digit in range(1, 9)]
    folder = write_sweep(tmp_path / "sweep", dict.fromkeys(["bf16", *recipes, "mxfp8", "mxfp4"], 3.7), seeds=2)
    assert report.main([str(folder), "--out", str(tmp_path / "out")]) == 0
    assert "the figures of gaps of single groups have the others: mxfp8, mxfp4." in capsys.readouterr().out
    assert "bands" not in (tmp_path / "out/report.html").read_text()


def test_groups_of_one_size_and_budget_are_not_joined(tmp_path: Path) -> None:
    other = sweep(tmp_path / "other", 0.08, lr=3e-4)
    longer = sweep(tmp_path / "longer", 0.08, train_iters=800)
    groups = groups_of(sweep(tmp_path / "one", 0.05), other, longer)
    lines, _ = lines_of(groups)
    assert [line.model for line in lines] == [group.name for group in groups]
    assert [len(line.points) for line in lines] == [1, 1, 1]


def test_one_seed_has_no_interval_and_no_reference_no_line(tmp_path: Path) -> None:
    single = write_sweep(tmp_path / "single", {"bf16": [3.7], "mxfp8": [3.8]})
    ((line,), _) = lines_of(groups_of(single))
    assert math.isnan(line.points[0].half_width)
    assert lines_of(groups_of(single, reference="mxfp4")) == ([], [])
    assert gap_by_tokens([], [], "bf16", {}, LIGHT) is None


@pytest.mark.parametrize("options", [{}, {"unheard_of": 1}, {"num_attention_heads": None}, {"hidden_size": "wide"}])
def test_parameters_are_nan_if_options_cannot_be_read(options: dict[str, Any]) -> None:
    assert non_embedding_parameters(OPTIONS) == SIZE
    assert math.isnan(non_embedding_parameters({**OPTIONS, **options} if options else {}))


def test_a_group_of_unknown_size_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(tmp_path / "sweep", 0.05, unheard_of=1)
    assert report.main([str(folder), "--out", str(tmp_path / "out")]) == 0
    assert "gpt_25m is not in gap_by_tokens.png" in capsys.readouterr().out
    assert not (tmp_path / "out/gap_by_tokens.png").exists()


@pytest.mark.parametrize(
    ("recipes", "roundings"),
    [
        (["mxfp4_rht"], {False}),
        (["mxfp4_rht_sr"], {True}),
        (["mxfp4_rht_sr+dgrad.hadamard.block=32", "mxfp4_rht"], {False, True}),
        (["mxfp4", "mxfp4_sr", "mxfp8", "fp8_delayed"], set()),
        (["mxfp4_rht+dgrad.weight.rounding=stochastic", "mxfp4_rht+wgrad.hadamard=null"], set()),
        (["+".join(["mxfp4_rht", *(f"fprop.{name}={MXFP8}" for name in ("input", "weight"))])], set()),
    ],
)
def test_only_mxfp4_with_a_transform_resembles_the_published_runs(
    tmp_path: Path, recipes: list[str], roundings: set[bool]
) -> None:
    folder = write_sweep(tmp_path / "sweep", dict.fromkeys(["bf16", *recipes], 3.7), seeds=1)
    groups = groups_of(folder)
    assert comparable_roundings(groups, groups[0].labels) == roundings
    assert comparable_roundings(groups, ["bf16"]) == set()  # of the recipes in the figure


def test_published_gaps_are_to_bf16(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", {"mxfp8": 3.7, "mxfp4_rht": 3.7}, seeds=1)
    groups = groups_of(folder, reference="mxfp8")
    assert comparable_roundings(groups, groups[0].labels) == set()


@pytest.mark.parametrize("label", ["bf16", "mxfp4_rht"])
def test_a_run_without_a_recorded_recipe_is_not_comparable(tmp_path: Path, label: str) -> None:
    folder = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp4_rht": 3.7}, seeds=1)
    (folder / f"{label}-s1/config.yaml").write_text(yaml.safe_dump({"options": {**OPTIONS, "seed": 1}}))
    groups = groups_of(folder)
    assert comparable_roundings(groups, groups[0].labels) == set()
    assert [line.label for line in lines_of(groups)[0]] == ["mxfp4_rht"]


def test_published_lines_have_one_rounding_each() -> None:
    runs = read_ladder(LADDER)
    lines = published_lines(runs, {False, True})
    assert [(line.label, line.model) for line in lines] == [
        ("Quartet II fixed_albert_tseng, nearest", "30.5M"),
        ("Quartet II fixed_albert_tseng, SR", "30.5M"),
        ("Quartet II orig_albert_tseng, nearest", "30.5M"),
        ("Quartet II orig_albert_tseng, SR", "30.5M"),
        ("Quartet II orig_albert_tseng, nearest", "49.6M"),
        ("Quartet II orig_albert_tseng, SR", "49.6M"),
    ]
    assert {len(line.points) for line in lines} == {6}
    first = lines[1].points[0]  # 3.43758773803711 at 749,993,984 tokens, bf16 3.422644853591919
    assert (first.tokens_per_parameter, first.gap) == pytest.approx((749_993_984 / 30_482_560, 0.014942884))
    assert published_lines(runs, {True}) == lines[1::2]
    assert published_lines(runs, set()) == []


@pytest.mark.parametrize(("gap", "scale"), [(0.04, "linear"), (0.041, "symlog"), (-0.3, "symlog")])
def test_one_large_gap_does_not_squeeze_the_others(gap: float, scale: str) -> None:
    axes = Figure().subplots()
    words = gap_axis(axes, [0.0, 0.01, gap])
    assert axes.get_yscale() == scale
    assert ("log beyond 0.02" in words) == (scale == "symlog")
    low, high = axes.get_ylim()
    assert low < min(gap, 0.0)
    assert high > max(gap, 0.01)
    places = axes.transData.transform([(0, low), (0, 0.0), (0, 0.01), (0, high)])[:, 1]
    assert (places[2] - places[1]) / (places[3] - places[0]) > 0.05


@pytest.mark.usefixtures("rendered")
def test_both_themes_are_drawn(tmp_path: Path) -> None:
    lines, _ = lines_of(groups_of(sweep(tmp_path / "sweep", 0.05), sweep(tmp_path / "more", 0.05, train_iters=800)))
    found = styles(["bf16", "mxfp4_rht"], "bf16")
    published = published_lines(read_ladder(LADDER), {False})
    pictures = {
        gap_by_tokens(lines, shown, "bf16", found, theme) for theme in (LIGHT, DARK) for shown in ((), published)
    }
    assert len(pictures) == 4
    assert all(picture is not None and picture.startswith(b"\x89PNG") for picture in pictures)


def test_without_the_published_file_the_report_has_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(sweep(tmp_path / "sweep", 0.05))
    page = tmp_path / "out/report.html"
    arguments = [folder, "--out", str(tmp_path / "out")]
    assert report.main(arguments) == 0
    assert GRAY_NOTE not in capsys.readouterr().out
    assert "arXiv 2601.22813" in page.read_text(encoding="utf-8").partition("<h2>What papers claim")[0]
    with monkeypatch.context() as patch:
        patch.setattr(report, "PUBLISHED", tmp_path / "none.csv")
        assert report.main(arguments) == 0
        assert GRAY_NOTE in capsys.readouterr().out
        assert "arXiv 2601.22813" not in page.read_text(encoding="utf-8").partition("<h2>What papers claim")[0]
        assert (tmp_path / "out/gap_by_tokens.png").exists()
        fp8 = sweep(tmp_path / "fp8", 0.05, recipe="fp8_delayed")
        assert report.main([str(fp8), "--out", str(tmp_path / "fp8_out")]) == 0
        assert GRAY_NOTE not in capsys.readouterr().out
    assert report.main([*arguments, "--published", str(tmp_path / "none.csv")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_diverged_recipe_has_no_point(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "sweep", 0.05)
    run = write_run(tmp_path / "diverged", "mxfp8", 1, nan_from=200)
    lines, _ = lines_of(groups_of(folder, run))
    assert [line.label for line in lines] == ["mxfp4_rht"]
