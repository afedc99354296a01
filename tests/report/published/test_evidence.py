"""Each thing that others' runs can say, from ladders whose truth is known, and that it changes no verdict."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lowprec.errors import UserError
from megatron_lowprec.report.build import Report, build
from megatron_lowprec.report.claims import QUANTITIES, load_claims
from megatron_lowprec.report.published.evidence import Evidence, Said, evidence
from megatron_lowprec.report.runs import find_runs
from megatron_lowprec.report.verdict import Outcome
from megatron_lowprec.shipped import SHIPPED
from tests.refusal import refused
from tests.report.synthetic import write_sweep

TOKENS = (100, 200, 400)  # 10, 20 and 40 tokens a parameter at the smaller size, 5, 10 and 20 at the larger
SIZES = (10, 20)


def write_claims(
    folder: Path,
    gaps: dict[int, tuple[float, float, float]],
    relation: str = "above",
    threshold: float = 0.03,
    quantity: str = "validation_loss",
    smallest: float = 0.03,
    essential: tuple[str, ...] = (),
    scale: tuple[int, int] = (100, 1000),
    **others: Any,
) -> Path:
    """A claims file on mxfp4 against bf16, beside a ladder with these gaps.

    Args:
        gaps: size -> gap in nats at each of TOKENS.
        scale: parameters and tokens of the claim.
    """
    rows = [f"baseline,{size},{tokens},3.0,\n" for size in gaps for tokens in TOKENS]
    rows += [f"x,{size},{at},{3 + gap},a\n" for size, row in gaps.items() for at, gap in zip(TOKENS, row, strict=True)]
    (folder / "ladder.csv").write_text("group,N,D,final_loss,scheme\n" + "".join(rows))
    named = {
        "file": "ladder.csv",
        "source": "a synthetic ladder",
        "recipes": [{"name": "mxfp4", "settings": ["group=x", "scheme=a"]}],
        "parameters": list(gaps),
        "condition": "all is equal",
    }
    test = {"left": "mxfp4", "right": "bf16", "quantity": quantity, "relation": relation, "threshold": threshold}
    claim = {
        "id": "claim",
        "source": {"arxiv": "0000.00000", "where": "Table 1"},
        "sentence": "So it is.",
        "scale": {"parameters": scale[0], "tokens": scale[1], "essential": list(essential)},
        "unpublished": "a test",
        "tests": [test],
        "threshold_from": "a test",
        "smallest_difference": {"value": smallest, "unit": QUANTITIES[quantity], "reason": "a test"},
        "others": [{**named, **others}],
    }
    path = folder / "claims.yaml"
    path.write_text(yaml.safe_dump({"rules": {"tokens_per_parameter": 0}, "prior_noise": {}, "claims": [claim]}))
    return path


def found(*arguments: Any, **more: Any) -> Evidence:
    return evidence(load_claims(write_claims(*arguments, **more)))["claim"]


HOLDS, FAILS, NEAR = (0.07, 0.08, 0.09), (-0.02, -0.01, -0.03), (0.02, 0.03, 0.05)  # of above 0.03, uncertain by 0.03


@pytest.mark.parametrize(
    ("small", "large", "said"),
    [
        (HOLDS, HOLDS, Said.SUPPORTED),
        (HOLDS, NEAR, Said.SUPPORTED),
        (FAILS, FAILS, Said.NOT_AT_THEIR_SCALE),
        (NEAR, FAILS, Said.NOT_AT_THEIR_SCALE),
        (HOLDS, FAILS, Said.DISAGREE),
        (NEAR, NEAR, Said.UNDECIDED),
        ((0.07, 0.08, -0.01), NEAR, Said.UNDECIDED),  # not so in every run
    ],
)
def test_each_outcome_of_published_runs(tmp_path: Path, small: Any, large: Any, said: Said) -> None:
    assert found(tmp_path, dict(zip(SIZES, (small, large), strict=True))).said is said


@pytest.mark.parametrize(
    ("relation", "threshold", "gap", "said"),
    [
        ("above", 0.0, 0.029, Said.UNDECIDED),  # within the smallest difference
        ("above", 0.0, 0.031, Said.SUPPORTED),
        ("above", 0.0, 0.0, Said.UNDECIDED),  # without a spread, equal losses are no equivalence
        ("above", 0.0, -0.031, Said.NOT_AT_THEIR_SCALE),
        ("below", 0.0, -0.031, Said.SUPPORTED),
        ("at_most", 0.03, 0.001, Said.UNDECIDED),
        ("at_most", 0.03, -0.001, Said.SUPPORTED),
        ("at_most", 0.03, 0.061, Said.NOT_AT_THEIR_SCALE),
        ("within", 0.05, 0.019, Said.SUPPORTED),
        ("within", 0.05, 0.021, Said.UNDECIDED),
    ],
)
def test_a_difference_near_its_threshold_decides_nothing(
    tmp_path: Path, relation: str, threshold: float, gap: float, said: Said
) -> None:
    assert found(tmp_path, {10: (gap, gap, gap)}, relation, threshold).said is said


def test_runs_shorter_for_their_size_than_the_claim_do_not_count(tmp_path: Path) -> None:
    said = found(tmp_path, {20: (-0.5, 0.08, 0.09)})
    assert said.said is Said.SUPPORTED
    sizes, numbers = said.words[2:]
    assert sizes == "20 parameters for 100, 1/5; up to 400 tokens for 1K, 0.4 of it; at 10, 20 tokens a parameter"
    assert numbers == "mxfp4 less bf16: +0.0800, +0.0900 nats a token; above 0.03: holds"
    assert said.words[0].startswith("one seed each")
    assert said.words[1] == "a synthetic ladder: all is equal"


def test_perplexity_is_in_percent(tmp_path: Path) -> None:
    said = found(tmp_path, {10: (0.02, 0.02, 0.02)}, threshold=1.0, quantity="perplexity_percent", smallest=1.0)
    assert "+2.02, +2.02, +2.02 % of perplexity; above 1: holds" in said.words[-1]


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        ((20, 200), Said.CONTRADICTED),
        ((21, 210), Said.NOT_AT_THEIR_SCALE),
    ],
)
def test_only_runs_of_half_the_claim_s_size_contradict_it(tmp_path: Path, scale: Any, said: Said) -> None:
    assert found(tmp_path, {10: FAILS}, scale=scale).said is said


def test_another_recipe_is_shown_and_decides_nothing(tmp_path: Path) -> None:
    said = found(tmp_path, {10: HOLDS}, count=False)
    assert said.said is Said.UNDECIDED
    assert said.words[-2].endswith("not counted: their recipe is another")
    assert said.words[-1].endswith("holds")


def test_a_claim_about_parameters_is_not_settled_by_smaller_models(tmp_path: Path) -> None:
    said = found(tmp_path, {10: HOLDS}, essential=("parameters",))
    assert said.said is Said.UNDECIDED
    assert said.words[-2].endswith("not counted: the claim is about its number of parameters")
    assert found(tmp_path, {10: HOLDS}, essential=("tokens",)).said is Said.SUPPORTED


def test_all_tests_must_hold_and_one_that_fails_suffices(tmp_path: Path) -> None:
    path = write_claims(tmp_path, {10: HOLDS})
    for relation, said in (("at_most", Said.NOT_AT_THEIR_SCALE), ("above", Said.SUPPORTED)):
        content = yaml.safe_load(path.read_text())
        (claim,) = content["claims"]
        claim["tests"].append({**claim["tests"][0], "relation": relation})
        (tmp_path / "two.yaml").write_text(yaml.safe_dump(content))
        assert evidence(load_claims(tmp_path / "two.yaml"))["claim"].said is said


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"parameters": [30]}, "no runs of 30 parameters with equal tokens, at least 10 a parameter"),
        ({"recipes": [{"name": "mxfp4", "settings": ["scheme=b"]}]}, "(of any length: 0 of mxfp4, 3 of bf16)"),
        ({"recipes": [{"name": "mxfp4", "settings": []}]}, "two published runs of 10 parameters and 100 tokens"),
        ({"recipes": [{"name": "mxfp4", "settings": ["scheme"]}]}, "setting 'scheme' must be column=value"),
        ({"recipes": [{"name": "mxfp8", "settings": []}]}, "a recipe of a test is 'mxfp4', but must be one of mxfp8"),
        ({"parameters": []}, "name no size"),
        ({"file": "nothing.csv"}, "cannot be read"),
    ],
)
def test_others_that_cannot_be_applied_are_refused(tmp_path: Path, others: dict[str, Any], words: str) -> None:
    with refused(words):
        found(tmp_path, {10: HOLDS}, **others)


def test_others_need_final_losses(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="quantity of a test is 'perplexity', but must be one of validation_loss"):
        found(tmp_path, {10: HOLDS}, quantity="perplexity")


def reported(tmp_path: Path, gap: float) -> Report:
    """A report on own runs with this gap, beside others' runs that support the claim; the own are the larger."""
    sweep = write_sweep(tmp_path / "sweep", {"bf16": 3.7, "mxfp4": 3.7 + gap, "mxfp8": 3.7})
    claims = load_claims(write_claims(tmp_path, {10: HOLDS}))
    runs, notes = find_runs([str(sweep)], 0.5)
    return build(runs, notes, claims, "bf16", "a test")


