"""Tables of training runs, from archives, reports and published ladders:

    published FILE GROUP ...       gaps to bf16 of a published ladder's groups, by size and budget
    rounding FILE GROUP            gaps to bf16 of a published ladder's group with nearest and with stochastic rounding
    quality FILE ...               the main table of tools/report.py on archives of runs, of all groups
    claims FILE ... N ...          what archives' runs measure of claims, and the verdicts: of these groups, or of all
    ladder FILE ...                the table of gaps by model and budget of archives' runs
    outputs FILE                   its table of the errors of GEMM outputs
    norms FILE ... N               the table of the gradient norms of the N-th group of archives' runs
    last_fifth FILE ...            training loss and gradient norm beside bf16's, in the last fifth of each run
    validations FILE ...           each run's validation losses less those of bf16's run of the same seed
    pairs FILE ... LEFT RIGHT COUNT ITERATION ...  left's losses less right's by seed: training over COUNT iterations
                                   to each, each validation, and texts
    texts FILE ...                 losses of archives' checkpoints by text, less those of bf16's checkpoints
    growth FILE ITERATION ...      gradient norm and training loss of an archive's runs, over 200 iterations to each
    weights FILE TENSOR ITERATION ...  rms of a tensor in each layer, of runs whose sizes tools/weight_norms.py has read
    scores FILE                    losses of checkpoints under several recipes, by text

A FILE is beside the page.
"""

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import mean

import yaml

from megatron_lowprec.report.amounts import DASH, amount, signed
from megatron_lowprec.report.archives.container import read
from megatron_lowprec.report.build import Report, build
from megatron_lowprec.report.claims import CLAIMS, load_claims
from megatron_lowprec.report.curve import Status
from megatron_lowprec.report.operand_tables import of_outputs
from megatron_lowprec.report.published.ladder import gap_ladder, read_ladder
from megatron_lowprec.report.runs import find_runs, text_names
from megatron_lowprec.report.tables import Table, all_groups, gradient_norms, quality
from megatron_lowprec.report.tables import claims as claims_table
from megatron_lowprec.shipped import find
from megatron_lowprec.sweep.jobs import EVALUATION
from tools.plot_growth import windows
from tools.tables.pages import Row, data_of


def _rounding(page: Path, name: str, group: str) -> Iterator[Row]:
    yield "parameters", "tokens a parameter", "nearest, nats", "stochastic, nats", "nearest less stochastic, nats"
    runs = read_ladder(find(name))
    for parameters in sorted({run.parameters for run in runs if run.group == group}):
        nearest, stochastic = (
            gap_ladder(runs, parameters, group=group, bstochastic=each) for each in ("False", "True")
        )
        for (ratio, left), (other, right) in zip(nearest, stochastic, strict=True):
            assert ratio == other, f"{group}: runs of {ratio} and {other} tokens a parameter have no partner"
            yield amount(parameters), f"{ratio:.0f}", *(signed(each, 4) for each in (left, right, left - right))


def _published(page: Path, name: str, *groups: str) -> Iterator[Row]:
    runs = read_ladder(find(name))
    found: dict[tuple[int, str, int], list[float]] = {}
    for run in runs:
        budget = 25 * 2 ** round(math.log2(run.tokens_per_parameter / 25))  # theirs are within 4% of it
        found.setdefault((run.parameters, run.group, budget), []).append(run.gap)
    budgets = sorted({budget for _, group, budget in found if group in groups})
    yield "parameters", "group", *(f"gap at {budget} tokens a parameter, nats" for budget in budgets)
    for parameters in sorted({run.parameters for run in runs}):
        for group in groups:
            gaps = [found.get((parameters, group, budget), []) for budget in budgets]
            if any(gaps):
                yield amount(parameters), group, *(_range(each) for each in gaps)


def _range(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(signed(end, 4) for end in (min(values), max(values)))) if values else DASH


def _quality(page: Path, *names: str) -> Iterator[Row]:
    """Without tokens/s, since the studies' runs share GPUs, and without recipes of which no run has ended."""
    report = _report(*(page.parent / name for name in names))
    confidence = report.claims.rules.confidence
    if len(report.groups) > 1:
        found = all_groups(report.groups, report.fits, confidence)
    else:
        (group,) = report.groups
        found = quality(group, report.fits[group.name], confidence)
    head, *rows = _rows(found)
    kept = [at for at, column in enumerate(head) if not column.startswith("throughput")]
    seeds = head.index("seeds, finished")
    yield from ([row[at] for at in kept] for row in (head, *rows) if not row[seeds].startswith("0 of "))


def _ladder(page: Path, *names: str) -> Iterator[Row]:
    table = _report(*(page.parent / name for name in names)).gap_table()
    assert table is not None, f"{' '.join(names)}: no model has two budgets"
    return _rows(table)


