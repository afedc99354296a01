"""Main figures of result pages, computed again from the archived columns without the report's code."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Sequence
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import pytest

from megatron_lowprec.shipped import SHIPPED
from tests.docs.archived_columns import RESULTS, Archive, Series
from tests.docs.page_tables import shown, table, within

LOSS, TRAIN, NORM = "lm loss validation", "lm loss", "grad-norm"

_RUN = re.compile(r"\w+?-(?P<recipe>\w+)(?:-(?P<variant>\w[\w-]*))?-s(?P<seed>\d+)")
Losses = dict[tuple[str, str], float]
"""Recipe and seed -> validation loss after the last iteration, nats."""


def ends(archive: Archive) -> dict[tuple[str, str], Losses]:
    """Model's name and variant -> losses of the runs that reached their last iteration."""
    found: dict[tuple[str, str], Losses] = {}
    for run, (iterations, values) in archive.metrics(LOSS).items():
        name = _RUN.fullmatch(run.rpartition("/")[2])
        assert name is not None, run
        if iterations[-1] == archive.options(run)["train_iters"]:
            model = run.rpartition("/")[2].partition("-")[0]
            found.setdefault((model, name["variant"] or ""), {})[name["recipe"], name["seed"]] = float(values[-1])
    return found


def gaps(losses: Losses, aside: Sequence[str] = ()) -> dict[str, float]:
    """Least squares of recipe plus seed, less bf16's; recipes ``aside`` by the mean of their pairs."""
    kept = [key for key in losses if key[0] not in aside]
    names = sorted({recipe for recipe, _ in kept} - {"bf16"})
    seeds = sorted({seed for _, seed in kept})
    design = np.array([[recipe == name for name in names] + [seed == each for each in seeds] for recipe, seed in kept])
    solved = np.linalg.lstsq(design.astype(float), np.array([losses[key] for key in kept]), rcond=None)[0]
    pairs = {name: [losses[key] - losses["bf16", key[1]] for key in losses if key[0] == name] for name in aside}
    return dict(zip(names, solved.tolist())) | {name: mean(pairs[name]) for name in aside}


def of_archives(kind: str, archives: str, *words: str) -> list[dict[str, str]]:
    """``table`` of these archives and further words, on the page of their folder."""
    names = [f"{name}.safetensors.xz" for name in archives.split()]
    return table(f"{archives.partition('/')[0]}.md", " ".join([kind, *names, *words]))


PARTS = ("", "-others", "-phases", "-phases-seeds", "-four-over-six", "-quartet2", "-nvidia")
RIVALS = " ".join(f"fp4-rivals/25m{name}" for name in PARTS)
QUALITY = {
    "recipes-25m/runs": ["mxfp4"],
    "fp8-lm/levels": [],
    "fp8-lm/accumulation": [],
    "learning-rate/runs": [],
    "mxfp8-operands/3m": [],
    "mxfp8-operands/3m-layers": [],
    "mxfp8-operands/25m": [],
    "mxfp8-operands/25m-one-machine": [],
    "mxfp8-operands/tiny": [],
    RIVALS: ["quartet2_nvidia"],
    "muon/25m muon/25m-8e-3": [],
}
"""Archives -> recipes whose noise stands out, which the page compares by their pairs."""


@pytest.mark.parametrize("name", QUALITY)
def test_gaps_means_and_spreads(name: str) -> None:
    groups = ends(Archive(name))
    rows = of_archives("quality", name)
    checked = 0
    for row in rows:
        variant = row.get("group", "").partition(", ")[2]
        (losses,) = [found for (_, named), found in groups.items() if named == variant]
        recipe = row["recipe"]
        own = [loss for (each, _), loss in losses.items() if each == recipe]
        assert row["seeds, finished"].startswith(f"{len(own)} of ")
        assert shown(row["validation loss, nats"]) == within(mean(own), 4)
        if len(own) > 1:
            assert shown(row["seeds' sd, nats"]) == within(stdev(own), 4)
        checked += 1
        if recipe != "bf16":
            gap = gaps(losses, QUALITY[name])[recipe]
            assert shown(row["gap to bf16, nats"]) == within(gap, 4)
            assert shown(row["gap, % of perplexity"]) == within(100 * math.expm1(gap), 2)
    assert checked == len({(variant, recipe) for (_, variant), found in groups.items() for recipe, _ in found})


