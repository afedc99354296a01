"""Converted models under DistributedDataParallel and fully_shard: ``convert_worker.py`` on two processes, once."""

from pathlib import Path

import pytest

from tests.checks import assert_none_failed
from tests.launch import torchrun
from tests.linear import convert_worker
from tests.weekly import checks_of

WEEKLY = {
    # the recipe runs on the other wrapper or with recomputation, or consists of GEMMs of two that do
    "equals_one_process-ddp-mxfp8",
    *(f"equals_one_process-{kind}-fp8_delayed" for kind in ("ddp", "fsdp")),
    *(f"equals_one_process-{kind}-mxfp4_rht_sr" for kind in ("ddp", "fsdp")),
    *(f"equals_one_process-{kind}-fp8_mxfp4_rht_sr" for kind in ("ddp", "fsdp")),
    "equals_one_process-ddp-fp8_current",
    "equals_one_process-fsdp, FP8 all-gather-fp8_current-llama-not reentrant",
    *(f"sharded_state_round_trip-fp8_current-{broadcast}" for broadcast in (False, True)),
    "sharded_state_round_trip-fp8_mxfp4_rht_sr-False",
}


@pytest.mark.slow
def test_all_checks_on_two_processes(weekly: bool, tmp_path: Path) -> None:
    names, out = checks_of(convert_worker.CHECKS, WEEKLY, weekly), tmp_path / "results.json"
    # no GPU even where there is one: CI's truth is the CPU's; torch.compile is on, which forked ranks leave out
    done = torchrun(2, ["-m", "tests.linear.convert_worker", str(out), *names], CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert_none_failed(out, names)


def test_the_worker_has_all_checks() -> None:
    # 5 recipes and 2 with recomputation on both wrappers, 1 of GPT-2's form, 8 of an FP8 all-gather, 6 of a state dict,
    # 2 of compiled blocks, 5 by themselves
    assert len(convert_worker.CHECKS) == 2 * (5 + 2) + 1 + 8 + 6 + 2 + 5