def test_others_stand_beside_an_open_verdict_and_leave_it(tmp_path: Path) -> None:
    report = reported(tmp_path, 0.03)
    assert report.verdicts[0].outcome is Outcome.OPEN
    said = report.lines()
    at = said.index("    supported by others' runs:")
    assert said[at + 1].startswith("      one seed each")
    assert any(line.startswith("  open: claim") for line in said[:at])
    page = report.write(tmp_path / "out").read_text(encoding="utf-8")
    assert page.count("supported by others&#39; runs") == 2  # overview and card
    assert "+0.0700, +0.0800, +0.0900 nats a token" in page
    assert 'class="badge open"' in page


@pytest.mark.parametrize(("gap", "outcome"), [(0.09, Outcome.REPRODUCED), (-0.09, Outcome.CONTRADICTED)])
def test_a_claim_that_own_runs_settle_has_no_second_line(tmp_path: Path, gap: float, outcome: Outcome) -> None:
    report = reported(tmp_path, gap)
    assert report.verdicts[0].outcome is outcome
    assert not any("others' runs" in line for line in report.lines())
    assert "others&#39; runs" not in report.write(tmp_path / "out").read_text(encoding="utf-8")


def test_the_shipped_ladder_counts_only_runs_with_random_signs() -> None:
    said = evidence(load_claims(SHIPPED / "configs/claims.yaml"))
    assert {name: each.said for name, each in said.items()} == {
        "mxfp4_rht_alone": Said.UNDECIDED,
        "mxfp4_rht_sr": Said.UNDECIDED,
        "mxfp4_rht_long": Said.NOT_AT_THEIR_SCALE,
    }
    for each in said.values():
        sizes = [words for words in each.words if " tokens a parameter" in words]
        assert ["not counted" in words for words in sizes] == [False, True, True]
