"""Many checks in one launch: a module has ``CHECKS``, functions by name that assert on every rank.

Run as a program, the module calls ``run_checks``. Its test calls ``assert_none_failed``.
"""

import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
import torch.distributed as dist


def run_checks(checks: Mapping[str, Callable[[], None]]) -> None:
    """``module OUT.json [NAME...]``: rank 0 writes one JSON object, name -> "" or what went wrong on any rank."""
    out, *chosen = sys.argv[1:]
    gc.collect()
    gc.freeze()  # modules: later collections skip them
    results: dict[str, str] = {}
    for name in chosen or checks:
        fault = ""
        try:
            checks[name]()
        except (Exception, pytest.fail.Exception):  # noqa: BLE001  reported by name, and the other checks still run
            fault = f"rank {dist.get_rank()}: {traceback.format_exc()}"
        faults: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(faults, fault)
        results[name] = "\n".join(filter(None, faults))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


def assert_none_failed(out: Path, names: Iterable[str] | None = None) -> None:
    """Some checks ran, or all of these, and none failed."""
    results = json.loads(out.read_text(encoding="utf-8"))
    assert results
    assert names is None or list(results) == list(names)
    failed = {name: fault for name, fault in results.items() if fault}
    assert not failed, "\n\n".join(f"{name}\n{fault}" for name, fault in failed.items())
