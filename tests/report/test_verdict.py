"""Every outcome from runs whose truth is known, and the rules at their edges."""

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lowprec.report.claims import CLAIMS, KINDS, QUANTITIES, Claims, Published, load_claims
from megatron_lowprec.report.groups import Group, group_runs
from megatron_lowprec.report.published.figures import published_gaps, published_percent, stated_words
from megatron_lowprec.report.runs import find_runs
from megatron_lowprec.report.statistics import Fit
from megatron_lowprec.report.verdict import (
    Held,
    Outcome,
    Verdict,
    decide,
    judge_all,
)
from tests.report.synthetic import add_cells, cell, write_run, write_sweep

NEAR = {"parameters": 51_000_000, "tokens": 26_000_000}  # the synthetic runs' own

FAR = {"parameters": 345_000_000, "tokens": 33_000_000_000}


def claims(
    tmp_path: Path, *tests: dict[str, Any], scale: dict[str, Any] | None = None, smallest: float = 1e-6, **more: Any
) -> Claims:
    claim = {
        "id": "claim",
        "source": {"arxiv": "0000.00000", "where": "Table 1"},
        "sentence": "So it is.",
        "sweep": None,
        "scale": scale or FAR,
        "published": [],
        "unpublished": "a test",
        "tests": list(tests),
        "threshold_from": "a test",
        "smallest_difference": {"value": smallest, "unit": QUANTITIES[tests[0]["quantity"]], "reason": "a test"},
    }
    path = tmp_path / "claims.yaml"
    rules = {"tokens_per_parameter": 0}  # the synthetic runs have one
    path.write_text(yaml.safe_dump({"rules": rules, "prior_noise": {}, "claims": [claim], **more}))
    return load_claims(path)


def gap_is(relation: str = "above", threshold: float = 0.03, **more: Any) -> dict[str, Any]:
    base = {"left": "mxfp4", "right": "bf16", "quantity": "validation_loss"}
    return {**base, "relation": relation, "threshold": threshold, **more}


def groups(*paths: Path) -> list[Group]:
    return group_runs(find_runs([str(path) for path in paths], 0.5)[0], "bf16")[0]


def judged(found: Claims, *paths: Path) -> Verdict:
    (verdict,) = judge_all(found, groups(*paths))
    return verdict


@pytest.mark.parametrize(
    ("relation", "gap", "scale", "outcome"),
    [
        ("above", 0.09, FAR, Outcome.REPRODUCED_AT_THIS_SCALE),
        ("above", 0.09, NEAR, Outcome.REPRODUCED),
        ("above", 0.00, FAR, Outcome.NOT_AT_THIS_SCALE),  # the size fails
        ("above", -0.09, FAR, Outcome.NOT_AT_THIS_SCALE),  # the sign fails
        ("above", 0.00, NEAR, Outcome.CONTRADICTED),
        ("above", 0.03, FAR, Outcome.OPEN),
        ("above", 0.03, NEAR, Outcome.OPEN),
        ("at_most", 0.01, FAR, Outcome.REPRODUCED_AT_THIS_SCALE),
        ("at_most", -0.09, NEAR, Outcome.REPRODUCED),  # better is no worse
        ("at_most", 0.09, FAR, Outcome.NOT_AT_THIS_SCALE),
        ("at_most", 0.09, NEAR, Outcome.CONTRADICTED),
        ("at_most", 0.03, NEAR, Outcome.OPEN),
        ("within", 0.00, FAR, Outcome.REPRODUCED_AT_THIS_SCALE),
        ("within", 0.00, NEAR, Outcome.REPRODUCED),
        ("within", -0.09, NEAR, Outcome.CONTRADICTED),
        ("within", -0.03, NEAR, Outcome.OPEN),
        ("below", -0.09, FAR, Outcome.OPEN),  # of +0.03: see threshold below
    ],
)
def test_every_outcome(tmp_path: Path, relation: str, gap: float, scale: dict[str, Any], outcome: Outcome) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp4": 3.7 + gap, "mxfp8": 3.7})
    threshold = 0.03 if relation != "below" else -0.09
    verdict = judged(claims(tmp_path, gap_is(relation, threshold), scale=scale), sweep)
    assert verdict.outcome is outcome
    (finding,) = verdict.findings
    assert finding.measured == pytest.approx(gap, abs=0.006)
    assert "(seeds as blocks, 3 and 3 seeds, 4 degrees of freedom)" in finding.words


