"""A test of a claim by its interval: thresholds, spread, seeds that it needs, and its quantities."""

import math
import re
from pathlib import Path

import pytest

from megatron_lowprec.report import tables
from megatron_lowprec.report.statistics import Fit
from megatron_lowprec.report.verdict import Held, Outcome, decide
from tests.report.judging import NEAR, claims, gap_is, groups, judged
from tests.report.synthetic import add_cells, cell, write_run, write_sweep


def test_a_direction_within_the_smallest_difference_fails(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp4": 3.704, "mxfp8": 3.7}, scatter=0.0003)
    found = {
        smallest: judged(claims(tmp_path, gap_is("above", 0.0), smallest=smallest, scale=NEAR), sweep)
        for smallest in (0.001, 0.01)
    }
    assert found[0.001].outcome is Outcome.REPRODUCED
    assert found[0.01].outcome is Outcome.CONTRADICTED
    assert "fails, within the smallest difference that matters, 0.01 nats a token" in found[0.01].findings[0].words


def test_an_open_claim_has_the_number_of_seeds_that_it_needs(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp4": 3.703, "mxfp8": 3.7}, scatter=0.006)
    test, few = gap_is("within", 0.005), gap_is("at_most", 0.003)
    verdict = judged(claims(tmp_path, test, smallest=0.005), sweep)
    (finding,) = verdict.findings
    needed = int(re.search(r"(\d+) shared seeds are needed to resolve 0.005 nats a token", finding.words)[1])  # type: ignore[index]
    sigma = Fit(groups(sweep)[0].final_losses(), 0.95).sigma
    assert needed == pytest.approx(2 * ((1.96 + 1.28) * sigma / 0.005) ** 2, abs=2.5)  # normal approximation
    assert verdict.outcome is Outcome.OPEN
    assert "over 1,000 shared seeds" in judged(claims(tmp_path, few, smallest=1e-5), sweep).findings[0].words
    single = write_sweep(tmp_path / "single", {"bf16": [3.7], "mxfp4": [3.8]})
    (finding,) = judged(claims(tmp_path, test, smallest=0.005), single).findings
    assert "train two shared seeds or more to learn how many resolve 0.005 nats" in finding.words
    close = write_sweep(tmp_path / "close", {"bf16": 3.7, "mxfp4": 3.73, "mxfp8": 3.7}, scatter=0.001)
    (finding,) = judged(claims(tmp_path, gap_is("at_most"), smallest=0.03), close).findings
    assert finding.held is Held.OPEN
    assert "2 shared seeds resolve 0.03 nats a token at the measured spread, but" in finding.words


def test_one_seed_resolves_nothing_but_beyond_a_prior(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": [3.7], "mxfp4": [3.8]})
    verdict = judged(claims(tmp_path, gap_is()), sweep)
    assert verdict.outcome is Outcome.OPEN
    assert "of unknown uncertainty (1 and 1 seeds; no recipe has two to pair)" in verdict.findings[0].words
    small = {"validation_loss": 0.005, "training_loss": None, "source": "a guess"}
    found = judged(claims(tmp_path, gap_is(), prior_noise=small), sweep)
    assert found.outcome is Outcome.REPRODUCED_AT_THIS_SCALE
    assert "a prior standard deviation" in found.findings[0].words
    large = {**small, "validation_loss": 0.1}
    assert judged(claims(tmp_path, gap_is(), prior_noise=large), sweep).outcome is Outcome.OPEN


def test_copies_are_no_seeds(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": [3.7, 3.7], "mxfp4": [3.9, 3.9]})
    verdict = judged(claims(tmp_path, gap_is()), sweep)
    assert verdict.outcome is Outcome.OPEN
    assert "equal to the last bit" in verdict.findings[0].words


@pytest.mark.parametrize(("apart", "words"), [(0.0, "equal bit for bit"), (0.0625, "equally far apart")])
def test_recipes_that_seeds_do_not_tell_apart_are_no_copies(tmp_path: Path, apart: float, words: str) -> None:
    seeds = [3.5, 3.625, 3.75, 3.875, 4.0]
    sweep = write_sweep(tmp_path / "sweep", {"bf16": seeds, "mxfp4": [each + apart for each in seeds]})
    verdict = judged(claims(tmp_path, gap_is("within", 0.03)), sweep)
    (finding,) = verdict.findings
    assert (finding.held, finding.seeds, finding.seeds_alone) == (Held.OPEN, None, None)
    assert f"of unknown uncertainty (5 and 5 seeds; {words} under each)" in finding.words
    assert finding.words.endswith("; more seeds would show the same")
    (group,) = groups(sweep)
    assert tables.resolution(group, Fit(group.final_losses(), 0.95), 0.95) == [
        f"Under every seed mxfp4 and bf16 are {words}. No noise is left to measure, and more seeds would show the same."
    ]


def test_a_threshold_is_shown_in_full(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": [3.5, 3.6, 3.7], "mxfp4": [3.5018, 3.60181, 3.7018]})
    verdict = judged(claims(tmp_path, gap_is("at_most", 0.0015)), sweep)
    assert verdict.findings[0].words.endswith("at most 0.0015: fails")
    assert verdict.margin.startswith("at most 0.0015 nats a token")


def test_a_slow_start_is_seen_in_the_training_loss(tmp_path: Path) -> None:
    slow = gap_is("above", 0.0, quantity="training_loss", over=[0.05, 0.2])
    caught_up = gap_is("at_most", 0.01)
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp8": 3.7}, scatter=0.001)
    for seed in (1, 2, 3):
        final = 3.7 + 0.001 * seed
        write_run(sweep / f"mxfp4-s{seed}", "mxfp4", seed, final, early=0.3)
        add_cells(sweep, "synthetic", [cell("mxfp4", seed)])
    found = claims(tmp_path, slow, gap_is("above", 0.0, quantity="training_loss", over=[0.9, 1.0]))
    early, late = judged(found, sweep).findings
    assert early.held is Held.YES
    assert early.measured == pytest.approx(0.1, abs=0.06)
    assert late.held is not Held.YES
    assert judged(claims(tmp_path, slow, caught_up), sweep).findings[1].test.over is None


def test_perplexity_is_the_exponential(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp4": 3.75, "mxfp8": 3.7}, scatter=1e-4, shared=0.0)
    percent = gap_is("above", 1.0, quantity="perplexity_percent")
    absolute = gap_is("above", 1.0, quantity="perplexity")
    first, second = (judged(claims(tmp_path, test), sweep).findings[0] for test in (percent, absolute))
    assert first.measured == pytest.approx(100 * math.expm1(0.05), abs=0.03)
    assert second.measured == pytest.approx(math.exp(3.75) - math.exp(3.7), abs=0.02)


inf = math.inf


@pytest.mark.parametrize(
    ("relation", "threshold", "interval", "held"),
    [
        ("above", 0.0, (0.001, 0.01), Held.YES),
        ("above", 0.0, (0.0, 0.01), Held.OPEN),
        ("above", 0.0, (-0.01, 0.0), Held.NO),
        ("above", 0.0, (inf, inf), Held.YES),
        ("above", 0.0, (0.1, inf), Held.YES),
        ("above", 0.0, (-0.1, inf), Held.OPEN),
        ("below", 0.0, (-0.01, -0.001), Held.YES),
        ("below", 0.0, (0.0, 0.1), Held.NO),
        ("below", 0.0, (inf, inf), Held.NO),
        ("at_most", 0.03, (-inf, 0.03), Held.YES),
        ("at_most", 0.03, (0.031, inf), Held.NO),
        ("within", 0.5, (-0.5, 0.5), Held.YES),
        ("within", 0.5, (-0.6, 0.5), Held.OPEN),
        ("within", 0.5, (-0.9, -0.6), Held.NO),
        *[(relation, 0.1, (-inf, inf), Held.OPEN) for relation in ("above", "below", "at_most", "within")],
    ],
)
def test_outcomes_by_interval(relation: str, threshold: float, interval: tuple[float, float], held: Held) -> None:
    assert decide(relation, threshold, interval) is held


@pytest.mark.parametrize(
    ("relation", "threshold", "interval", "held"),
    [
        ("above", 0.0, (0.001, 0.009), Held.NO),  # equivalent, whatever the sign
        ("above", 0.0, (-0.009, 0.009), Held.NO),
        ("below", 0.0, (-0.009, -0.001), Held.NO),
        ("above", 0.0, (0.001, 0.011), Held.YES),
        ("above", 0.0, (-0.001, 0.011), Held.OPEN),
        ("above", 0.02, (0.021, 0.022), Held.YES),
        ("at_most", 0.01, (-0.001, 0.009), Held.YES),
    ],
)
def test_outcomes_by_smallest_difference(
    relation: str, threshold: float, interval: tuple[float, float], held: Held
) -> None:
    assert decide(relation, threshold, interval, 0.01) is held