def _claims(page: Path, *words: str) -> Iterator[Row]:
    names = [word for word in words if not word.isdecimal()]
    report = _report(*(page.parent / name for name in names))
    groups = [report.groups[int(word) - 1] for word in words if word.isdecimal()] or report.groups
    verdicts = [verdict for group in groups for verdict in report.verdicts if verdict.group is group]
    table = claims_table(verdicts, report.claims.rules.confidence)
    assert table is not None, f"{' '.join(names)}: no run has the recipes of a claim"
    return _rows(table)


def _outputs(page: Path, name: str) -> Iterator[Row]:
    report = _report(page.parent / name)
    (group,) = report.groups
    table = of_outputs(report.snapshots[group.name])
    assert table is not None, f"{name}: no run has recorded outputs"
    return _rows(table)


def _norms(page: Path, *words: str) -> Iterator[Row]:
    *names, number = words
    table = gradient_norms(_report(*(page.parent / name for name in names)).groups[int(number) - 1])
    assert table is not None, f"{' '.join(names)}: no run has recorded gradient norms"
    return _rows(table)


def _last_fifth(page: Path, *names: str) -> Iterator[Row]:
    (group,) = _report(*(page.parent / name for name in names)).groups
    assert not group.repeated(), f"{' '.join(names)}: a seed is repeated"
    losses = group.training_losses(0.8, 1.0)
    finished = [run for label in group.finished for run in group.of(label, Status.FINISHED)]
    norms = {(run.label, run.block): run.norms_by_fifth[-1] for run in finished}
    seeds = [run.block for run in group.of(group.reference, Status.FINISHED)]
    columns = ("training loss less bf16's, nats", "gradient norm over bf16's")
    yield "recipe", *(f"{column}, seed {seed}" for column in columns for seed in seeds)
    for label in group.compared:
        pairs = [((label, seed), (group.reference, seed)) for seed in seeds]
        yield (
            label,
            *(signed(losses[ours] - losses[theirs], 4) if ours in losses else DASH for ours, theirs in pairs),
            *(f"{norms[ours] / norms[theirs]:.3f}" if ours in norms else DASH for ours, theirs in pairs),
        )


def _validations(page: Path, *names: str) -> Iterator[Row]:
    (group,) = _report(*(page.parent / name for name in names)).groups
    curves = {(run.label, run.block): run.curve.validation for run in group.runs if run.curve}
    iterations = curves[group.labels[0], group.runs[0].block][0]
    yield "recipe", "seed", *(f"less bf16's, nats, iteration {at:,}" for at in iterations)
    for label in group.compared:
        for run in group.of(label, Status.FINISHED):
            differences = curves[label, run.block][1] - curves[group.reference, run.block][1]
            yield label, str(run.seed), *(signed(each, 4) for each in differences)


def _pairs(page: Path, *words: str) -> Iterator[Row]:
    names = [word for word in words if word.endswith(".xz")]
    left, right, count, *iterations = words[len(names) :]
    (group,) = _report(*(page.parent / name for name in names)).groups
    curves = {(run.label, run.block): run.curve for run in group.runs if run.curve}
    runs = [run for run in group.of(left, Status.FINISHED) if {(left, run.block), (right, run.block)} <= curves.keys()]
    pairs = [(curves[left, run.block], curves[right, run.block]) for run in runs]
    yield f"{left} less {right}, nats", *(f"seed {run.block}" for run in runs)
    for end in map(int, iterations):
        rows = slice(end - int(count), end)
        for curve in (curve for pair in pairs for curve in pair):
            assert list(curve.train[0][rows]) == list(range(rows.start + 1, end + 1)), "iterations are missing"
        found = [float((ours.train[1][rows] - theirs.train[1][rows]).mean()) for ours, theirs in pairs]
        yield f"training, {rows.start + 1:,} to {end:,}", *(signed(each, 4) for each in found)
    for at, iteration in enumerate(pairs[0][0].validation[0]):
        assert {curve.validation[0][at] for pair in pairs for curve in pair} == {iteration}
        found = [ours.validation[1][at] - theirs.validation[1][at] for ours, theirs in pairs]
        yield f"validation, {iteration:,}", *(signed(each, 4) for each in found)
    recipes = [group.of(label, Status.FINISHED)[0].record["recipe"] for label in (left, right)]
    numbers = [run.options["seed"] for run in runs]
    scores = _scores_of_texts([page.parent / name for name in names])
    for text in dict.fromkeys(text for text, *_ in scores):
        ours, theirs = (scores[text, recipe, recipe] for recipe in recipes)
        yield text, *(signed(ours[number][0] - theirs[number][0], 4) for number in numbers)


