"""Megatron-core's layers on two processes: one launch of ``worker.py``, which runs all of its checks."""

from pathlib import Path

import pytest

from tests.checks import assert_none_failed
from tests.launch import fork_ranks
from tests.mcore import worker
from tests.mcore.shard_checks import PLAIN
from tests.weekly import checks_of

# the specs of each are among those of the others
SAME_SPECS = (
    "fp8_lm",
    "fp8_lm_o1",
    "fp8_lm_o2",
    "mxfp8_ocp",
    "mxfp8_e5m2_act",
    "mxfp8_e5m2_weight",
    "mxfp4",
    "mxfp4_rht",
)
WEEKLY = {f"shards-{name}-True" for name in SAME_SPECS}
WEEKLY |= {f"recompute-{case}" for case in ("mxfp4_rht-True", "mxfp4_rht-False", "mxfp4_rht_sr-True", "bf16-False")}
WEEKLY |= {"recompute-fp8_mxfp4_rht_sr-False"}


@pytest.mark.slow
def test_all_checks_on_two_processes(weekly: bool, tmp_path: Path) -> None:
    names, out = checks_of(worker.CHECKS, WEEKLY, weekly), tmp_path / "results.json"
    fork_ranks(2, ["-m", "tests.mcore.worker", str(out), *names])
    assert_none_failed(out, names)


def test_the_worker_checks_every_recipe() -> None:
    # 16 of stock layers, all recipes but those with phases, 6 of them again, 2 of own scales, 8 of recompute, 3 of
    # main_grad, 6 by themselves
    assert len(worker.CHECKS) == 16 + len(PLAIN) + 6 + 2 + 8 + 3 + 6
