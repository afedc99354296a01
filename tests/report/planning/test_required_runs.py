"""An open claim comes with the runs that would decide it, as a command."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lowprec.errors import UserError
from megatron_lowprec.report.claims import CLAIMS, Claims, load_claims
from megatron_lowprec.report.groups import group_runs
from megatron_lowprec.report.planning.required_runs import extended, required_runs
from megatron_lowprec.report.runs import find_runs
from megatron_lowprec.report.verdict import Outcome, judge_all
from megatron_lowprec.sweep import cli
from megatron_lowprec.sweep.budgets import budgets
from tests.report.synthetic import add_cells, cell, write_run, write_sweep
from tests.report.test_claims import CLAIM

SMALL = next(each for each in budgets("configs/sweeps/paper_table2.yaml") if each.size == "small")
# In steps of 64 sequences of 1024 tokens, as the synthetic runs have.
OPTIONS = {"train_iters": SMALL.tokens // (64 * 1024)}


def claims(tmp_path: Path, least: float = 0, **changes: Any) -> Claims:
    scale = {"parameters": 345_000_000, "tokens": 20_000_000_000}
    smallest = {"value": 0.03, "unit": "nats a token", "reason": "a reason"}
    claim = {**CLAIM, "scale": scale, "smallest_difference": smallest, **changes}
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump({"rules": {"tokens_per_parameter": least}, "prior_noise": {}, "claims": [claim]}))
    return load_claims(path)


def required(found: Claims, sweep: Path, outcome: Outcome = Outcome.OPEN) -> list[str]:
    (verdict,) = judge_all(found, group_runs(find_runs([str(sweep)], 0.5)[0], "bf16")[0])
    assert verdict.outcome is outcome
    return list(required_runs(verdict, found))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two seeds, 1 and 2, with a gap at the threshold of 0.03 nats that they do not resolve."""
    finals = {"bf16": [3.70, 3.71], "mxfp4": [3.75, 3.72], "mxfp4_rht": [3.71, 3.73]}
    return write_sweep(tmp_path / "sweep", finals, options=OPTIONS, parameters=SMALL.parameters)


