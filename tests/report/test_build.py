"""The whole tool on sweeps whose truth is known, and on runs that the driver has just written."""

import base64
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_lowprec.commands import report_page as report
from megatron_lowprec.report import tables
from megatron_lowprec.report.build import build
from megatron_lowprec.report.claims import load_claims
from megatron_lowprec.report.groups import group_runs
from megatron_lowprec.report.runs import find_runs
from tests.report.synthetic import MXFP8_OPERANDS, add_cells, cell, write_run, write_sweep
from tests.training.helpers import argv

PNG = b"\x89PNG"


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    truth = {"bf16": 3.7, "mxfp4": 3.81, "mxfp4_rht": 3.71, "mxfp4_sr": 3.712, "mxfp4_rht_sr": 3.704}
    folder = write_sweep(tmp_path / "sweep", truth, seeds=2, scatter=0.0005)
    write_run(folder / "ocp", "mxfp8_ocp", 1, nan_from=200)
    write_run(folder / "half", "mxfp8", 1, ends_at=200)
    cells = [cell("mxfp8_ocp", 1, run="ocp"), cell("mxfp8", 1, run="half"), cell("mxfp8", 2)]
    add_cells(folder, "synthetic", cells)
    return folder


class Page(HTMLParser):
    """What a page refers to, and whether its tags close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.refers: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img", "br", "source"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "srcset", "href"):
                self.refers.append(value or "")
            if name == "id":
                assert value not in self.ids
                self.ids.add(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.usefixtures("rendered")
def test_a_sweep_becomes_a_page_that_needs_nothing_else(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert report.main([str(sweep), "--out", str(out)]) == 0
    text = (out / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert "@import" not in text
    assert "url(" not in text
    links = [each for each in page.refers if not each.startswith("data:image/png;base64,")]
    assert all(each.startswith("https://arxiv.org/abs/") or each[1:] in page.ids for each in links)
    pictures = [base64.b64decode(each.partition(",")[2]) for each in page.refers if each.startswith("data:")]
    assert len(pictures) == 8  # four figures, light and dark
    assert len(set(pictures)) == 8
    own, ladder, claims = (text.index(f"<h2>{title}") for title in ("Runs of", "Gap over tokens", "What papers claim"))
    assert own < ladder < claims
    assert text.index('class="badge') > claims
    for name in ("gap_by_tokens", "gaps", "training_loss", "validation_loss"):
        data = (out / f"{name}.png").read_bytes()
        assert data.startswith(PNG)
        assert data in pictures
    said = capsys.readouterr().out
    assert said.splitlines()[0] == "13 runs: 10 finished, 1 diverged, 1 unfinished, 1 not started."
    assert said.splitlines()[-1] == f"report: {out / 'report.html'}"
    for words in (
        "mxfp8_ocp-s1 (mxfp8_ocp): diverged, training loss not finite from iteration 200",
        "mxfp8-s2 (mxfp8): not started, there is no folder",
        "no verdict, too few tokens per parameter: mxfp4_plain (arXiv 2502.20586)",
        "margin: above 0.030 nats a token: the gap that the source still calls near-lossless",
        "1.0 tokens per parameter without embeddings; a verdict takes 20",
        "with 4 degrees of freedom",
    ):
        assert words in said
    for words in ("mxfp8_ocp-s1", "there is no folder", "0123456789ab", "NVIDIA H200", "emulated: no unit", "655,360"):
        assert words in text


def test_the_table_has_the_runs_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finals = {"bf16": [3.70, 3.72], "mxfp4": [3.80, 3.84]}
    assert report.main([str(write_sweep(tmp_path / "s", finals)), "--out", str(tmp_path / "out")]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("mxfp4 "))
    cells = re.split(r"\s{2,}", row)
    # means 3.71 and 3.82; sd .0141 and .0283, pooled .02236; t(2) = 4.3027; half width .0962
    assert cells == [
        "mxfp4",
        "2 of 2",
        "+0.1100",
        "+0.0138 to +0.2062",
        "+11.63",
        "+1.39 to +22.90",
        "3.8200",
        "0.0283",
        "655,360",
        "emulated",
    ]


def test_independent_runs_have_their_reason_and_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": [3.70, 3.72], "mxfp4": [3.80, 3.84]})
    assert report.main([str(sweep), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert (
        "Seeds count as independent runs: seeds as blocks need 4 degrees of freedom, there is 1; 3 more shared seeds "
        "would do. The table's intervals are therefore unpaired, while those of claims pair equal seeds." in said
    )
    assert report.main([str(sweep / "bf16-s1"), str(sweep / "bf16-s2"), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "independent runs, since a single recipe has no pairs." in said
    assert "with 1 degree of freedom." in said


def test_claims_without_a_test_are_folded(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 3.7, "mxfp4": 3.8})
    assert report.main([str(sweep), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    opening, rest = text.split("<h1>")[1].split("<details>")
    folded, after = rest.split("</details>")
    assert [opening.count('<span class="badge'), folded.count('<span class="badge')] == [1, 28]
    assert "28 of 29 claims" in folded
    assert "1 no verdict, too few tokens per parameter" in after
    assert "No test was made." in after
    assert text.count("no run of mxfp4_sr<") == 2  # once a claim: the one that tests two differences has it once
    assert Page(text).open == []


def test_tests_are_counted_where_there_is_a_verdict(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 3.7, "mxfp4": 3.8})
    runs, notes = find_runs([str(sweep)], 0.5)
    claims = load_claims(report.CLAIMS)
    for least, words in ((20.0, "No test was made."), (0.0, "1 test was made")):
        of_length = replace(claims, rules=replace(claims.rules, tokens_per_parameter=least))
        assert words in build(runs, notes, of_length, "bf16", "a test")._judged()


def test_a_report_without_claims_has_the_same_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 3.7, "mxfp4": 3.8})
    assert report.main([str(sweep), "--out", str(tmp_path / "out"), "--no-claims"]) == 0
    without = capsys.readouterr().out.split("\nreport:")[0].splitlines()
    runs, notes = find_runs([str(sweep)], 0.5)
    lines = build(runs, notes, load_claims(report.CLAIMS), "bf16", "a test").lines()
    assert "\n".join(lines).split("\nclaims:")[0].splitlines() == without
    text = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert Page(text).open == []
    for words in ("badge ", "What papers claim", "Claims compare", "arxiv.org", "Published gaps"):
        assert words not in text.split("</style>")[1]


def test_many_overrides_are_listed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = tuple(f"{gemm}.{operand}.scale_rule=floor" for gemm, operand in MXFP8_OPERANDS)
    full = "+".join(["mxfp8", *overrides])
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", "mxfp8", overrides=overrides)]
    command = [*map(str, runs), "--out", str(tmp_path / "out")]
    assert report.main(command) == 0
    said = capsys.readouterr().out
    assert said.count(full) == 1
    assert max(len(line) for line in said.splitlines() if line.startswith("mxfp8+")) <= 180
    assert full in (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert report.main([*command, "--reference", full]) == 0
    assert "gap to mxfp8+6 overrides-" in capsys.readouterr().out


def test_recipes_of_one_name_are_explained_and_may_be_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", "mxfp4_rht")]
    runs.append(write_run(tmp_path / "c", "mxfp4_rht", overrides=("dgrad.hadamard.block=32",)))
    config = runs[-1] / "config.yaml"
    config.write_text(config.read_text().replace("name: mxfp4_rht+dgrad.hadamard.block=32", "name: mxfp4_rht"))
    out = tmp_path / "out"
    assert report.main([*map(str, runs), "--out", str(out), "--reference", "mxfp4_rht (2)"]) == 0
    said = capsys.readouterr().out
    assert "gap to mxfp4_rht (2)" in said
    assert "  mxfp4_rht (2): mxfp4_rht, which differs from the first in dgrad" in said
    found = build(find_runs([str(runs[-1]), str(runs[1])], 0.5)[0], [], load_claims(report.CLAIMS), "bf16", "a test")
    assert [row[1] for row in tables.all_runs(found.runs).rows] == ["mxfp4_rht", "mxfp4_rht (2)"]


def test_options_of_models_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = {"config": "configs/models/gpt_tiny.yaml", "num_layers": 2, "hidden_size": 256}
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", options={"lr": 3e-4})]
    runs.append(write_run(tmp_path / "c", options=tiny))
    assert report.main([*map(str, runs), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "Groups of different models differ as well in hidden_size, num_layers." in said
    assert "26.2M tokens a run; lr 0.0003." in said
    assert said.count("num_layers") == 1


@pytest.mark.usefixtures("rendered")
def test_groups_are_kept_apart_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_sweep(tmp_path / "a", {"bf16": 3.7, "mxfp4": 3.8}, seeds=2)
    b = write_run(tmp_path / "b", "mxfp4", options={"train_iters": 800})
    assert report.main([str(a), str(b), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "in 2 groups that are not compared with each other" in said
    rows = [re.split(r"\s{2,}", line) for line in said.splitlines() if line.startswith("gpt_25m, ")]
    assert [row[1] for row in rows if len(row) > 1] == ["bf16", "mxfp4", "mxfp4"]
    assert said.count("seeds' sd") == 1  # one table, not one a group
    assert "gpt_25m, 52.4M tokens: 51M parameters, 52.4M tokens a run; train_iters 800." in said
    assert "gpt_25m, 52.4M tokens has no run of bf16, so no gaps to it." in said
    assert (tmp_path / "out/group2_training_loss.png").exists()


def test_recipes_that_share_no_seed_with_the_reference_have_no_gap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They share seeds among themselves, so that the noise is known."""
    folder, seeds = tmp_path / "sweep", {"bf16": (1, 2), "mxfp4": range(3, 9), "mxfp8": range(3, 9)}
    cells = []
    for recipe, its in seeds.items():
        for seed in its:
            loss = 3.7 + 0.001 * (seed * 7 % 5) + (0.002 * (seed * 3 % 4) if recipe == "mxfp8" else 0.0)
            write_run(folder / f"{recipe}-s{seed}", recipe, seed, loss)
            cells.append(cell(recipe, seed))
    add_cells(folder, "synthetic", cells)
    assert report.main([str(folder), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "Recipes share their seeds, which count as blocks" in printed
    assert "The smallest difference to bf16" not in printed


@pytest.mark.parametrize("how", [{"nan_from": 200}, {"ends_at": 100}])
@pytest.mark.usefixtures("rendered")
def test_a_report_without_a_finished_run_is_one_all_the_same(
    tmp_path: Path, how: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", **how)  # type: ignore[arg-type]
    assert report.main([str(run), "--out", str(tmp_path / "out")]) == 0
    assert "No run finished" in capsys.readouterr().out
    Page((tmp_path / "out/report.html").read_text(encoding="utf-8"))


@pytest.mark.usefixtures("rendered")
def test_names_of_runs_are_escaped_in_the_page(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 3.7}, seeds=2)
    add_cells(sweep, "<b>&", [cell("<i>", 3, id='<script>"', run="bf16-s1/../missing")])
    assert report.main([str(sweep), "--out", str(tmp_path / "out")]) == 0
    page = Page((tmp_path / "out/report.html").read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert "i" not in page.tags


@pytest.mark.parametrize("case", ["nothing", "empty", "file", "claims", "reference"])
def test_mistakes_are_one_line_and_exit_code_2(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    arguments = {
        "nothing": [str(tmp_path / "nothing"), "--out", str(tmp_path / "out")],
        "empty": [str(tmp_path / "empty"), "--out", str(tmp_path / "out")],
        "file": [str(run), "--out", str(tmp_path / "file")],
        "claims": [str(run), "--out", str(tmp_path / "out"), "--claims", str(tmp_path / "no.yaml")],
        "reference": [str(run), "--out", str(tmp_path / "out"), "--reference", "mxfp9"],
    }[case]
    assert report.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("report.py: error: ")
    assert error.count("\n") == 1


def test_runs_of_the_driver_are_read_completely(
    drive: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for recipe in ("bf16", "mxfp4_rht_sr"):
        for seed in (1, 2):
            options = {"recipe": recipe, "seed": seed, "bf16": True, "train_iters": 4, "eval_iters": 1}
            place = {"save": f"{recipe}-{seed}", "no_save": True, "eval_interval": 2}
            drive(argv(**options, **place, lr_decay_style="constant", micro_batch_size=4))
    capsys.readouterr()
    assert report.main(["*-[12]", "--out", "out", "--reference", "bf16"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("4 runs: 4 finished.")
    assert "512 tokens a run" in said
    record = json.loads(Path("mxfp4_rht_sr-1/run.json").read_text())
    assert f"{record['parameters'] / 1000:.3g}K parameters" in said
    text = Path("out/report.html").read_text(encoding="utf-8")
    assert "fprop not quantized; dgrad, wgrad emulated on cpu (blackwell_mx: no MXFP4 GEMM on cpu)" in text
    assert record["versions"]["torch"] in text
    assert "unknown parameters" not in said


def test_a_run_whose_gradient_norm_grows_late_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steady = write_run(tmp_path / "bf16", "bf16", norms=[9.0, 1.0, 0.8, 0.8, 1.6])
    growing = write_run(tmp_path / "mxfp4", "mxfp4", norms=[3.0, 1.0, 0.8, 1.2, 1.7])
    silent = write_run(tmp_path / "mxfp8", "mxfp8")
    short = write_run(tmp_path / "mxfp4_sr", "mxfp4_sr", norms=[3.0, 1.0, 0.8, 1.2, 1.7], ends_at=300)
    folders = [str(folder) for folder in (steady, growing, silent, short)]
    (group,), _ = group_runs(find_runs(folders, 0.5)[0], "bf16")
    table = tables.gradient_norms(group)
    assert table is not None
    assert table.rows == (
        ("bf16", "1", "9.00", "1.00", "0.80", "0.80", "1.60", "9.0"),
        ("mxfp4", "1", "3.00", "1.00", "0.80", "1.20", "1.70", "3.0"),
        ("mxfp4_sr", "1", "3.00", "1.00", "0.80", "1.20", "–", "3.0"),
    )
    assert report.main([*folders, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "mxfp4: the gradient norm grew late, from a median of 0.80 in the middle fifth" in printed
    assert printed.count("grew late") == 1
    assert "Gradient norms" in (tmp_path / "out/report.html").read_text()