def test_comparable_needs_both_parameters_and_tokens(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp4": 3.7, "mxfp8": 3.7})
    for scale, outcome in (
        ({"parameters": 100_000_000, "tokens": 52_000_000}, Outcome.CONTRADICTED),  # half of either
        ({"parameters": 110_000_000, "tokens": 26_000_000}, Outcome.NOT_AT_THIS_SCALE),
        ({"parameters": 51_000_000, "tokens": 60_000_000}, Outcome.NOT_AT_THIS_SCALE),
        ({"parameters": 51_000_000, "tokens": None}, Outcome.CONTRADICTED),
    ):
        assert judged(claims(tmp_path, gap_is(), scale=scale), sweep).outcome is outcome


@pytest.mark.parametrize(
    ("essential", "tokens", "outcome"),
    [
        ([], 33_000_000_000, Outcome.REPRODUCED_AT_THIS_SCALE),
        (["tokens"], 33_000_000_000, Outcome.NOT_AT_THIS_SCALE),
        (["tokens"], 52_000_000, Outcome.REPRODUCED),  # half of them
        (["parameters"], 33_000_000_000, Outcome.REPRODUCED_AT_THIS_SCALE),
    ],
)
def test_short_runs_reproduce_no_claim_about_long_ones(
    tmp_path: Path, essential: list[str], tokens: int, outcome: Outcome
) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp4": 3.79, "mxfp8": 3.7})
    scale = {"parameters": 51_000_000, "tokens": tokens, "essential": essential}
    verdict = judged(claims(tmp_path, gap_is(), scale=scale), sweep)
    assert verdict.outcome is outcome
    assert ("itself is about its number of tokens" in verdict.scale) == (outcome is Outcome.NOT_AT_THIS_SCALE)


@pytest.mark.parametrize(
    ("losses", "outcome"),
    [
        ({"bf16": 3.7, "mxfp4": 3.79, "mxfp8": 3.7}, Outcome.REPRODUCED_AT_THIS_SCALE),
        ({"bf16": 3.7, "mxfp4": 3.7, "mxfp8": 3.7}, Outcome.NOT_AT_THIS_SCALE),  # the control fails
        ({"bf16": 3.7, "mxfp4": 3.73, "mxfp8": 3.7}, Outcome.NOT_AT_THIS_SCALE),  # it is open
        ({"bf16": 3.7, "mxfp8": 3.7}, Outcome.NOT_AT_THIS_SCALE),  # it is not in the runs
        ({"bf16": 3.7, "mxfp4": 3.79, "mxfp8": 3.8}, Outcome.NOT_AT_THIS_SCALE),  # the claim itself fails
    ],
)
def test_runs_without_a_known_gap_reproduce_no_parity(
    tmp_path: Path, losses: dict[str, float], outcome: Outcome
) -> None:
    sweep = write_sweep(tmp_path / "sweep", losses)
    claims(tmp_path, gap_is())
    content = yaml.safe_load((tmp_path / "claims.yaml").read_text())
    (control,) = content["claims"]
    parity = {**control, "id": "parity", "control": "claim", "tests": [gap_is("at_most", left="mxfp8")]}
    content["claims"].append(parity)
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump(content))
    verdict = judge_all(load_claims(tmp_path / "claims.yaml"), groups(sweep))[-1]
    assert (verdict.claim.id, verdict.outcome) == ("parity", outcome)
    blamed = outcome is Outcome.NOT_AT_THIS_SCALE and losses["mxfp8"] == 3.7
    assert ("claim claim does not hold in these runs" in verdict.scale) == blamed


@pytest.mark.parametrize(
    ("needed", "scale", "judges"),
    [
        (20, FAR, False),
        (1.04, FAR, False),  # the runs have 26,214,400 tokens and 25,714,176 parameters without embeddings
        (1.01, FAR, True),
        (20, NEAR, True),  # the source has as few
        (20, {**FAR, "tokens": None}, False),
    ],
)
def test_runs_with_few_tokens_get_no_verdict(
    tmp_path: Path, needed: float, scale: dict[str, Any], judges: bool
) -> None:
    """The gap and its interval stay; neither the outcome nor the words say that a claim holds or fails."""
    for gap in (0.09, 0.03, -0.09):
        sweep = write_sweep(tmp_path / str(gap), {"bf16": 3.7, "mxfp4": 3.7 + gap, "mxfp8": 3.7})
        verdict = judged(claims(tmp_path, gap_is(), scale=scale, rules={"tokens_per_parameter": needed}), sweep)
        assert (verdict.outcome is Outcome.TOO_FEW_TOKENS) == (not judges)
        (words,) = verdict.measured
        assert f"mxfp4 less bf16: {'−' if gap < 0 else '+'}0.0" in words
        assert "95% interval" in words
        assert any(said in words for said in ("holds", "fails", "open")) == judges
        assert ("1.0 tokens per parameter without embeddings; a verdict takes" in verdict.scale) == (not judges)


