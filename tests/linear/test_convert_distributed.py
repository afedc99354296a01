"""Converted models under DistributedDataParallel and fully_shard: ``convert_worker.py`` on two processes, once."""

from pathlib import Path

import pytest
import torch

from tests.checks import assert_none_failed
from tests.launch import torchrun
from tests.linear import convert_worker, fp8_gather_checks, matrix_checks, tensor_parallel_checks
from tests.linear.layers import NAMES
from tests.weekly import checks_of

WEEKLY = {
    # the recipe runs on the other wrapper, with recomputation, or in matrix_checks.py, or has GEMMs of two that do
    *(f"equals_one_process-{kind}-mxfp8" for kind in ("ddp", "fsdp")),
    *(f"equals_one_process-{kind}-fp8_current" for kind in ("ddp", "fsdp")),
    *(f"equals_one_process-{kind}-fp8_delayed" for kind in ("ddp", "fsdp")),
    *(f"equals_one_process-{kind}-mxfp4_rht_sr" for kind in ("ddp", "fsdp")),
    *(f"equals_one_process-{kind}-fp8_mxfp4_rht_sr" for kind in ("ddp", "fsdp")),
    "equals_one_process-ddp-mxfp4_rht_sr-llama-not reentrant",
    "equals_one_process-fsdp-fp8_delayed-gpt2-not reentrant",
    *(f"equals_one_process-fsdp, FP8 all-gather-{recipe}" for recipe in ("fp8_current", "fp8_delayed")),
    *(
        f"equals_one_process-fsdp, FP8 all-gather-{recipe}-llama-not reentrant"
        for recipe in ("fp8_current", "fp8_delayed", "nvfp4_all")
    ),
    # the same wrapper with blocks compiled is in matrix_checks.py
    "compiled_blocks-fsdp, FP8 all-gather-fp8_current-",
    *(f"sharded_state_round_trip-fp8_current-{broadcast}" for broadcast in (False, True)),
    *(f"sharded_state_round_trip-{recipe}-False" for recipe in ("fp8_delayed", "fp8_mxfp4_rht_sr")),
    # a CPU has one stream
    *(f"codes_on_the_wire_while_the_device_lags-{recipe}" for recipe in fp8_gather_checks.LAGGING),
    *matrix_checks.WEEKLY,
    *tensor_parallel_checks.WEEKLY,
}


@pytest.mark.slow
def test_all_checks_on_two_processes(weekly: bool, tmp_path: Path) -> None:
    names, out = checks_of(convert_worker.CHECKS, WEEKLY, weekly), tmp_path / "results.json"
    # no GPU even where there is one: CI's truth is the CPU's; torch.compile is on, which forked ranks leave out
    done = torchrun(2, ["-m", "tests.linear.convert_worker", str(out), *names], CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert_none_failed(out, names)


@pytest.mark.gpu
def test_codes_and_shards_on_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    names, out = fp8_gather_checks.ON_GPUS + tensor_parallel_checks.ON_GPUS, tmp_path / "results.json"
    done = torchrun(2, ["-m", "tests.linear.convert_worker", str(out), *names])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert_none_failed(out, names)


def test_the_worker_has_all_checks() -> None:
    # 5 recipes and 2 with recomputation on both wrappers, 1 of GPT-2's form, 6 of an FP8 all-gather, 6 of a state dict,
    # 3 of compiled blocks, 5 by themselves
    gathers, parallel = fp8_gather_checks.CHECKS, tensor_parallel_checks.CHECKS
    imported = gathers | parallel | matrix_checks.CHECKS
    others = [name for name in convert_worker.CHECKS if name not in imported]
    assert len(others) == 2 * (5 + 2) + 1 + 6 + 6 + 3 + 5
    # bytes of 8 recipes, of 2 in fp32 and of 4 while the device lags, 2 native casts, 2 checkpoints, 7 by themselves
    assert len(gathers) == 8 + 2 + 4 + 2 + 2 + 7
    # each recipe's operands for both splits; 7 models, 4 by themselves
    assert len(parallel) == 2 * (len(NAMES) - 1) + 7 + 4
    # 4 kinds, 3 ways of recomputation, 8 cells each and 2 compiled ones; a refusal
    assert len(matrix_checks.CHECKS) == 4 * 3 * (8 + 2) + 1
