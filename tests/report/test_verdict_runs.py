"""Which runs a verdict compares: groups, seeds, full decays, and runs that diverged or stopped."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.report.verdict import Held, Outcome, judge_all
from tests.report.judging import claims, gap_is, groups, judged
from tests.report.synthetic import add_cells, cell, write_run, write_sweep


def test_claims_without_runs_are_not_tested(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7})
    verdict = judged(claims(tmp_path, gap_is()), sweep)
    assert (verdict.outcome, verdict.group) == (Outcome.NOT_TESTED, None)
    assert verdict.findings[0].words == "no run of mxfp4"


def test_missing_recipes_are_those_of_the_nearest_group(tmp_path: Path) -> None:
    neither = write_run(tmp_path / "neither", "mxfp8", 1, options={"global_batch_size": 7})
    mxfp4 = write_run(tmp_path / "mxfp4", "mxfp4", 1)
    verdict = judged(claims(tmp_path, gap_is()), neither, mxfp4)
    assert (verdict.outcome, verdict.group) == (Outcome.NOT_TESTED, None)
    name = groups(neither, mxfp4)[1].name
    assert [finding.words for finding in verdict.findings] == [f"no run of bf16 among {name}"]


def test_recipes_of_different_groups_are_not_compared(tmp_path: Path) -> None:
    a = write_sweep(tmp_path / "a", {"bf16": 3.7})
    b = write_sweep(tmp_path / "b", {"mxfp4": 3.9}, options={"lr": 3e-4})
    verdict = judged(claims(tmp_path, gap_is()), a, b)
    assert (verdict.outcome, verdict.group) == (Outcome.UNPAIRED, None)
    assert "are not compared: lr 0.0003 and 0.001; train both with equal" in verdict.findings[0].words


def test_seeds_of_one_recipe_count_for_nothing(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp4": 3.8, "mxfp8": 3.7})
    for seed in (7, 8):  # far off, and of no partner
        write_run(sweep / f"mxfp4-s{seed}", "mxfp4", seed, 9.0)
        add_cells(sweep, "synthetic", [cell("mxfp4", seed)])
    (finding,) = judged(claims(tmp_path, gap_is()), sweep).findings
    assert finding.measured == pytest.approx(0.1, abs=0.006)
    assert "seeds as blocks, 3 and 3 seeds" in finding.words


def test_a_recipe_with_few_seeds_is_compared_with_all_of_the_reference(tmp_path: Path) -> None:
    """Seed 1 is a low draw of bf16's noise: over the pairs alone the gap would be its 0.04."""
    finals = {
        "bf16": [3.66, *[3.70 + 0.001 * seed for seed in range(5)]],
        "mxfp8": [3.70 + 0.001 * s for s in range(6)],
    }
    sweep = write_sweep(tmp_path / "sweep", finals | {"mxfp4": [3.70]})
    (finding,) = judged(claims(tmp_path, gap_is()), sweep).findings
    # bf16's mean is 3.6953; the seed's effect is -0.00983, the mean of bf16's and mxfp8's less that of all six seeds
    design = {"bf16": finals["bf16"], "mxfp8": finals["mxfp8"]}
    of_all = {label: sum(values) / 6 for label, values in design.items()}
    effect = sum(values[0] - of_all[label] for label, values in design.items()) / 2
    assert finding.measured == pytest.approx(3.70 - effect - of_all["bf16"])
    assert "seeds as blocks, 1 and 6 seeds, 5 degrees of freedom" in finding.words


