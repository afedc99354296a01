"""Every outcome of a claim, from runs whose truth is known, and the scale at which it holds."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lowprec.report.claims import CLAIMS, KINDS, Published, load_claims
from megatron_lowprec.report.published.figures import published_gaps, published_percent, stated_words
from megatron_lowprec.report.verdict import Outcome, judge_all
from tests.report.judging import FAR, NEAR, claims, gap_is, groups, judged
from tests.report.synthetic import write_sweep


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


def test_parameters_are_counted_as_the_claim_counts_them(tmp_path: Path) -> None:
    """The runs have 51M parameters, half of them in embeddings."""
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp4": 3.7, "mxfp8": 3.7})
    for embeddings, outcome, said in (
        (True, Outcome.CONTRADICTED, "51M parameters for 60M"),
        (False, Outcome.NOT_AT_THIS_SCALE, "25.2M parameters without embeddings for 60M"),
    ):
        scale = {"parameters": 60_000_000, "tokens": 26_214_400, "embeddings": embeddings}
        verdict = judged(claims(tmp_path, gap_is(), scale=scale), sweep)
        assert verdict.outcome is outcome
        assert verdict.scale.startswith(said), verdict.scale


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
        (1.04, FAR, False),  # the runs have 26,214,400 tokens and 25,220,096 parameters without embeddings
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
