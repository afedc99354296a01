"""What a test's processes are started with."""

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACE_IN_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets and, without it, the driver does, also for later tests of a process."""


def python_path() -> dict[str, str]:
    """``PYTHONPATH`` with this repository before what is there: it may provide packages."""
    there = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": str(ROOT) if not there else f"{ROOT}{os.pathsep}{there}"}


def turned_gpus(count: int, environ: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES with the ``count`` visible GPUs; workers of pytest-xdist begin with different ones."""
    names = (environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")[:count]
    first = int(environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % count
    return ",".join(names[first:] + names[:first])
