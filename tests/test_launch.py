"""Forked ranks: their world, and the end of a launch of which one rank fails."""

import json
from pathlib import Path

import pytest

from tests.environment import turned_gpus
from tests.launch import fork_ranks

pytestmark = pytest.mark.slow

MEET = """
import atexit, json, os, sys
import torch, torch.distributed as dist

atexit.register(print, "ended")
dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(total)
if dist.get_rank() == 1:
    found = {"argv": sys.argv[1:], "folder": os.getcwd(), "threads": torch.get_num_threads(), "total": int(total)}
    json.dump(found | {"gpus": torch.cuda.device_count()}, open("found.json", "w"))
dist.destroy_process_group()
"""
FAIL = """
import os, time

if os.environ["RANK"] == "1":
    raise SystemExit("rank 1 is out of memory")
time.sleep(1e6)
"""


def test_ranks_have_a_world_arguments_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "meet.py").write_text(MEET)
    assert fork_ranks(2, [str(tmp_path / "meet.py"), "--flag"], tmp_path).count("ended") == 2
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {"argv": ["--flag"], "folder": str(tmp_path), "threads": 1, "total": 3, "gpus": 0}


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(FAIL)
    with pytest.raises(AssertionError, match="rank 1 is out of memory"):
        fork_ranks(2, [str(tmp_path / "fail.py")], tmp_path)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "0,1,2"),
        ({"PYTEST_XDIST_WORKER": "gw4"}, "1,2,0"),
        ({"PYTEST_XDIST_WORKER": "gw2", "CUDA_VISIBLE_DEVICES": "3,5,7"}, "7,3,5"),
    ],
)
def test_workers_begin_with_different_gpus(environ: dict[str, str], expected: str) -> None:
    assert turned_gpus(3, environ) == expected
