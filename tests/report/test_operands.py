"""What quantization did to operands: rows are read once each, and the report has their medians, worst and curves."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.figure import Figure

from megatron_lowprec.commands import report_page as report
from megatron_lowprec.linear.linear_id import DIMS
from megatron_lowprec.report import operand_plots, operand_tables, plot_style
from megatron_lowprec.report.groups import Group, group_runs
from megatron_lowprec.report.operands import KINDS, Snapshots, find_snapshots, read_rows
from megatron_lowprec.report.runs import find_runs
from tests.report.synthetic import operand_row, write_run, write_snapshots

Rows = list[dict[str, Any]]
HEADING = "What quantization did to operands"


def group_of(*folders: Path) -> Group:
    (group,), _ = group_runs(find_runs([str(folder) for folder in folders], 0.5)[0], "bf16")
    return group


def snapshots(*folders: Path) -> list[Snapshots]:
    found, notes = find_snapshots(group_of(*folders))
    assert notes == []
    return found


def observed(tmp_path: Path) -> tuple[Path, ...]:
    """Two seeds of mxfp4, three layers each, and a bf16 run without snapshots."""
    values = {
        # layer's SNR, bias, underflow, saturation at the last snapshot of either seed
        1: [(10.0, -0.04, 0.10, 0.0), (12.0, -0.02, 0.12, 0.01), (20.0, 0.01, 0.40, 0.02)],
        2: [(14.0, -0.03, 0.20, 0.0), (16.0, -0.01, 0.30, 0.03), (11.0, -0.05, 0.22, 0.04)],
    }
    folders = [write_run(tmp_path / "bf16", "bf16", 1)]
    for seed, layers in values.items():
        rows = []
        for number, (snr, bias, underflow, saturation) in enumerate(layers, 1):
            numbers = {"bias": bias, "underflow": underflow, "saturation": saturation}
            linear = f"layers.{number}.mlp.linear_fc1"
            rows += [operand_row(100, linear, 1.0), operand_row(200, linear, snr, **numbers)]
            rows.append(operand_row(200, linear, 30.0 + number, "wgrad", "input", bias=2e-3, format="e4m3"))
        rows.sort(key=lambda row: int(row["iteration"]))
        folders.append(write_snapshots(write_run(tmp_path / f"mxfp4-{seed}", "mxfp4", seed), rows))
    return tuple(folders)


def said(message: str) -> None:
    raise AssertionError(message)


def test_kinds_are_those_of_the_layers() -> None:
    assert list(DIMS) == list(KINDS)


def test_of_rows_that_repeat_an_operand_the_later_counts(tmp_path: Path) -> None:
    first = [operand_row(at, name, 9.0) for at in (10, 20) for name in ("layers.1.a", "layers.2.a")]
    again = [operand_row(20, "layers.1.a", 7.0), operand_row(20, "layers.1.a", 8.0, "wgrad")]
    path = write_snapshots(tmp_path / "run", [*first, *again]) / "quantization.jsonl"
    assert [(row["iteration"], row["linear"], row["gemm"], row["snr"]) for row in read_rows(path, said)] == [
        (10, "layers.1.a", "dgrad", 9.0),
        (10, "layers.2.a", "dgrad", 9.0),
        (20, "layers.1.a", "dgrad", 7.0),
        (20, "layers.2.a", "dgrad", 9.0),
        (20, "layers.1.a", "wgrad", 8.0),
    ]


def test_a_line_in_the_making_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "quantization.jsonl"
    path.write_text(json.dumps(operand_row(1, "layers.1.a", 9.0)) + "\n" + '{"iteration": 2, "li')
    assert len(read_rows(path, said)) == 1


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "quantization.jsonl", said) == []


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[1]",
        b'{"iteration": 1}',
        b"\xff\xfe",
        b"[" * 100_000,
        *(
            json.dumps(row).encode()
            for row in (
                operand_row(1, "layers.1.a", 9.0, "fprop", "grad_output"),
                operand_row(1, "layers.1.a", 9.0) | {"iteration": "2"},
                operand_row(1, "layers.1.a", 9.0) | {"iteration": float("inf")},
            )
        ),
    ],
)
def test_a_damaged_line_is_dropped_with_a_note(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "quantization.jsonl"
    path.write_bytes(json.dumps(operand_row(1, "layers.1.a", 9.0)).encode() + b"\n" + line + b"\n")
    told: list[str] = []
    assert len(read_rows(path, told.append)) == 1
    assert len(told) == 1
    assert "dropped, as no row of such a file: line 2 (" in told[0]


def test_outputs_and_other_recipes_are_no_operands_of_the_run(tmp_path: Path) -> None:
    own = operand_row(1, "layers.1.a", 9.0)
    others = [own | {"snr": 1.0, "recipe": "mxfp8"}, own | {"operand": "output", "format": ""}]
    path = tmp_path / "quantization.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (own, *others)))
    assert read_rows(path, said) == [own]


def test_the_table_has_medians_of_the_last_snapshot_and_the_worst_layer(tmp_path: Path) -> None:
    gradients, inputs = operand_tables.of_every_operand(snapshots(*observed(tmp_path))).rows
    # SNR of 10 11 12 14 16 20, bias of -5 -4 -3 -2 -1 1, underflow of 10 12 20 22 30 40, saturation of 0 0 1 2 3 4
    assert gradients[:6] == ("mxfp4", "dgrad", "grad_output", "E2M1", "2", "200")
    assert gradients[6:] == ("13.0", "−2.50", "21.00", "1.50", "layers.1.mlp.linear_fc1, 10.0 dB")
    assert inputs[:6] == ("mxfp4", "wgrad", "input", "E4M3", "2", "200")
    assert inputs[6:] == ("32.0", "+0.20", "25.00", "0.00", "layers.1.mlp.linear_fc1, 31.0 dB")


def test_the_terminal_has_a_line_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(folder) for folder in observed(tmp_path)]
    assert report.main([*folders, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out.partition("what quantization did to operands")[2].splitlines()
    assert re.split(r"\s{2,}", said[2]) == [
        *("recipe", "dgrad", "wgrad", "bias", "underflow", "saturation", "worst layer"),
    ]
    assert re.split(r"\s{2,}", said[5]) == [
        *("mxfp4", "13.0", "32.0", "−2.50", "25.00", "1.50"),
        "layers.1.mlp.linear_fc1 dgrad grad_output, 10.0 dB",
    ]
    assert said[6] == ""  # bf16 has no line


@pytest.mark.usefixtures("rendered")
def test_the_page_has_the_table_and_the_figure(tmp_path: Path) -> None:
    folders = [str(folder) for folder in observed(tmp_path)]
    assert report.main([*folders, "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert text.count(HEADING) == 1
    assert "<td>13.0</td><td>−2.50</td><td>21.00</td><td>1.50</td>" in text
    assert (tmp_path / "out/operand_snr.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", [None, "", '{"iteration": 1, "li'])
def test_runs_without_rows_show_nothing(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", "mxfp4")
    if content is not None:
        (run / "quantization.jsonl").write_text(content)
    assert report.main([str(run), "--out", str(tmp_path / "out")]) == 0
    assert "quantization" not in capsys.readouterr().out.partition("\nclaims:")[0]
    assert HEADING not in (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert not (tmp_path / "out/operand_snr.png").exists()


def test_a_damaged_file_is_named_and_the_others_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = observed(tmp_path)
    path = folders[2] / "quantization.jsonl"
    path.write_text("{\n" + path.read_text())
    assert report.main([*map(str, folders), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "3 runs: 3 finished."
    note = f"{path}: dropped, as no row of such a file: line 1 (Expecting property name enclosed in double quotes at"
    assert said[1].startswith(note)
    text = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert note in text


def test_runs_that_finished_count_and_others_only_where_none_did(tmp_path: Path) -> None:
    whole = write_snapshots(write_run(tmp_path / "a", "mxfp4", 1), [operand_row(400, "layers.1.a", 9.0)])
    cut = [operand_row(at, "layers.1.a", 3.0) for at in (100, 200)]
    half = write_snapshots(write_run(tmp_path / "b", "mxfp4", 2, ends_at=200), cut)
    other = write_snapshots(write_run(tmp_path / "c", "mxfp8", 1, ends_at=200), cut)
    mxfp4, mxfp8 = operand_tables.of_every_operand(snapshots(whole, half, other)).rows
    assert mxfp4[4:7] == ("1", "400", "9.0")
    assert mxfp8[4:7] == ("1, not finished", "200", "3.0")
    labels = [row[0] for row in operand_tables.in_short(snapshots(whole, half, other)).rows]
    assert labels == ["mxfp4", "mxfp8, not finished"]


def test_last_snapshots_of_different_iterations_are_named(tmp_path: Path) -> None:
    for seed, at in ((1, 400), (2, 390)):
        write_snapshots(write_run(tmp_path / str(seed), "mxfp4", seed), [operand_row(at, "layers.1.a", 9.0 + seed)])
    ((*_, runs, ends, snr, _, _, _, _),) = operand_tables.of_every_operand(
        snapshots(tmp_path / "1", tmp_path / "2")
    ).rows
    assert (runs, ends, snr) == ("2", "390 to 400", "10.5")


def test_non_finite_rows_come_first_and_are_in_no_median(tmp_path: Path) -> None:
    finite = ((1, 9.0, 0.1), (2, 5.0, 0.2), (4, 7.0, 0.3))
    rows = [operand_row(1, f"layers.{layer}.a", snr, underflow=underflow) for layer, snr, underflow in finite]
    rows.insert(2, operand_row(1, "layers.3.a", None, amax=None, bias=None, underflow=1.0))
    run = write_snapshots(write_run(tmp_path / "run", "mxfp4"), rows)
    (row,) = operand_tables.of_every_operand(snapshots(run)).rows
    assert (row[6], row[8], row[-1]) == ("7.0", "20.00", "layers.3.a, not finite (1 of 4)")
    (short,) = operand_tables.in_short(snapshots(run)).rows
    assert short[-1] == "layers.3.a dgrad grad_output, not finite (1 of 4)"


def test_the_table_of_outputs_has_their_medians(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bf16, *folders = observed(tmp_path)
    assert operand_tables.of_outputs(snapshots(bf16, *folders)) is None
    for folder, snrs in zip(folders, ([20.0, 22.0], [21.0, 25.0]), strict=True):
        rows = [json.loads(line) for line in (folder / "quantization.jsonl").read_text().splitlines()]
        for number, snr in enumerate(snrs, 1):
            output = operand_row(200, f"layers.{number}.a", snr, "wgrad", "output", bias=-snr / 1000, format="")
            rows += [output, output | {"iteration": 100, "snr": 1.0}, output | {"snr": 2.0, "recipe": "mxfp8"}]
        write_snapshots(folder, rows)
    table = operand_tables.of_outputs(snapshots(bf16, *folders))
    assert table is not None
    assert table.rows == (("mxfp4", "wgrad", "21.5", "−2.15", "layers.1.a, 20.0 dB"),)
    assert report.main([*map(str, (bf16, *folders)), "--out", str(tmp_path / "out")]) == 0
    assert re.search(r"mxfp4 +wgrad +21\.5 +−2\.15 +layers\.1\.a, 20\.0 dB", capsys.readouterr().out)
    assert "layers.1.a, 20.0 dB" in (tmp_path / "out/report.html").read_text()


def test_exact_operands_are_a_dash(tmp_path: Path) -> None:
    run = write_snapshots(write_run(tmp_path / "run", "mxfp4"), [operand_row(1, "layers.1.a", None, bias=None)])
    found = snapshots(run)
    (row,) = operand_tables.of_every_operand(found).rows
    assert row[6:] == ("–", "–", "25.00", "0.00", "–")
    assert operand_plots.snr(found, plot_style.styles(["mxfp4"], "bf16"), plot_style.LIGHT) is None


def drawn(found: Sequence[Snapshots], monkeypatch: pytest.MonkeyPatch) -> Figure:
    figures: list[Figure] = []
    monkeypatch.setattr(plot_style.Theme, "png", lambda theme, figure: figures.append(figure) or b"")
    operand_plots.snr(found, plot_style.styles([each.label for each in found], "bf16"), plot_style.LIGHT)
    (figure,) = figures
    return figure


def test_the_figure_has_the_median_and_the_range_of_layers_and_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients, inputs = (axes for axes in drawn(snapshots(*observed(tmp_path)), monkeypatch).axes if axes.get_visible())
    assert [axes.get_title(loc="left") for axes in (gradients, inputs)] == ["dgrad grad_output", "wgrad input"]
    (line,), (range_,) = gradients.lines, gradients.collections
    np.testing.assert_array_equal(line.get_xydata(), [[100, 1.0], [200, 13.0]])
    assert isinstance(range_, FillBetweenPolyCollection)
    corners = {(float(x), float(y)) for x, y in range_.get_paths()[0].vertices}
    assert corners == {(100.0, 1.0), (200.0, 10.0), (200.0, 20.0)}
    assert line.get_color() == plot_style.styles(["mxfp4"], "bf16")["mxfp4"].paint(plot_style.LIGHT)
    np.testing.assert_array_equal(inputs.lines[0].get_xydata(), [[200, 32.0]])


def test_a_curve_is_broken_where_nothing_is_finite_and_dotted_where_no_run_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hows = []
    monkeypatch.setattr(operand_plots, "band", lambda *args: (hows.append(args[4].dashes), plot_style.band(*args)))
    rows: Rows = [operand_row(at, "layers.1.a", snr) for at, snr in ((10, 9.0), (20, None), (30, 8.0))]
    figure = drawn(snapshots(write_snapshots(write_run(tmp_path / "run", "mxfp4", ends_at=200), rows)), monkeypatch)
    (axes,) = figure.axes
    (line,) = axes.lines
    np.testing.assert_array_equal(line.get_ydata(), [9.0, math.nan, 8.0])
    assert line.get_label() == "mxfp4, not finished"
    assert hows == [plot_style.NOT_FINISHED]
    assert figure.legends[0].get_texts()[0].get_text() == "mxfp4, not finished"


def test_panels_are_the_operands_that_any_recipe_quantizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes that quantize different GEMMs; of five operands the last stands alone in its row."""
    for recipe, kinds in (("mxfp4", KINDS[2:]), ("mxfp8", KINDS[:3])):
        rows = [operand_row(10, "layers.1.a", 9.0, *kind) for kind in kinds if kind != KINDS[-1]]
        write_snapshots(write_run(tmp_path / recipe, recipe), rows)
    figure = drawn(snapshots(tmp_path / "mxfp4", tmp_path / "mxfp8"), monkeypatch)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == [" ".join(kind) for kind in KINDS[:-1]]
    assert [bool(axes.get_xlabel()) for axes in panels] == [False, False, False, True, True]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["mxfp8", "mxfp4"]