def test_a_recipe_of_other_seeds_takes_no_verdict_away(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp4": 3.8, "mxfp8": 3.7})
    apart = write_run(tmp_path / "apart", "fp8_delayed", 99, 3.7)
    alone, beside = judged(claims(tmp_path, gap_is()), sweep), judged(claims(tmp_path, gap_is()), sweep, apart)
    assert beside.outcome is alone.outcome is Outcome.REPRODUCED_AT_THIS_SCALE
    assert beside.findings[0].interval == pytest.approx(alone.findings[0].interval)


def test_a_recipe_that_scatters_needs_pairs_of_its_own(tmp_path: Path) -> None:
    quiet = [3.70, 3.71, 3.72, 3.73, 3.70, 3.69, 3.71, 3.72]
    wild = [loss + 0.1 * sign for loss, sign in zip(quiet, (1, -1, 1, -1, 2, -2, 1, -1))]
    finals = {
        "bf16": quiet[:4],
        "mxfp8": quiet,
        "fp8_delayed": [loss + 0.001 * (i % 3) for i, loss in enumerate(quiet)],
    }
    sweep = write_sweep(tmp_path / "sweep", finals | {"mxfp4": wild})
    for seed in (1, 2, 3):  # of bf16's it shares the fourth
        shutil.rmtree(sweep / f"mxfp4-s{seed}")
    (finding,) = judged(claims(tmp_path, gap_is()), sweep).findings
    assert (finding.held, finding.seeds) == (Held.OPEN, 2)
    assert "(1 and 1 seeds; a recipe that scatters more needs two pairs of its own)" in finding.words
    assert "train two shared seeds or more" in finding.words


def pair(tmp_path: Path, seeds: tuple[int, int] = (1, 1), **theirs: Any) -> list[Path]:
    """Two runs of bf16 and mxfp4, of which the second's options differ."""
    for at in range(2):
        write_run(tmp_path / f"a{at}", "bf16", seeds[0] + at, 3.7 + 0.01 * at)
        write_run(tmp_path / f"b{at}", "mxfp4", seeds[1] + at, 3.8 + 0.011 * at, options=theirs)
    return sorted(path for path in tmp_path.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    ("seeds", "options", "words"),
    [
        ((1, 11), {}, "no shared seed: mxfp4 has seeds 11, 12, bf16 has seeds 1, 2; train both with the same seeds"),
        (
            (1, 1),
            {"tensor_model_parallel_size": 2},
            "tensor_model_parallel_size differs at seed 1: 2 (mxfp4) and 1 (bf16)",
        ),
        ((1, 1), {"transformer_impl": "transformer_engine"}, "transformer_impl differs at seed 1"),
    ],
)
def test_unpaired_runs_are_refused(tmp_path: Path, seeds: tuple[int, int], options: dict[str, Any], words: str) -> None:
    verdict = judged(claims(tmp_path, gap_is()), *pair(tmp_path, seeds, **options))
    assert verdict.outcome is Outcome.UNPAIRED
    assert verdict.findings[0].held is Held.UNPAIRED
    assert words in verdict.findings[0].words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr_decay_style": "constant"}, "no full decay: lr_decay_style is constant"),
        ({"lr_decay_style": "cosine", "lr_decay_iters": 800}, "decays over 51,200 samples, the run has 25,600"),
        ({"lr_decay_style": "cosine", "lr_decay_samples": 25_601}, "decays over 25,601 samples, the run has 25,600"),
        ({"lr_decay_style": "cosine", "lr_decay_iters": 400}, None),
        ({"lr_decay_style": "linear", "lr_decay_iters": 300}, None),  # stays at its minimum
        ({"lr_decay_style": "WSD"}, None),
    ],
)
def test_a_claim_needs_full_decay(tmp_path: Path, options: dict[str, Any], words: str | None) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp4": 3.9, "mxfp8": 3.7}, options=options)
    verdict = judged(claims(tmp_path, gap_is()), sweep)
    assert verdict.outcome is (Outcome.REPRODUCED_AT_THIS_SCALE if words is None else Outcome.UNPAIRED)
    assert words is None or words in verdict.findings[0].words


