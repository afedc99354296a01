"""Tables of runs and of claims: their rows, columns and widths."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lowprec.commands import report_page as report
from megatron_lowprec.report import tables
from megatron_lowprec.report.amounts import share
from megatron_lowprec.report.build import build
from megatron_lowprec.report.claims import Published, load_claims
from megatron_lowprec.report.groups import group_runs
from megatron_lowprec.report.published.figures import published_difference
from megatron_lowprec.report.runs import find_runs
from megatron_lowprec.report.statistics import Fit
from tests.report.judging import groups
from tests.report.synthetic import add_cells, cell, write_run, write_sweep


def test_the_table_has_a_column_for_each_text(tmp_path: Path) -> None:
    """The mean over the finished runs, and how many of them were scored; bits a byte where they are known."""
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp8": 3.8, "mxfp4": 3.9}, seeds=2)
    for name, losses in {"bf16-s1": (4.0, 3.0), "bf16-s2": (4.2, 3.1), "mxfp8-s1": (4.4, 3.3)}.items():
        data = {"data/docs-test.jsonl.xz": {"loss": losses[0], "bits_per_byte": losses[0] / 4}}
        own = {"recipe": "r", "trained_under": "r", "data": data, "wikitext": {"loss": losses[1]}}
        (sweep / name / "evaluation.json").write_text(json.dumps(own))
    (group,), _ = group_runs(find_runs([str(sweep)], 0.5)[0], "bf16")
    fit = Fit(group.final_losses(), 0.95)
    table = tables.quality(group, fit, 0.95)
    columns = ["docs-test\nnats", "docs-test\nbits a byte", "WikiText\nnats"]
    assert [column for column in table.columns if column in columns] == columns
    rows = {row[0]: dict(zip(table.columns, row)) for row in table.rows}
    assert [rows["bf16"][column] for column in columns] == ["4.1000", "1.0250", "3.0500"]
    assert [rows["mxfp8"][column] for column in columns] == ["4.4000", "1.1000", "3.3000"]
    assert [rows["mxfp4"][column] for column in columns] == ["\N{EN DASH}"] * 3
    assert [rows[name]["seeds\nfinished"] for name in rows] == ["2 of 2", "2 of 2, 1 scored", "2 of 2"]
    several = tables.all_groups([group], {group.name: fit}, 0.95)
    assert set(columns) <= set(several.columns)


def test_a_repeated_seed_counts_once_in_the_mean_of_a_text(tmp_path: Path) -> None:
    for name, seed, loss in (("a", 1, 2.0), ("b", 1, 2.0), ("c", 2, 4.0)):
        own = {"recipe": "r", "trained_under": "r", "data": {"t.jsonl": {"loss": loss}}}
        (write_run(tmp_path / name, "bf16", seed, loss) / "evaluation.json").write_text(json.dumps(own))
    (group,) = groups(*tmp_path.iterdir())
    table = tables.quality(group, Fit(group.final_losses(), 0.95), 0.95)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["validation loss\nnats"], row["t\nnats"]) == ("3.0000", "3.0000")


def test_shares_round_to_a_half_only_from_a_half_on() -> None:
    shares = (0.02, 0.39, 0.4, 0.499, 0.5, 0.73, 1.0, 2.5)
    words = ["1/50", "1/3", "0.4 of it", "0.49 of it", "0.5 of it", "0.73 of it", "1 of it", "2.5 times"]
    assert list(map(share, shares)) == words


def test_published_numbers_are_shown_as_printed() -> None:
    row = Published("validation_loss", "mxfp4", "bf16", (3.4376, 3.4293), 51, 26, "Table 1")
    assert published_difference(row).startswith("mxfp4 3.4376, bf16 3.4293: +0.0083 nats, +0.8% of perplexity")
    assert published_difference(replace(row, values=(3.4, 3.25))).startswith("mxfp4 3.40, bf16 3.25: +0.15 nats")


def test_the_table_fits_a_terminal(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 3.7, "mxfp4_rht_sr": 3.8}, scatter=0.02)
    write_run(sweep / "mxfp4_rht_sr-s4", "mxfp4_rht_sr", 4, nan_from=200)
    add_cells(sweep, "synthetic", [cell("mxfp4_rht_sr", 4)])
    ((group,), _) = group_runs(find_runs([str(sweep)], 0.5)[0], "bf16")
    lines = tables.quality(group, Fit(group.final_losses(), 0.95), 0.95).lines()
    assert "3 of 4, 1 diverged" in lines[-1]
    assert max(map(len, lines)) <= 155


BOTH = "hopper_fp8, emulated"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (["not quantized", "emulated: no unit"], ["not quantized", "emulated: another"], "emulated"),
        (["native on sm90", "native on sm90"], ["native on sm90", "native on sm90"], "native"),
        (["native on sm90", "emulated: no unit"], ["emulated: no unit", "native on sm90"], "native, emulated"),
        (["hopper_fp8 on sm90", "emulated on sm90 (x: y)"], ["emulated on sm90", "hopper_fp8 on sm90"], BOTH),
        (["native, TransformerEngine: hybrid"] * 2, ["native, TransformerEngine: e4m3"] * 2, "native"),
        (["not quantized", "native on sm90"], ["not quantized", "emulated: no unit"], "mixed"),
        (["not quantized", "not quantized"], ["not quantized", "not quantized"], "not quantized"),
    ],
)
def test_the_table_names_backends(tmp_path: Path, first: list[str], second: list[str], words: str) -> None:
    runs = []
    for seed, ways in enumerate((first, second), 1):
        folder = write_run(tmp_path / str(seed), "mxfp4", seed)
        record = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**record, "gemms": dict(zip(("fprop", "dgrad"), ways))}))
        runs.append(str(folder))
    ((group,), _) = group_runs(find_runs(runs, 0.5)[0], "bf16")
    assert tables.quality(group, None, 0.95).rows[0][-1] == words


def test_the_table_names_the_backends_of_all_phases(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "s", "mxfp4", 1)
    record = json.loads((folder / "run.json").read_text())
    start, late = {"fprop": "emulated: x", "dgrad": "emulated: x"}, {"fprop": "native on sm90", "dgrad": "emulated: x"}
    phases = {"0": start, "1": late, "2": start}
    (folder / "run.json").write_text(json.dumps({**record, "gemms": start, "gemms_of_phases": phases}))
    ((group,), _) = group_runs(find_runs([str(folder)], 0.5)[0], "bf16")
    assert tables.quality(group, None, 0.95).rows[0][-1] == "native, emulated"
    ways = "before phases, phase 2: emulated: x; phase 1: fprop native on sm90; dgrad emulated: x"
    assert tables.gemms(group.runs[0]) == ways


def test_a_job_that_has_not_started_is_counted_in_its_row(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 3.7}, seeds=1)
    add_cells(sweep, "synthetic", [cell("bf16", 2)])
    ((group,), _) = group_runs(find_runs([str(sweep)], 0.5)[0], "bf16")
    assert tables.quality(group, None, 0.95).rows[0][1] == "1 of 2, 1 not started"


def test_the_table_of_claims_has_a_row_for_each_test(tmp_path: Path) -> None:
    """Tables of docs/results: a claim of two tests has its verdict once, and one that lacks a recipe no row."""
    sweep = write_sweep(tmp_path / "s", {"bf16": 3.7, "mxfp4_rht": 3.72, "mxfp4_rht_sr": 3.71, "mxfp4": 3.8})
    runs, notes = find_runs([str(sweep)], 0.5)
    found = build(runs, notes, load_claims(report.CLAIMS), "bf16", "a test")
    table = tables.claims(found.verdicts, 0.95)
    assert table is not None
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["claim"] for row in rows] == ["mxfp4_plain", "mxfp4_rht_alone", "mxfp4_rht_sr", *["mxfp4_rht_long"] * 2]
    assert [bool(row["verdict"]) for row in rows] == [True, True, True, True, False]
    assert rows[0]["difference"] == "mxfp4 less bf16"
    assert rows[0]["asked"] == "above 0.030 nats a token"
    assert (rows[0]["share of its parameters"], rows[0]["share of its tokens"]) == ("1/7", "1/1,259")
    assert float(rows[0]["measured"]) == pytest.approx(0.1, abs=0.01)
    assert tables.claims([], 0.95) is None
