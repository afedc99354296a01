"""What ``cpu_compat.install`` changes in torch."""

import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.mcore.one_process import one_process


def polling_threads() -> int:
    return sum("gloo_tcp_loop" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(torch.cuda.is_available(), reason="changes nothing with CUDA")
def test_gloo_groups_share_one_polling_thread() -> None:
    with one_process():
        before = polling_threads()
        groups = [dist.new_group([0], timeout=timedelta(seconds=20 + i)) for i in range(3)]
        assert polling_threads() == before
        for i, group in enumerate(groups):
            backend = group._get_backend(torch.device("cpu"))
            assert backend.options._timeout == timedelta(seconds=20 + i)
            x = torch.ones(2)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [1, 1]
            dist.destroy_process_group(group)
