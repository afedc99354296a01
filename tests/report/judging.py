"""What tests of verdicts share: a claim at a near or a far scale, groups of runs, and the verdict on them."""

from pathlib import Path
from typing import Any

import yaml

from megatron_lowprec.report.claims import QUANTITIES, Claims, load_claims
from megatron_lowprec.report.groups import Group, group_runs
from megatron_lowprec.report.runs import find_runs
from megatron_lowprec.report.verdict import Verdict, judge_all

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