def test_runs_of_an_unknown_model_get_no_verdict(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp4": 3.9, "mxfp8": 3.7}, options={"num_layers": None})
    verdict = judged(claims(tmp_path, gap_is()), sweep)
    assert verdict.outcome is Outcome.TOO_FEW_TOKENS
    assert "unknown tokens per parameter" in verdict.scale


def test_a_verdict_names_its_margin_and_where_it_is_from(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp4": 3.79, "mxfp8": 3.7})
    verdict = judged(claims(tmp_path, gap_is()), sweep)
    assert verdict.margin == "above 0.030 nats a token: a test"
    assert verdict.findings[0].brief.endswith("nats a token, asked: above 0.030")


def test_unrecorded_parameters_contradict_nothing(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp4": 3.7, "mxfp8": 3.7}, parameters=None)
    verdict = judged(claims(tmp_path, gap_is(), scale=NEAR), sweep)
    assert verdict.outcome is Outcome.NOT_AT_THIS_SCALE
    assert "an unrecorded number of parameters" in verdict.scale


def test_every_verdict_has_its_scale(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp4": 3.9})
    verdict = judged(claims(tmp_path, gap_is()), sweep)
    assert verdict.scale == "51M parameters for 345M, 1/7; 26.2M tokens for 33B, 1/1,259"


def test_all_tests_must_hold(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp4": 3.79, "mxfp8": 3.7})
    holds, fails, open_ = gap_is("above"), gap_is("below", 0.0), gap_is("above", 0.09)
    outcomes = [
        judged(claims(tmp_path, *tests), sweep).outcome
        for tests in ((holds, holds), (holds, open_), (holds, fails, open_), (holds, gap_is(left="mxfp4_sr")))
    ]
    assert outcomes == [
        Outcome.REPRODUCED_AT_THIS_SCALE,
        Outcome.OPEN,
        Outcome.NOT_AT_THIS_SCALE,
        Outcome.NOT_TESTED,
    ]


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


def test_a_claim_that_is_not_about_losses_is_open(tmp_path: Path) -> None:
    shipped = load_claims(CLAIMS)
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "fp8_lm": 3.7}, seeds=1)
    found = {verdict.claim.id: verdict for verdict in judge_all(shipped, groups(sweep))}
    assert {claim.kind for claim in shipped.claims} == set(KINDS)
    for claim in shipped.claims:
        assert (found[claim.id].outcome is Outcome.NOT_LOSSES) == (claim.kind != "loss")
    memory = found["fp8_lm_memory"]
    assert memory.note.startswith("memory, not measured by losses; measured by: measured peaks")
    assert stated_words(memory.claim.stated[0]).startswith("fp8_lm against bf16: less, 27 to 42 % of a GPU's memory (")


def test_each_group_has_its_own_verdict(tmp_path: Path) -> None:
    a = write_sweep(tmp_path / "a", {"bf16": 3.7, "mxfp4": 3.9, "mxfp8": 3.7})
    b = write_sweep(tmp_path / "b", {"bf16": 3.7, "mxfp4": 3.7, "mxfp8": 3.7}, options={"lr": 3e-4})
    outcomes = [verdict.outcome for verdict in judge_all(claims(tmp_path, gap_is()), groups(a, b))]
    assert outcomes == [Outcome.REPRODUCED_AT_THIS_SCALE, Outcome.NOT_AT_THIS_SCALE]


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


def test_published_losses_become_percents_of_perplexity() -> None:
    loss = Published("validation_loss", "mxfp4", "bf16", (2.60, 2.49), 1, 1, "Table 2")
    perplexity = Published("perplexity", "mxfp4_rht", "bf16", (10.02, 9.92), 1, 1, "6.4")
    assert published_percent(loss) == pytest.approx(100 * (math.exp(0.11) - 1))
    assert published_percent(perplexity) == pytest.approx(100 * 0.1 / 9.92)


def test_the_shipped_claims_judge_a_sweep_of_table_2(tmp_path: Path) -> None:
    truth = {"bf16": 3.7, "mxfp4": 3.81, "mxfp4_rht": 3.71, "mxfp4_sr": 3.71, "mxfp4_rht_sr": 3.70}
    sweep = write_sweep(tmp_path / "sweep", truth, scatter=0.0005)
    shipped = load_claims(CLAIMS)
    found = groups(sweep)
    of_any_length = replace(shipped, rules=replace(shipped.rules, tokens_per_parameter=0.0))
    outcomes = {verdict.claim.id: verdict.outcome for verdict in judge_all(of_any_length, found)}
    for claim in ("mxfp4_plain", "mxfp4_rht_alone", "mxfp4_sr_alone", "mxfp4_rht_sr"):
        assert outcomes[claim] is Outcome.REPRODUCED_AT_THIS_SCALE
    assert outcomes["mxfp4_rht_long"] is Outcome.NOT_AT_THIS_SCALE
    assert outcomes["mxfp8_parity"] is Outcome.NOT_TESTED
    assert published_gaps(shipped, found[0])["mxfp4"] == [pytest.approx(11.63, abs=0.01)]