@pytest.mark.parametrize("name", ["mxfp8-operands/3m-layers", "mxfp8-operands/25m-one-machine", RIVALS])
def test_losses_by_text(name: str) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for path, text in Archive(name).texts.items():
        run, _, file = path.rpartition("/")
        if file == "evaluation.json":
            match = _RUN.fullmatch(run.rpartition("/")[2])
            assert match is not None, run
            own = (each for each in json.loads(text)["evaluations"] if each["recipe"] == each["trained_under"])
            found.setdefault(match["recipe"], []).append(list(own)[-1])
    rows = of_archives("quality", name)
    assert {row["recipe"] for row in rows} == found.keys()
    for row in rows:
        scores = found[row["recipe"]]
        finished, _, others = row["seeds, finished"].partition(" of ")
        assert others.endswith(f", {len(scores)} scored") == (int(finished) > len(scores))
        wikitext = [each["wikitext"] for each in scores]
        nats = [each["data"]["data/enwiki-test.jsonl.xz"]["loss"] for each in scores]
        assert shown(row["enwiki-test, nats"]) == within(mean(nats), 4)
        assert shown(row["WikiText, nats"]) == within(mean(each["loss"] for each in wikitext), 4)
        bits = [each["loss"] * each["tokens"] / each["bytes"] / math.log(2) for each in wikitext]
        assert shown(row["WikiText, bits a byte"]) == within(mean(bits), 4)


def test_rivals_by_seed() -> None:
    curves = {run.rpartition("/")[2]: found for run, found in Archive(RIVALS).metrics(LOSS).items()}
    rows = of_archives("validations", RIVALS)
    assert len(rows) == sum("-bf16-" not in run for run in curves)
    for row in rows:
        (at, ours), (_, bf16) = (curves[f"gpt_25m-{recipe}-s{row['seed']}"] for recipe in (row["recipe"], "bf16"))
        for iteration, difference in zip(at, ours - bf16, strict=True):
            assert shown(row[f"less bf16's, nats, iteration {iteration:,}"]) == within(difference, 4)


