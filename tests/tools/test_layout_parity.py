"""tools.layout_parity without its launches: the plan, the comparison and the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec import recipes
from megatron_lowprec.files import json_lines
from tests.environment import ROOT
from tools.layout_parity import layouts, plan
from tools.layout_parity.__main__ import main
from tools.layout_parity.compare import compare, exempt, spread
from tools.layout_parity.page import render
from tools.layout_parity.worker import CHECKS

LAYOUTS = {(layout.model, layout.name): layout for layout in layouts.LAYOUTS}
FACTS: dict[str, Any] = {"base": 2, "steps": 3, "batch": 4, "microbatch": 2, "sequence": 64, "seeds": [1]}


def row(check: str, layout: str = "1", precision: str = "fp32", recipe: str = "mxfp8", **more: Any) -> dict[str, Any]:
    found = {"model": "gpt", "layout": layout, "precision": precision, "recipe": recipe, "check": check, "seconds": 0.1}
    return found | more


def losses(*values: float) -> list[str]:
    return [value.hex() for value in values]


def reference(*moved: float, precision: str = "fp32") -> list[dict[str, Any]]:
    runs = {str(seed): losses(5.0, 4.0 + by, 3.0) for seed, by in enumerate(moved)}
    return [
        row("losses", precision=precision, losses=losses(5.0, 4.0, 3.0)),
        row("spread", precision=precision, moved=runs),
    ]


def test_every_layout_and_recipe_is_planned() -> None:
    selected = plan.Selection(recipes())
    launches = {launch.name: launch for launch in plan.launches(selected, Path("there"))}
    assert len(launches) == 1 + len(layouts.LAYOUTS) + len(layouts.RESUMED)
    for layout in layouts.LAYOUTS:
        launch = launches[f"{layout.model} {layout.name}"]
        assert launch.processes == layout.processes
        planned = {(group["name"]["precision"], check) for group in launch.groups for check in group["checks"]}
        assert ("fp32", "operands") in planned
        assert ("fp64", "losses") in planned or layout.distributed_optimizer
        assert all(
            set(group["recipes"]) in (set(recipes()), {"bf16"}) or "noise" in group["checks"] for group in launch.groups
        )
    assert {check for launch in launches.values() for group in launch.groups for check in group["checks"]} | {
        "base"
    } == set(CHECKS)
    # each checkpoint that is loaded is written
    written = {group["save"] for group in plan.base_launch(selected, Path("there")).groups}
    flags = [group["flags"] for launch in launches.values() for group in launch.groups]
    assert {line[line.index("--load") + 1] for line in flags if "--load" in line} == written


def test_gpus_take_what_fits_and_share_the_longest_launch() -> None:
    selected = plan.Selection(recipes(), gpus=2, precisions=("fp32", "bf16"))
    launches = plan.launches(selected, Path("there"), reference_parts=2)
    assert max(launch.processes for launch in launches) == 2
    parts = [launch.groups[0]["recipes"] for launch in launches if launch.name.startswith("reference")]
    assert sorted(name for part in parts for name in part) == sorted(recipes())
    assert all("--deterministic-mode" in group["flags"] for launch in launches for group in launch.groups)


@pytest.mark.parametrize(
    ("layout", "recipe", "why"),
    [
        ("TP2+SP", "mxfp4_rht_sr", ""),
        ("TP2xPP2+SP", "fp8_delayed", ""),
        ("DP2", "mxfp4", ""),
        ("DP2", "fp8_current", ""),
        ("DP2", "mxfp4_rht", "numbers of their own"),
        ("TP2xDP2", "mxfp4_sr", "numbers of their own"),
        ("DP2", "fp8_delayed", "calibration"),
    ],
)
def test_only_what_must_differ_is_let_off(layout: str, recipe: str, why: str) -> None:
    found = exempt(LAYOUTS["gpt", layout], recipe)
    assert why in found
    assert bool(why) == bool(found)


def test_experts_are_let_off_where_anything_is_quantized() -> None:
    assert exempt(LAYOUTS["moe_tiny", "EP2"], "mxfp8")
    assert not exempt(LAYOUTS["moe_tiny", "EP2"], "bf16")


def test_the_spread_is_that_of_any_two_runs() -> None:
    assert spread(reference(1e-3, -2e-3), "moved") == pytest.approx((0.0, 3e-3))
    assert spread(reference(1e-3), "reordered") == (0.0, 0.0)


@pytest.mark.parametrize(
    ("found", "ok"),
    [
        ((5.0, 4.0, 3.0), True),
        ((5.000009, 4.0, 3.0), True),
        ((5.00002, 4.0, 3.0), False),  # first step
        ((5.0, 4.0, 3.003), True),
        ((5.0, 4.0, 3.007), False),  # above two spreads
    ],
)
def test_fp32_is_compared_by_the_first_step_and_by_the_spread(found: tuple[float, ...], ok: bool) -> None:
    (verdict,) = compare([*reference(1e-3, -2e-3), row("losses", "TP2", losses=losses(*found))])
    assert verdict.ok is ok


def test_a_cell_that_would_accept_another_recipe_decides_nothing() -> None:
    """Losses of a second recipe on one process: inside the spread, outside of it in the first step, or later."""
    other = {"recipe": "mxfp8_ocp", "losses": losses(5.0, 4.001, 3.0)}
    cell = row("losses", "TP2", losses=losses(5.0, 4.0, 3.0))
    for found, accepted in (
        (losses(5.0, 4.001, 3.0), ("mxfp8_ocp",)),
        (losses(5.0001, 4.0, 3.0), ()),
        (losses(5.0, 4.0, 3.1), ()),
    ):
        (verdict,) = compare([*reference(1e-3), {**row("losses"), **other, "losses": found}, cell])
        assert (verdict.ok, verdict.others, verdict.accepted) == (True, 1, accepted)
        assert verdict.decides == (not accepted)
    page = render("Title", [verdict, replace(verdict, accepted=("mxfp8_ocp",))], FACTS, "conditions", [])
    assert "**1 cases hold. 1 cases that would accept another recipe's losses hold.**" in page
    elsewhere = {**row("losses", precision="bf16"), **other}
    (verdict,) = compare([*reference(1e-3), elsewhere, cell])
    assert verdict.others == 0


def test_exact_sums_have_tolerance_0_except_where_stated() -> None:
    rows = reference(1e-3, precision="fp64")
    off = losses(5.0, 4.0, 3.0001)
    assert [v.ok for v in compare([*rows, row("losses", "TP2", "fp64", losses=off)])] == [False]
    assert [v.ok for v in compare([*rows, row("losses", "DP2", "fp64", losses=off)])] == [False]
    drawn = [{**one, "recipe": "mxfp4_sr"} for one in [*rows, row("losses", "DP2", "fp64", losses=off)]]
    (verdict,) = compare(drawn)
    assert verdict.ok
    assert verdict.bound is None


def test_one_other_bit_is_seen() -> None:
    ours, stock = (row("losses", "TP2", "bf16", "bf16", linears=one, losses=losses(5.0)) for one in ("ours", "stock"))
    assert [v.ok for v in compare([ours, stock])] == [True]
    assert [v.ok for v in compare([ours, {**stock, "losses": losses(5.0 + 1e-15)}])] == [False]
    resumed = row("resume", "PP2", "bf16", whole=losses(5.0, 4.0), resumed=losses(5.0, 4.0))
    assert [v.ok for v in compare([resumed])] == [True]
    assert [v.ok for v in compare([{**resumed, "resumed": losses(5.0, 4.0 + 1e-15)}])] == [False]
    operands = row("operands", "TP2", compared=96, layers=16, wrong=[])
    assert [v.ok for v in compare([operands, {**operands, "wrong": ["rank 0: x"]}, {**operands, "compared": 0}])] == [
        True,
        False,
        False,
    ]
    base = row("base", "1", recipe="bf16", weights="a", distributed=False)
    assert [v.ok for v in compare([base, {**base, "weights": "b", "distributed": True}])] == [False]
    assert [v.ok for v in compare([row("losses", "TP2", failed="sizes")])] == [False]


@pytest.mark.parametrize(
    ("same_noise", "z", "same", "ok"),
    [(False, 2.9, False, True), (False, -3.1, False, False), (False, 0.0, True, False), (True, 900.0, True, True)],
)
def test_noise_is_independent_or_the_same(same_noise: bool, z: float, same: bool, ok: bool) -> None:
    noise = row("noise", "DP2", recipe="mxfp4_sr", same_noise=same_noise, entries=100, z=z, same=same)
    assert [v.ok for v in compare([noise])] == [ok]


def test_the_page_names_what_failed() -> None:
    verdicts = compare(
        [
            *reference(1e-3),
            row("losses", "TP2", losses=losses(5.1, 4.0, 3.0)),
            row("losses", "PP2", losses=losses(5.0, 4.0, 3.0005)),
            row("operands", "TP2", compared=96, layers=16, wrong=[]),
        ]
    )
    page = render("Title", verdicts, FACTS, "conditions", ["launch x failed"], ["gpt TP2, mxfp4, losses"])
    assert "**3 cases, 1 more than allowed. 1 checks have no result.**" in page
    assert "1 comparisons are of bits" in page
    assert "## No result\n\n- gpt TP2, mxfp4, losses\n" in page
    assert "| `mxfp8` | **1e-1 / 0 (0.00)** | 0 / 5e-4 (0.50) |" in page
    assert "- losses, gpt TP2, mxfp8, fp32: first 1.0e-01" in page
    assert "- gpt TP2, fp32: 96 operands of 16 linear layers" in page
    assert page.endswith("- launch x failed\n")


def test_missing_rows_are_reported() -> None:
    selected = plan.Selection(["bf16", "mxfp4"], ["TP2"], ["losses"], precisions=["fp32"])
    launches = plan.launches(selected, Path("folder"))
    everything = plan.missing(launches, [])
    assert "gpt TP2, fp32, mxfp4, losses" in everything
    rows = [row("losses", "TP2", recipe="mxfp4"), row("losses", "1", recipe="bf16")]
    left = plan.missing(launches, rows)
    assert set(everything) - set(left) == {"gpt TP2, fp32, mxfp4, losses", "reference 1, fp32, bf16, losses"}


def test_rows_are_compared_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {
        "command": "python -m tools.layout_parity",
        "date": "2026-11-21",
        "device": "2 CPU cores, gloo",
        "versions": {"torch": "2.13"},
        "facts": FACTS,
        "minutes": 1.0,
        "launches": [],
        "rows": [*reference(1e-3), row("losses", "TP2", losses=losses(5.0, 4.0, 3.0))],
    }
    found = tmp_path / "found.json"
    found.write_text(json.dumps(content))
    assert main(["--compare", str(found)]) == 0
    assert "**1 cases hold.**" in (tmp_path / "found.md").read_text()
    assert "torch 2.13; commit not recorded." in (tmp_path / "found.md").read_text()
    found.write_text(json.dumps({**content, "commit": "0123456789ab"}))
    assert main(["--compare", str(found)]) == 0
    assert "torch 2.13; commit 0123456789ab." in (tmp_path / "found.md").read_text()
    content["rows"] = [*reference(1e-3), row("losses", "TP2", losses=losses(5.1, 4.0, 3.0))]
    found.write_text(json.dumps(content))
    assert main(["--compare", str(found)]) == 1
    assert "more than allowed: losses, gpt TP2, mxfp8, fp32" in capsys.readouterr().out


KINDS_ON_THE_PAGE = [("operands", True), ("losses", True), ("losses", False)]
KINDS_ON_THE_PAGE += [("stock", True), ("resume", True), ("noise", True)]


@pytest.mark.parametrize(("name", "column"), [("cpu", 1), ("gpu", 3)])
def test_the_page_has_the_counts_of_the_stored_rows(tmp_path: Path, name: str, column: int) -> None:
    """The page's table of comparisons, from the JSON files beside it."""
    text = (ROOT / "docs/results/layout-parity.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    shown = [(int(row[column]), int(row[column + 1])) for row in rows if row[column].isdigit()]
    # gpu-rest: checks that had no result in the first run on GPUs
    files = (ROOT / "docs/results").glob(f"layout-parity-{name}*.json")
    verdicts = [each for file in files for each in compare(json.loads(file.read_text(encoding="utf-8"))["rows"])]
    kinds = [
        [each for each in verdicts if each.check == check and each.decides == decides]
        for check, decides in KINDS_ON_THE_PAGE
    ]
    assert shown == [(len(kind), sum(not each.ok for each in kind)) for kind in kinds]


def test_a_row_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    assert list(json_lines(path, print)) == [{"a": 1}]
    assert list(json_lines(tmp_path / "none", print)) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--layouts", "TP3"], "--layouts TP3: not among DP2"),
        (["--recipes", "mxfp5"], "mxfp4"),
        (["--checks", "speed"], "losses"),
        (["--precisions", "fp16"], "bf16"),
    ],
)
def test_errors_are_named(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err
