"""--wandb-project: a requeued run is one run of W&B, by the package itself where it is installed."""

from __future__ import annotations

import importlib.machinery
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.training import loop
from tests.training.conftest import Drive
from tests.training.helpers import argv, rows

COMMON: dict[str, Any] = {"save": "out", "train_iters": 4, "lr_decay_iters": 10, "eval_iters": 1}
COMMON |= {"wandb_project": "tiny", "wandb_entity": "team", "wandb_exp_name": "the run"}


class Recorded:
    """A run of W&B."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.exit_code: int | None = None

    def log(self, row: dict[str, float], step: int) -> None:
        assert self.exit_code is None
        self.rows.append((step, row))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Runs of a module in the place of W&B's."""
    module, found = ModuleType("wandb"), list[Recorded]()
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)

    def init(**options: Any) -> Recorded:
        found.append(Recorded(**options))
        return found[-1]

    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return found


def test_a_requeued_run_goes_on_in_its_run_of_wandb(drive: Drive, recorded: list[Recorded]) -> None:
    drive(argv(**COMMON, exit_interval=2))
    drive(argv(**COMMON))
    first, second = recorded
    assert first.options["id"] == second.options["id"] == json.loads(Path("out/run.json").read_text())["run_id"]
    assert {run.options["resume"] for run in recorded} == {"allow"}
    named = {tuple(run.options[key] for key in ("entity", "project", "name")) for run in recorded}
    assert named == {("team", "tiny", "the run")}
    assert second.options["config"]["options"]["num_layers"] == 2
    logged = [[(step, row["lm loss"]) for step, row in run.rows if "lm loss" in row] for run in recorded]
    assert [*logged[0], *logged[1]] == [
        (row["iteration"], row["lm loss"]) for row in rows(Path("out")) if "lm loss" in row
    ]
    assert [run.exit_code for run in recorded] == [0, 0]


@pytest.mark.parametrize(
    "start", [{"save": "new"}, {"save": "new", "load": "out"}, {"load": "out", "ckpt_step": 2}], ids=str
)
def test_another_run_is_another_run_of_wandb(drive: Drive, recorded: list[Recorded], start: dict[str, Any]) -> None:
    """Also one that goes back in its own folder: W&B keeps no second row of an iteration."""
    drive(argv(**COMMON | {"train_iters": 3, "save_interval": 1}))
    drive(argv(**COMMON | start))
    assert recorded[0].options["id"] != recorded[1].options["id"]


def out_of_memory(*_: Any) -> Any:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("function", "failing", "words"),
    [("train_step", out_of_memory, "out of memory"), ("weights_are_finite", lambda _: False, "weights are not finite")],
)
def test_a_run_that_fails_is_shown_as_failed(
    drive: Drive, recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch, function: str, failing: Any, words: str
) -> None:
    monkeypatch.setattr(loop, function, failing)
    with pytest.raises((RuntimeError, UserError), match=words):
        drive(argv(**COMMON))
    assert [run.exit_code for run in recorded] == [1]


def records(path: Path) -> Iterator[Any]:
    """Records of one of W&B's files: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # of its block
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def test_the_package_itself_takes_a_requeued_run(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb (extra 'wandb') is not installed; a weekly workflow installs it")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    drive(argv(**COMMON, exit_interval=2))
    drive(argv(**COMMON))
    run_id = json.loads(Path("out/run.json").read_text())["run_id"]
    files = sorted(Path("out/wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 2
    losses: list[tuple[int, float]] = []
    for path in files:
        found = list(records(path))
        (run,) = (record.run for record in found if record.WhichOneof("record_type") == "run")
        assert (run.run_id, run.project, run.display_name) == (run_id, "tiny", "the run")
        assert [r.exit.exit_code for r in found if r.WhichOneof("record_type") == "exit"] == [0]
        for row in (record.history for record in found if record.WhichOneof("record_type") == "history"):
            values = {item.key or ".".join(item.nested_key): item.value_json for item in row.item}
            if "lm loss" in values:
                losses.append((row.step.num, float(values["lm loss"])))
    written = [(row["iteration"], row["lm loss"]) for row in rows(Path("out")) if "lm loss" in row]
    assert losses == written
    assert len(losses) == 4