def _texts(page: Path, *names: str) -> Iterator[Row]:
    scores = _scores_of_texts([page.parent / name for name in names])
    order = list(dict.fromkeys(text for text, *_ in scores))
    yield (
        *("text", "trained under", "scored under", "seeds", "loss, nats", "bits a byte"),
        *("less bf16's, nats", "smallest", "largest", "less bf16's, bits a byte"),
    )
    for (text, trained, evaluated), found in sorted(scores.items(), key=lambda each: order.index(each[0][0])):
        bf16 = scores[text, "bf16", "bf16"]
        loss, bits = (mean(each[at] for each in found.values()) for at in (0, 1))
        gaps, of_bits = ([each[at] - bf16[seed][at] for seed, each in found.items()] for at in (0, 1))
        beside = signed(mean(gaps), 4), signed(min(gaps), 4), signed(max(gaps), 4), signed(mean(of_bits), 4)
        yield text, trained, evaluated, str(len(found)), f"{loss:.4f}", f"{bits:.4f}", *beside


def _scores_of_texts(archives: Sequence[Path]) -> dict[tuple[str, str, str], dict[int, tuple[float, float]]]:
    """(text, recipe of the run, of the score) -> seed -> nats a token and bits a byte."""
    texts = {path: text for archive in archives for path, text in read(archive).texts.items()}
    scores: dict[tuple[str, str, str], dict[int, tuple[float, float]]] = {}
    for path in (path for path in texts if Path(path).name == EVALUATION):
        seed = yaml.safe_load(texts[f"{Path(path).parent}/config.yaml"])["options"]["seed"]
        for each in json.loads(texts[path])["evaluations"]:
            by_name = dict(zip(text_names(list(each["data"])), each["data"].values(), strict=True))
            for text, score in (by_name | {"WikiText": each["wikitext"]}).items():
                found = scores.setdefault((text, each["trained_under"], each["recipe"]), {})
                found[seed] = score["loss"], score["bits_per_byte"]
    return scores


def _growth(page: Path, name: str, *iterations: str) -> Iterator[Row]:
    yield (
        "run",
        *(f"gradient norm, {int(at):,}" for at in iterations),
        f"training loss, nats, {int(iterations[-1]):,}",
    )
    for run, found in windows(page.parent / name).items():
        last = found.losses[int(iterations[-1])]
        yield run, *(f"{found.norms[int(at)]:.2f}" for at in iterations), f"{last:.3f}"


def _weights(page: Path, name: str, tensor: str, *iterations: str) -> Iterator[Row]:
    content = data_of(page, name)
    layers = range(1, len(next(iter(next(iter(content.values())).values()))[tensor]["rms"]) + 1)
    yield "run", *(f"layer {layer}, {int(at):,}" for layer in layers for at in iterations)
    for run, found in content.items():
        rows = [found[at][tensor]["rms"] if at in found else None for at in iterations]
        yield run, *("–" if row is None else f"{row[layer - 1]:.3f}" for layer in layers for row in rows)


def _scores(page: Path, name: str) -> Iterator[Row]:
    content = data_of(page, name)
    scores = content["scores"]
    bf16 = {(s["trained"], s["seed"], s["text"]): s["loss"] for s in scores if s["evaluated"] == "bf16"}
    yield (
        *("trained under", "scored under", "text", "checkpoints", "loss, nats", "bits a byte"),
        *("less bf16's score, nats", "smallest", "largest"),
    )
    named = sorted({(s["trained"], s["text"], s["evaluated"]) for s in scores}, key=lambda each: each[:2])
    order = list(dict.fromkeys(s["evaluated"] for s in scores))
    for trained, text, evaluated in sorted(named, key=lambda each: (each[0], each[1], order.index(each[2]))):
        chosen = [s for s in scores if (s["trained"], s["evaluated"], s["text"]) == (trained, evaluated, text)]
        losses = [s["loss"] for s in chosen]
        differences = [s["loss"] - bf16[key] for s in chosen if (key := (trained, s["seed"], text)) in bf16]
        bits = sum(losses) / len(losses) * chosen[0]["tokens"] / content["bytes"][text] / math.log(2)
        beside = [sum(differences) / len(differences), min(differences), max(differences)] if differences else []
        yield (
            *(trained, evaluated, text, str(len(chosen)), f"{sum(losses) / len(losses):.4f}", f"{bits:.4f}"),
            *([signed(value, 4) for value in beside] or ["–"] * 3),
        )


@cache
def _report(*archives: Path) -> Report:
    claims = load_claims(CLAIMS)
    with tempfile.TemporaryDirectory() as scratch:
        runs, notes = find_runs([str(archive) for archive in archives], claims.rules.diverged_rise, Path(scratch))
        return build(runs, notes, claims, "bf16", archives[0].name)


def _rows(table: Table) -> Iterator[Row]:
    yield [column.replace("\n", ", ") for column in table.columns]
    yield from table.rows


TABLES: dict[str, Callable[..., Iterator[Row]]] = {
    "published": _published,
    "rounding": _rounding,
    "quality": _quality,
    "claims": _claims,
    "ladder": _ladder,
    "outputs": _outputs,
    "norms": _norms,
    "last_fifth": _last_fifth,
    "validations": _validations,
    "pairs": _pairs,
    "texts": _texts,
    "growth": _growth,
    "weights": _weights,
    "scores": _scores,
}