def test_each_group_has_its_own_verdict(tmp_path: Path) -> None:
    a = write_sweep(tmp_path / "a", {"bf16": 3.7, "mxfp4": 3.9, "mxfp8": 3.7})
    b = write_sweep(tmp_path / "b", {"bf16": 3.7, "mxfp4": 3.7, "mxfp8": 3.7}, options={"lr": 3e-4})
    outcomes = [verdict.outcome for verdict in judge_all(claims(tmp_path, gap_is()), groups(a, b))]
    assert outcomes == [Outcome.REPRODUCED_AT_THIS_SCALE, Outcome.NOT_AT_THIS_SCALE]


def diverging(tmp_path: Path, finished: int, diverged: int, label: str = "mxfp4", gap: float = 0.0) -> Path:
    others = {"bf16": 3.7, "mxfp4": 3.7 + gap, "mxfp8": 3.7}
    sweep = write_sweep(tmp_path / "sweep", {name: final for name, final in others.items() if name != label})
    for seed in range(1, finished + diverged + 1):
        final = others[label] + 0.001 * seed
        write_run(sweep / f"{label}-s{seed}", label, seed, final, nan_from=200 if seed > finished else None)
        add_cells(sweep, "synthetic", [cell(label, seed)])
    return sweep


@pytest.mark.parametrize(
    ("finished", "diverged", "relation", "outcome"),
    [
        (0, 2, "above", Outcome.REPRODUCED_AT_THIS_SCALE),  # beyond any gap
        (0, 2, "at_most", Outcome.NOT_AT_THIS_SCALE),
        (0, 2, "within", Outcome.NOT_AT_THIS_SCALE),
        (0, 1, "above", Outcome.OPEN),  # may be chance
        (2, 1, "above", Outcome.OPEN),  # those that finished show none, the other may be anything above
        (2, 1, "at_most", Outcome.OPEN),
    ],
)
def test_runs_that_diverge_count(tmp_path: Path, finished: int, diverged: int, relation: str, outcome: Outcome) -> None:
    verdict = judged(claims(tmp_path, gap_is(relation)), diverging(tmp_path, finished, diverged))
    assert verdict.outcome is outcome
    assert "diverged" in verdict.findings[0].words
    assert "seeds are needed" not in verdict.findings[0].words


def test_a_gap_among_the_survivors_is_only_larger_for_the_diverged(tmp_path: Path) -> None:
    verdict = judged(claims(tmp_path, gap_is()), diverging(tmp_path, 2, 1, gap=0.2))
    assert verdict.outcome is Outcome.REPRODUCED_AT_THIS_SCALE
    assert verdict.findings[0].interval is not None
    assert verdict.findings[0].interval[1] == math.inf
    assert "1 of mxfp4 diverged" in verdict.findings[0].words


def test_a_reference_that_diverged_decides_nothing(tmp_path: Path) -> None:
    sweep = diverging(tmp_path, 0, 3, label="bf16", gap=0.2)
    for relation in ("above", "at_most", "within"):
        verdict = judged(claims(tmp_path, gap_is(relation)), sweep)
        assert verdict.outcome is Outcome.OPEN


def test_divergence_on_both_sides_decides_nothing(tmp_path: Path) -> None:
    """All of the one and most of the other: a gap is no more known than where one run of each had survived."""
    sweep = diverging(tmp_path, 0, 3)
    for seed in (4, 5):
        write_run(sweep / f"bf16-s{seed}", "bf16", seed, 3.7, nan_from=200)
        add_cells(sweep, "synthetic", [cell("bf16", seed)])
    for relation in ("above", "at_most", "within"):
        verdict = judged(claims(tmp_path, gap_is(relation)), sweep)
        assert verdict.outcome is Outcome.OPEN
    assert "diverged (3), and so did 2 of bf16" in verdict.findings[0].words


def test_runs_that_only_stopped_are_no_evidence(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7})
    write_run(sweep / "mxfp4-s1", "mxfp4", 1, 3.9, ends_at=300)
    add_cells(sweep, "synthetic", [cell("mxfp4", 1)])
    verdict = judged(claims(tmp_path, gap_is()), sweep)
    assert verdict.outcome is Outcome.NOT_TESTED
    assert verdict.findings[0].words == "no run of mxfp4 came far enough"
