"""Two pipeline stages: what a stage has sent on is freed, and nothing else changes; gathers wait for the schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import fork_ranks
from tests.once import once
from tests.training.helpers import argv, losses
from tests.weekly import also_weekly

STEPS, MICROBATCHES = 2, 4
COMMON: dict[str, Any] = {
    "pipeline_model_parallel_size": 2,
    "num_layers": 4,
    "train_iters": STEPS,
    "global_batch_size": 2 * MICROBATCHES,
    "no_save": True,
}
BF16: dict[str, Any] = {"bf16": True, "use_distributed_optimizer": True}
INTERLEAVED: dict[str, Any] = {"num_layers": 8, "num_virtual_stages_per_pipeline_rank": 2}
RECOMPUTED: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
RANDOM: dict[str, Any] = {"recipe": "mxfp4_rht_sr"} | BF16
RUNS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp8_delayed": {"recipe": "fp8_delayed"} | BF16,
    "fp8_current, evaluated": {"recipe": "fp8_current", "eval_iters": 1, "eval_interval": 1} | BF16,
    "no dropout, rmsnorm": {"hidden_dropout": 0, "normalization": "RMSNorm", "swiglu": True} | BF16,
    "recomputed": RECOMPUTED | BF16,
    "random": RANDOM,
    "random, recomputed": RANDOM | RECOMPUTED,
    "random, interleaved": RANDOM | INTERLEAVED,
    "random, interleaved, recomputed": RANDOM | INTERLEAVED | RECOMPUTED,
    "experts": {"num_experts": 2, "disable_bias_linear": True, "recipe": "mxfp8"} | BF16,
    "interleaved": INTERLEAVED | BF16,
    "interleaved, overlapped": {"overlap_grad_reduce": True, "overlap_param_gather": True} | INTERLEAVED | BF16,
}
EACH_TIME = set(RUNS) - {"fp8_current, evaluated", "recomputed", "experts", "interleaved, overlapped"}
SENT_AT_ONCE = [name for name in RUNS if "interleaved" not in name]
KEPT = [name for name in RUNS if name not in SENT_AT_ONCE]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, weekly: bool) -> tuple[Path, str]:
    """The folder of all runs, and what was said beside their logs."""

    def run(folder: Path) -> None:
        asked = {name: argv(**COMMON | more) for name, more in RUNS.items() if weekly or name in EACH_TIME}
        (folder / "cases.json").write_text(json.dumps(asked))
        printed = fork_ranks(2, ["tests/distributed/pipeline_worker.py", "cases.json"], folder)
        (folder / "said").write_text(printed)

    folder = once(tmp_path_factory, "pipeline", run)
    return folder, (folder / "said").read_text()


def freed(folder: Path, stage: int) -> dict[str, list[bool]]:
    found: dict[str, list[bool]] = json.loads((folder / f"stage{stage}.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", also_weekly(RUNS, EACH_TIME))
def test_losses_are_those_with_all_outputs_kept(launch: tuple[Path, str], name: str) -> None:
    assert len(losses(launch[0] / name)) == STEPS
    assert losses(launch[0] / name) == losses(launch[0] / f"{name} kept")


@pytest.mark.slow
@pytest.mark.parametrize("name", also_weekly(SENT_AT_ONCE, EACH_TIME.intersection(SENT_AT_ONCE)))
def test_nothing_else_holds_a_stage_s_output(launch: tuple[Path, str], name: str) -> None:
    first, last = (freed(launch[0], stage) for stage in range(2))
    assert first[name] == [True] * STEPS * MICROBATCHES
    assert first[f"{name} kept"] == [False] * STEPS * MICROBATCHES
    assert last[name] == []  # a loss is not sent


@pytest.mark.slow
@pytest.mark.parametrize("name", also_weekly(KEPT, EACH_TIME.intersection(KEPT)))
def test_an_output_that_may_still_be_on_its_way_is_kept(launch: tuple[Path, str], name: str) -> None:
    found = freed(launch[0], 0)[name]
    assert found
    assert not any(found)


@pytest.mark.slow
@pytest.mark.weekly
def test_gathers_are_started_by_the_schedule_alone(launch: tuple[Path, str]) -> None:
    assert "already been dispatched" not in launch[1]
    assert losses(launch[0] / "interleaved, overlapped") == losses(launch[0] / "interleaved")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random", "random, interleaved"])
def test_a_recomputation_finds_its_microbatch_among_those_in_flight(launch: tuple[Path, str], name: str) -> None:
    assert losses(launch[0] / f"{name}, recomputed") == losses(launch[0] / name)