def dry_run(command: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The jobs of a printed command: name, recipe, model, seed."""
    words = shlex.split(command)
    assert words[:2] == ["megatron-lowprec", "sweep"]
    assert cli.main([*words[2:], "--dry-run"]) == 0
    return [line.split("\t")[:4] for line in capsys.readouterr().out.splitlines()]


def test_both_scales_have_a_command_with_enough_seeds(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = claims(tmp_path)
    here, command, there, large = required(found, sweep)
    seeds, alone = (int(re.search(r"(\d+) shared seeds", line)[1]) for line in (here, there))  # type: ignore[index]
    assert alone > seeds > 2  # bf16 and mxfp4 leave fewer degrees of freedom than the three recipes at hand
    assert here.startswith(f"next, at the scale of these runs: {seeds} shared seeds; {2 * seeds} runs of gpt_25m at")
    assert there.startswith(
        "next, at the claim's scale: at least 172M parameters and 10B tokens (50% of the claim's), "
    )
    assert there.endswith("gpt_345m at size full (356M parameters, 33B tokens each)")
    for each, model, number in ((command, "gpt_25m", seeds), (large, "gpt_345m", alone)):
        jobs = dry_run(each, capsys)
        assert {job[2] for job in jobs} == {model}
        assert {int(job[3]) for job in jobs} == set(range(1, number + 1))
        assert [job[1] for job in jobs] == ["bf16", "mxfp4"] * number


def test_parameters_without_embeddings_are_compared_with_such(sweep: Path, tmp_path: Path) -> None:
    """The runs have 51M parameters, 25.2M without embeddings: too few for half of 60M, if the claim leaves them out."""
    assert SMALL.parameters > 30_000_000 > SMALL.non_embedding_parameters
    for embeddings, said in ((True, []), (False, ["at least 30M parameters without embeddings and 1 tokens"])):
        scale = {"parameters": 60_000_000, "tokens": 2, "embeddings": embeddings}
        lines = required(claims(tmp_path, scale=scale), sweep)
        there = [line for line in lines if line.startswith("next, at the claim's scale: ")]
        assert [line.partition(": ")[2].partition(" (50%")[0] for line in there] == said


def test_the_control_is_trained_as_well(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A claim of no gap counts if the same runs show a known gap."""
    found = load_claims(CLAIMS)
    found = replace(found, rules=replace(found.rules, tokens_per_parameter=0.0))
    (claim,) = (each for each in found.claims if each.id == "mxfp4_rht_alone")
    assert claim.control == "mxfp4_plain"
    verdicts = judge_all(found, group_runs(find_runs([str(sweep)], 0.5)[0], "bf16")[0])
    (verdict,) = (each for each in verdicts if each.claim == claim)
    jobs = dry_run(required_runs(verdict, found)[1], capsys)
    assert {job[1] for job in jobs} == {"bf16", "mxfp4", "mxfp4_rht"}


def test_runs_with_few_tokens_are_not_continued(sweep: Path, tmp_path: Path) -> None:
    lines = required(claims(tmp_path, least=20), sweep, Outcome.TOO_FEW_TOKENS)
    assert [line.partition(":")[0] for line in lines[::2]] == ["next, at the claim's scale"]


def test_a_sweep_without_the_recipes_has_no_command(sweep: Path, tmp_path: Path) -> None:
    lines = required(claims(tmp_path, sweep="fp8_scaling"), sweep)
    assert len(lines) == 2
    assert all(
        line.endswith("no size of configs/sweeps/fp8_scaling.yaml has such runs of these recipes") for line in lines
    )


def test_tests_without_a_common_seed_need_all_their_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finals = {"bf16": [3.7, 3.71, 3.72, 3.73], "mxfp4": [3.75, 3.72], "mxfp4_sr": [3.71, 3.73]}
    folder = write_sweep(tmp_path / "sweep", finals, options=OPTIONS, parameters=SMALL.parameters)
    for old, new in ((1, 3), (2, 4)):
        (folder / f"mxfp4_sr-s{old}").rename(folder / f"mxfp4_sr-s{new}")
        config = folder / f"mxfp4_sr-s{new}/config.yaml"
        config.write_text(config.read_text().replace(f"seed: {old}", f"seed: {new}"))
    manifest = (folder / "sweep.json").read_text()
    for old, new in ((1, 3), (2, 4)):
        manifest = manifest.replace(f"mxfp4_sr-s{old}", f"mxfp4_sr-s{new}")
    (folder / "sweep.json").write_text(manifest)
    test = {"right": "bf16", "quantity": "validation_loss", "relation": "above", "threshold": 0.03}
    found = claims(tmp_path, tests=[{"left": left, **test} for left in ("mxfp4", "mxfp4_sr")])
    jobs = dry_run(required(found, folder)[1], capsys)
    assert {int(job[3]) for job in jobs} >= {1, 2, 3, 4}
    assert {job[1] for job in jobs} == {"bf16", "mxfp4", "mxfp4_sr"}


def test_the_number_follows_the_spread(sweep: Path, tmp_path: Path) -> None:
    counts = []
    for value in (0.03, 0.015):
        smallest = {"value": value, "unit": "nats a token", "reason": "a reason"}
        line = required(claims(tmp_path, smallest_difference=smallest), sweep)[0]
        counts.append(int(re.search(r"(\d+) shared seeds", line)[1]))  # type: ignore[index]
    assert counts[1] / counts[0] == pytest.approx(4, rel=0.25)  # seeds grow with 1 / difference^2


def test_runs_of_the_claims_scale_need_only_seeds(sweep: Path, tmp_path: Path) -> None:
    lines = required(claims(tmp_path, scale={"parameters": 60_000_000, "tokens": None}), sweep)
    assert len(lines) == 2
    assert "--size small" in lines[1]


def test_a_sweep_without_such_runs_has_no_command(sweep: Path, tmp_path: Path) -> None:
    lines = required(claims(tmp_path, scale={"parameters": 10**12, "tokens": None}), sweep)
    assert len(lines) == 3
    assert "at least 500B parameters (50% of the claim's), " in lines[2]
    assert lines[2].endswith("; no size of configs/sweeps/paper_table2.yaml has such runs of these recipes")


def test_seeds_at_hand_that_resolve_a_claim_need_no_others(tmp_path: Path) -> None:
    finals = {"bf16": 3.7, "mxfp4": 3.73, "mxfp8": 3.7}
    close = write_sweep(tmp_path / "close", finals, scatter=0.001, options=OPTIONS, parameters=SMALL.parameters)
    lines = required(claims(tmp_path), close)
    assert [line.partition(":")[0] for line in lines[::2]] == ["next, at the claim's scale"]
    assert "--seeds 1-2 " in lines[1]  # two suffice; runs of another scale are not at hand


def test_one_seed_needs_a_second(tmp_path: Path) -> None:
    finals = {"bf16": [3.7], "mxfp4": [3.75]}
    single = write_sweep(tmp_path / "single", finals, options=OPTIONS, parameters=SMALL.parameters)
    assert "--seeds 1-2 " in required(claims(tmp_path), single)[1]


def test_claims_that_no_number_of_seeds_decides_have_no_command(sweep: Path, tmp_path: Path) -> None:
    smallest = {"value": 1e-5, "unit": "nats a token", "reason": "a reason"}
    assert required(claims(tmp_path, smallest_difference=smallest), sweep) == []
    assert required(claims(tmp_path, sweep=None), sweep) == []
    diverged = tmp_path / "diverged"
    for recipe, more in (("bf16", {}), ("mxfp4", {"nan_from": 100})):
        write_run(diverged / recipe, recipe, **more)  # type: ignore[arg-type]
        add_cells(diverged, "synthetic", [cell(recipe, 1, run=recipe)])
    assert required(claims(tmp_path), diverged) == []


def test_decided_claims_require_nothing(tmp_path: Path) -> None:
    far = write_sweep(tmp_path / "far", {"bf16": 3.7, "mxfp4": 3.9}, options=OPTIONS)
    assert required(claims(tmp_path), far, Outcome.REPRODUCED_AT_THIS_SCALE) == []


def test_a_claim_of_a_missing_sweep_is_an_error(sweep: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"configs/sweeps/nothing\.yaml: no such file"):
        required(claims(tmp_path, sweep="nothing"), sweep)


def test_seeds_are_extended_by_new_ones() -> None:
    assert extended({4, 1}, 4) == [1, 4, 5, 6]
    assert extended({4, 1}, 2) == extended({1, 4}, 1) == [1, 4]


def test_the_sweeps_of_the_shipped_claims_exist() -> None:
    assert all(budgets(f"configs/sweeps/{claim.sweep}.yaml") for claim in load_claims(CLAIMS).claims if claim.sweep)
