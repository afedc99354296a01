"""The shipped claims are whole, and a claims file with a mistake is refused with its place."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.report.claims import CLAIMS, Claims, load_claims
from tests.refusal import refused

CLAIM: dict[str, Any] = {
    "id": "plain",
    "source": {"arxiv": "2502.20586", "where": "Table 2"},
    "sentence": "It is worse.",
    "sweep": "paper_table2",
    "scale": {"parameters": 345_000_000, "tokens": None},
    "published": [],
    "unpublished": "Curves alone.",
    "tests": [
        {"left": "mxfp4", "right": "bf16", "quantity": "validation_loss", "relation": "above", "threshold": 0.03}
    ],
    "threshold_from": "somewhere",
    "smallest_difference": {"value": 0.03, "unit": "nats a token", "reason": "a reason"},
}


def load(tmp_path: Path, *claims: dict[str, Any], **more: Any) -> Claims:
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump({"rules": {}, "prior_noise": {}, "claims": list(claims), **more}))
    return load_claims(path)


def test_the_shipped_claims_name_recipes_that_exist() -> None:
    claims = load_claims(CLAIMS)
    assert len(claims.claims) >= 12
    for claim in claims.claims:
        for test in claim.tests:
            for side in (test.left, test.right):
                name, *overrides = side.removesuffix("_native").split()
                load_recipe(name, overrides)


def test_the_shipped_numbers_are_the_papers() -> None:
    rows = {
        (row.left.split()[0], row.right.split()[0], row.where, row.tokens): row.values
        for claim in load_claims(CLAIMS).claims
        for row in claim.published
    }
    billion = 10**9
    assert rows["mxfp4", "bf16", "Table 2", 33 * billion] == (2.60, 2.49)
    assert rows["mxfp4_rht", "bf16", "Table 2", 33 * billion] == (2.51, 2.49)
    assert rows["mxfp4_rht", "bf16", "section 6.4", 210 * billion] == (10.02, 9.92)
    assert rows["mxfp4_rht", "mxfp4_rht_sr", "section 6.4", 210 * billion] == (10.02, 9.90)


def test_a_claim_is_read(tmp_path: Path) -> None:
    (claim,) = load(tmp_path, CLAIM).claims
    assert claim.tests[0].threshold == 0.03
    assert claim.scale.tokens is None
    assert load(tmp_path, CLAIM).rules.confidence == 0.95


def changed(**changes: Any) -> dict[str, Any]:
    return {**CLAIM, **changes}


def with_test(**changes: Any) -> dict[str, Any]:
    return changed(tests=[{**CLAIM["tests"][0], **changes}])


def smallest(**changes: Any) -> dict[str, Any]:
    return {**CLAIM["smallest_difference"], **changes}


OTHERS = {"file": "a.csv", "source": "b", "recipes": [], "parameters": [1], "condition": "c"}
OTHER: dict[str, Any] = {
    **{key: CLAIM[key] for key in ("id", "source", "sentence", "scale", "smallest_difference")},
    "kind": "memory",
    "stated": [{"left": "a", "right": "b", "direction": "less", "values": [27, 42], "unit": "%", "where": "Table 1"}],
    "measured_by": "a page",
}


def test_a_claim_that_is_not_about_losses_has_no_tests(tmp_path: Path) -> None:
    (claim,) = load(tmp_path, OTHER).claims
    assert (claim.tests, claim.stated[0].values) == ((), (27.0, 42.0))


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (changed(treshold_from="x"), "no field 'treshold_from': did you mean threshold_from"),
        ({key: value for key, value in CLAIM.items() if key != "sentence"}, "lacks sentence"),
        (with_test(quantity="los"), "plain: quantity is 'los', but must be one of validation_loss"),
        (with_test(relation="worse"), "plain: relation is 'worse', but must be one of above"),
        (with_test(threshold="0.03"), "(str), but must be float"),
        (with_test(threshold=True), "(bool), but must be float"),
        (with_test(over=[0.1, 0.2]), "training_loss needs a share"),
        (with_test(quantity="training_loss"), "training_loss needs a share"),
        (with_test(quantity="training_loss", over=[0.2, 0.1]), "two rising shares"),
        (with_test(quantity="training_loss", over=[0.2]), "must be a list of 2"),
        (with_test(relation="within", threshold=0.0), "within needs a threshold above 0"),
        (changed(tests=[]), "has no tests"),
        (changed(smallest_difference=smallest(value=0.0)), "must be above 0: name the smallest"),
        (changed(smallest_difference=smallest(unit="dB")), "smallest_difference is in 'dB', but its test of"),
        (changed(smallest_difference=smallest(value=0.04)), "threshold 0.03 is below the smallest difference"),
        ({key: value for key, value in CLAIM.items() if key != "smallest_difference"}, "lacks smallest_difference"),
        (changed(threshold_from=""), "lacks threshold_from"),
        (changed(kind="losses"), "kind is 'losses', but must be one of loss, memory"),
        (changed(kind="memory"), "is of kind memory, but has tests of losses"),
        (changed(measured_by="a page"), "are for claims of another kind"),
        ({**OTHER, "measured_by": None}, "give `stated` figures and the topic in `measured_by`"),
        ({**OTHER, "stated": [{**OTHER["stated"][0], "values": [1, 2, 3]}]}, "stated has 3 values"),
        ({**OTHER, "others": [OTHERS]}, "remove tests, published, threshold_from, others"),
        (changed(others=[OTHERS]), "others need the claim's tokens per parameter"),
        (changed(unpublished=None), "say in `unpublished` why"),
        (changed(scale={"parameters": "33e9", "tokens": None}), "write 33_000_000_000"),
        (changed(scale={"parameters": 1, "tokens": 1, "essential": ["layers"]}), "must be one of parameters, tokens"),
        (changed(scale={"parameters": 1, "tokens": None, "essential": ["tokens"]}), "tokens cannot be essential"),
        (changed(scale={"parameters": None, "tokens": 1, "embeddings": False}), "that its scale does not give"),
        (changed(control="nothing"), "control is 'nothing', but must be one of"),
        (changed(source="2502.20586"), "source is '2502.20586', but must be a mapping of fields"),
    ],
)
def test_an_error_names_its_place(tmp_path: Path, claim: dict[str, Any], words: str) -> None:
    with refused(words):
        load(tmp_path, claim)


def test_two_claims_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two claims 'plain'"):
        load(tmp_path, CLAIM, CLAIM)


def test_no_file_and_no_yaml(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_claims(tmp_path / "nothing.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(UserError, match="no valid YAML"):
        load_claims(tmp_path / "bad.yaml")
