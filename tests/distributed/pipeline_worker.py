"""Runs of the driver on two pipeline stages: ``torchrun pipeline_worker.py CASES.json``, name -> command line.

Each run is made as the driver makes it, into NAME, and again with every stage's outputs kept, into "NAME kept".
``stageRANK.json`` says, by run, of each output that was sent on whether its memory was free then.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lowprec.training.distributed import startup
from tests.training.many_runs import Meetings


@contextmanager
def recorded(keep: bool) -> Iterator[list[bool]]:
    """For each output of a stage that is sent on in training: whether its memory is free afterwards."""
    from megatron.core.pipeline_parallel import schedules

    from megatron_lowprec.training import model

    freed: list[bool] = []

    def deallocate(out: torch.Tensor | None, asked: bool, inner: Any = schedules.deallocate_output_tensor) -> None:
        goes_on = out is not None and out.numel() > 1  # the last stage's loss does not
        memory = StorageWeakRef(out.untyped_storage()) if goes_on else None  # type: ignore[union-attr]
        inner(out, asked)
        if memory is not None:
            freed.append(memory.expired())

    def transformer_config(*arguments: Any, inner: Any = model.transformer_config) -> Any:
        found = inner(*arguments)
        if keep:
            found.deallocate_pipeline_outputs = False
        return found

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(schedules, "deallocate_output_tensor", deallocate)
        monkeypatch.setattr(model, "transformer_config", transformer_config)
        yield freed


def main(cases: Path) -> None:
    ranks = startup.prepare_environment()
    from megatron_lowprec.training.run import run

    meetings = Meetings(ranks.rank)
    found: dict[str, list[bool]] = {}
    for case, arguments in json.loads(cases.read_text()).items():
        for name, keep in ((case, False), (f"{case} kept", True)):
            meetings.arrange(name)
            with recorded(keep) as freed:
                run([*arguments, "--save", name], ranks)
            found[name] = freed
    Path(f"stage{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