def by_text(evaluation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name of a text -> its score in an entry of evaluation.json."""
    texts = {file.rpartition("/")[2].partition(".")[0]: found for file, found in evaluation["data"].items()}
    return texts | {"WikiText": evaluation["wikitext"]}


def test_rivals_by_text() -> None:
    scores: dict[tuple[str, ...], float] = {}  # bits a byte; and nats a token
    for path, text in Archive(RIVALS).texts.items():
        if path.endswith("/evaluation.json"):
            for each in json.loads(text)["evaluations"]:
                for name, found in by_text(each).items():
                    key = name, each["trained_under"], each["recipe"], path.partition("/evaluation")[0][-4:]
                    scores[*key, "nats"] = found["loss"]
                    scores[*key, "bits"] = found["loss"] * found["tokens"] / found["bytes"] / math.log(2)
    rows = of_archives("texts", RIVALS)
    assert 2 * sum(int(row["seeds"]) for row in rows) == len(scores)
    for row in rows:
        key = row["text"], row["trained under"], row["scored under"]
        seeds = [f"{1234 + at}" for at in range(int(row["seeds"]))]
        nats, bits = ([scores[*key, seed, unit] for seed in seeds] for unit in ("nats", "bits"))
        beside = row["text"], "bf16", "bf16"
        gaps = [ours - scores[*beside, seed, "nats"] for ours, seed in zip(nats, seeds, strict=True)]
        assert shown(row["loss, nats"]) == within(mean(nats), 4)
        assert shown(row["bits a byte"]) == within(mean(bits), 4)
        assert shown(row["less bf16's, nats"]) == within(mean(gaps), 4)
        assert shown(row["smallest"]) == within(min(gaps), 4)
        assert shown(row["largest"]) == within(max(gaps), 4)
        of_bits = mean(bits) - mean(scores[*beside, seed, "bits"] for seed in seeds)
        assert shown(row["less bf16's, bits a byte"]) == within(of_bits, 4)


def test_gradient_norms_of_rivals() -> None:
    norms = {run.rpartition("/")[2]: found for run, found in Archive(RIVALS).metrics(NORM).items()}
    first, second = (norms[f"gpt_25m-quartet2_nvidia-s{seed}"] for seed in (1234, 1235))
    medians = [[median(over(each, at + 1, at + 200)) for at in range(0, 2200, 200)] for each in (first, second)]
    apart = max(abs(theirs / ours - 1) for ours, theirs in zip(*medians, strict=True))
    bf16 = [norms[f"gpt_25m-bf16-s{seed}"] for seed in (1234, 1235)]
    late = (max(value for each in pair for value in over(each, 401, 2200)) for pair in ((first, second), bf16))
    page = (RESULTS / "fp4-rivals.md").read_text(encoding="utf-8")
    found = re.search(r"exceeds ([\d.]+) in either \(bf16: ([\d.]+)\), .* at most (\d+)%", page)
    assert found is not None
    assert [float(each) for each in found.groups()] == [
        *(math.ceil(100 * each) / 100 for each in late),
        round(100 * apart),
    ]


def test_published_gaps_beside_rivals() -> None:
    with (SHIPPED / "data/quartet2-runs.csv").open(encoding="utf-8", newline="") as file:
        runs = list(csv.DictReader(file))
    bf16 = {(run["N"], run["D"]): float(run["final_loss"]) for run in runs if run["group"] == "baseline"}
    sizes = {"30.5M": "30482560", "49.6M": "49556736", "103M": "102777856", "203M": "203188480"}
    rows = table("fp4-rivals.md", "published data/quartet2-runs.csv quartetv2 nvidia tetrajetv2")
    assert len(rows) == 3 * len(sizes)
    for row in rows:
        own = [run for run in runs if (run["N"], run["group"]) == (sizes[row["parameters"]], row["group"])]
        budgets = sorted({run["D"] for run in own}, key=int)
        cells = [cell for column, cell in row.items() if column.startswith("gap at") and cell != "\N{EN DASH}"]
        for budget, cell in zip(budgets, cells, strict=True):
            gaps = [float(run["final_loss"]) - bf16[run["N"], budget] for run in own if run["D"] == budget]
            ends = [shown(each) for each in cell.split(" to ")]
            assert ends[0] == within(min(gaps), 4)
            assert ends[-1] == within(max(gaps), 4)


TOKENS = {"epoch_1": "72.1M", "epochs_4": "288M"}


def test_gaps_over_the_ladder() -> None:
    names = ("token-ladder/runs", "token-ladder/8m-four-epochs")
    groups: dict[tuple[str, str], Losses] = {}
    for name in names:
        groups |= ends(Archive(name))
    assert len(groups) == 4
    sizes = {"gpt_3m": "3.16M", "gpt_8m": "7.9M"}
    rows = table("token-ladder.md", "ladder " + " ".join(f"{name}.safetensors.xz" for name in names))
    for (model, variant), losses in groups.items():
        for recipe, gap in gaps(losses).items():
            (row,) = [
                each
                for each in rows
                if each["parameters, without embeddings"] == sizes[model] and each["recipe"] == recipe
            ]
            assert shown(row[f"gap to bf16, {TOKENS[variant]} tokens, nats"]) == within(gap, 4)
    assert len(rows) == len({(model, recipe) for (model, _), found in groups.items() for recipe, _ in found}) - 2


def over(series: Series, begin: int, end: int) -> list[float]:
    """Values of the iterations from ``begin`` to ``end``."""
    chosen: list[float] = series[1][(series[0] >= begin) & (series[0] <= end)].tolist()
    return chosen


def test_norms_of_late_growth() -> None:
    archive = Archive("late-growth/runs")
    norms, losses = archive.metrics(NORM), archive.metrics(TRAIN)
    rows = table("late-growth.md", "growth late-growth/runs.safetensors.xz 2000 3000 3400 3800 4000 4200 4400")
    assert {row["run"] for row in rows} == norms.keys()
    for row in rows:
        for end in (2000, 3000, 3400, 3800, 4000, 4200, 4400):
            window = over(norms[row["run"]], end - 199, end)
            assert len(window) == 200
            assert shown(row[f"gradient norm, {end:,}"]) == within(median(window), 2)
        loss = mean(over(losses[row["run"]], 4201, 4400))
        assert shown(row["training loss, nats, 4,400"]) == within(loss, 3)


def pairs(archives: str, left: str, right: str, *seeds: str) -> list[dict[str, float]]:
    """Left's losses less right's of each seed, by the row of the page's table, whose cells agree with them."""
    archive, windows = Archive(archives), (665, 798, 1330, 1463, 1995, 2128, 2659)
    training, validation = (
        {run.rpartition("/")[2]: series for run, series in archive.metrics(key).items()} for key in (TRAIN, LOSS)
    )
    scores = {
        path.split("/")[-2]: json.loads(text)["evaluations"][0]
        for path, text in archive.texts.items()
        if path.endswith("/evaluation.json")
    }
    rows = of_archives("pairs", archives, left, right, "133", *map(str, windows))
    cells = {row[f"{left} less {right}, nats"]: row for row in rows}
    found = []
    for seed in seeds:
        ours, theirs = (f"llama_30m-{label}-s{seed}" for label in (left, right))
        expected: dict[str, float] = {}
        for end in windows:
            means = [mean(over(training[run], end - 132, end)) for run in (ours, theirs)]
            expected[f"training, {end - 132:,} to {end:,}"] = means[0] - means[1]
        for iteration, *losses in zip(*validation[ours], validation[theirs][1], strict=True):
            expected[f"validation, {iteration:,}"] = losses[0] - losses[1]
        for text in ("enwiki-test", "docs-test", "WikiText"):
            expected[text] = by_text(scores[ours])[text]["loss"] - by_text(scores[theirs])[text]["loss"]
        assert cells.keys() == expected.keys()
        for name, difference in expected.items():
            assert shown(cells[name][f"seed {seed}"]) == within(difference, 4)
        found.append(expected)
    assert all(len(row) == 1 + len(seeds) for row in rows)
    return found


def test_pairs_of_both_roundings_and_bf16() -> None:
    of_roundings = pairs("stochastic-rounding/30m", "mxfp4_rht32_sr", "mxfp4_rht32", "1234", "1235")
    leads = [[value for name, value in each.items() if name.startswith("training")] for each in of_roundings]
    after_first = [each[-1] - each[0] for each in leads]
    at_starts = [sum(each[at + 1] - each[at] for at in (0, 2, 4)) for each in leads]
    all_runs = " ".join(f"stochastic-rounding/30m{name}" for name in ("", "-bf16", "-bf16-and-headroom", "-headroom"))
    of_bf16 = pairs(all_runs, "mxfp4_rht32", "bf16", "1234", "1235")
    of_headroom = pairs(all_runs, "mxfp4_rht_headroom", "mxfp4_rht32", "1234", "1235")
    of_published = pairs(all_runs, "mxfp4_rht32_sr", "mxfp4_rht_headroom", "1234", "1235")
    page = (RESULTS / "stochastic-rounding.md").read_text(encoding="utf-8")
    found = re.search(r"grows by ([\d.]+) and ([\d.]+) nats after the first epoch, and by ([\d.]+) and ([\d.]+)", page)
    assert found is not None
    assert [float(each) for each in found.groups()] == [within(each, 4) for each in (*after_first, *at_starts)]
    found = re.search(
        r"from it stochastic rounding ends (\S+) and (\S+) nats .* training text nearest is ([\d.]+) ahead", page
    )
    assert found is not None
    first, second, ahead = map(shown, found.groups())
    assert [first, second] == [within(each["validation, 2,659"], 4) for each in of_roundings]
    assert [ahead] * 2 == [within(each[-1], 3) for each in leads]
    found = re.search(r"Nearest's own gap to bf16 keeps within ([\d.]+) and ([\d.]+) nats", page)
    assert found is not None
    differences = [difference for each in of_bf16 for difference in each.values()]
    assert [float(each) for each in found.groups()] == [within(each(differences), 4) for each in (min, max)]
    nearest, behind, ahead, published = (
        mean(each["validation, 2,659"] for each in pair) for pair in (of_bf16, of_roundings, of_headroom, of_published)
    )
    found = re.search(r"on average ([\d.]+) nats above bf16 .* its factor 3/4 ([\d.]+): ([\d.]+) apart", page)
    assert found is not None
    assert [float(each) for each in found.groups()] == [
        within(each, 4) for each in (nearest + behind, nearest + ahead, published)
    ]
    found = re.search(r"saturates and ends ([\d.]+) above bf16", page)
    assert found is not None
    assert float(found[1]) == within(nearest, 4)
    found = re.search(
        r"gains ([\d.]+) nats .* first epoch, ([\d.]+) of the last, ([\d.]+) on validation text, ([\d.]+) on WikiText",
        page,
    )
    assert found is not None
    at = ("training, 533 to 665", "training, 2,527 to 2,659", "validation, 2,659", "WikiText")
    assert [float(each) for each in found.groups()] == [within(-mean(e[name] for e in of_headroom), 4) for name in at]


def test_gaps_in_training_over_those_on_validation_text() -> None:
    archive = Archive("token-ladder/8m-four-epochs")
    training, validation = (
        {run.rpartition("/")[2]: series for run, series in archive.metrics(key).items()} for key in (TRAIN, LOSS)
    )
    excess = []
    for recipe in ("mxfp4_rht_sr", "mxfp4_rht"):
        for seed in (1234, 1235):
            ours, bf16 = (f"gpt_8m-{name}-epochs_4-s{seed}" for name in (recipe, "bf16"))
            in_training = mean(over(training[ours], 7701, 8800)) - mean(over(training[bf16], 7701, 8800))
            excess.append(in_training - float(validation[ours][1][-1] - validation[bf16][1][-1]))
    page = (RESULTS / "stochastic-rounding.md").read_text(encoding="utf-8")
    found = re.search(r"validation text by ([\d.]+) and ([\d.]+) nats, nearest's by ([\d.]+) and (\d\.\d+)", page)
    assert found is not None
    assert [float(each) for each in found.groups()] == [within(each, 4) for each in excess]


@pytest.mark.parametrize(("name", "title"), [("tiny_runs", "# "), ("runs", "\n## Small")])
def test_gaps_of_paper_table2(name: str, title: str) -> None:
    page = (RESULTS / "paper-table2.md").read_text(encoding="utf-8")
    (losses,) = ends(Archive(f"paper-table2/{name}")).values()
    lines = page.partition(title)[2].partition("```text\n")[2].partition("```")[0].splitlines()
    rows = {cells[0]: cells for cells in (re.split(r"\s{2,}", line) for line in lines)}
    for recipe, gap in gaps(losses).items():
        own = [loss for (each, _), loss in losses.items() if each == recipe]
        numbers = [shown(cell) for cell in rows[recipe] if re.fullmatch(r"[+\N{MINUS SIGN}]?\d+\.\d{4}", cell)]
        assert within(gap, 4) in numbers
        assert within(mean(own), 4) in numbers
        assert within(stdev(own), 4) in numbers


ONE_MACHINE = (1242, 1244, 1245)


@pytest.mark.parametrize(
    ("file", "seeds"),
    [("evaluations-25m", range(1234, 1238)), ("evaluations-25m-one-machine", ONE_MACHINE)],
)
def test_scores_of_mxfp8_operands_at_25m(file: str, seeds: Sequence[int]) -> None:
    scores = json.loads((RESULTS / f"mxfp8-operands/{file}.json").read_text())["scores"]
    losses = {
        (each["evaluated"], each["seed"]): each["loss"]
        for each in scores
        if (each["trained"], each["text"]) == ("forward_input", "enwiki-test")
    }
    differences = [losses["mxfp8_input", seed] - losses["bf16", seed] for seed in seeds]
    (row,) = [
        row
        for row in table("mxfp8-operands.md", f"scores mxfp8-operands/{file}.json")
        if (row["trained under"], row["scored under"], row["text"]) == ("forward_input", "mxfp8_input", "enwiki-test")
    ]
    assert shown(row["less bf16's score, nats"]) == within(mean(differences), 4)
    assert shown(row["smallest"]) == within(min(differences), 4)
    assert shown(row["largest"]) == within(max(differences), 4)
