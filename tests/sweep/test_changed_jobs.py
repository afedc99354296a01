"""A job that has become another run is refused; what changes nothing of a run is not."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lowprec.sweep import job_record
from megatron_lowprec.sweep.job_record import Record
from tests.sweep.conftest import BF16, MXFP4, Fake, WriteSweep


@pytest.mark.slow
def test_a_changed_job_is_refused_without_rerun(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep()
    fake.run(path)
    assert fake.run(path, "--set", "log-interval=3") == 0, "which changes nothing of the run"
    capsys.readouterr()
    assert fake.run(path, "--set", "lr=0.5") == 2
    error = capsys.readouterr().err
    assert f"2 of 2 jobs were started as other runs: {BF16} has lr 0.5 (was 0.0015); give the earlier options" in error
    assert "--rerun" in error
    assert fake.run(path, "--set", "lr=0.5", "--only", "bf16", "--rerun") == 0
    assert len(fake.calls(BF16)) == 1
    assert "0.5" in fake.calls(BF16)[0]["argv"]
    assert (fake.out / f"{BF16}.1" / "metrics.jsonl").exists()
    assert len(fake.calls(MXFP4)) == 1
    # nothing has changed since, so --rerun repeats nothing
    assert fake.run(path, "--set", "lr=0.5", "--only", "bf16", "--rerun") == 0
    assert not (fake.out / f"{BF16}.2").exists()


@pytest.mark.slow
def test_a_change_of_a_recipe_s_fields_is_named(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    def path(block: int) -> str:
        fields = [f"{gemm}.hadamard.block={block}" for gemm in ("dgrad", "wgrad")]
        return write_sweep(recipes=[{"label": "rht", "recipe": "mxfp4_rht", "recipe_set": fields}])

    fake.behave(mxfp4_rht="fail")
    fake.run(path(32))
    assert fake.run(path(64)) == 2, "a failed one would continue as another"
    assert "recipe.dgrad.hadamard.block 64 (was 32)" in capsys.readouterr().err


@pytest.mark.slow
def test_fields_that_recipes_get_later_change_no_job(fake: Fake, write_sweep: WriteSweep) -> None:
    path = write_sweep(recipes=["mxfp4"])
    fake.run(path)
    record = fake.record(MXFP4)
    del record["resolved"]["recipe"]["keep_bf16"], record["resolved"]["recipe"]["dgrad"]["hadamard"]
    record["hash"] = "of another version"
    (fake.out / MXFP4 / "cell.json").write_text(json.dumps(record))
    assert fake.run(path) == 0
    assert len(fake.calls(MXFP4)) == 1


def test_a_default_that_is_named_and_logs_that_move_change_no_job() -> None:
    def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
        parts = [{"options": options, "recipe": {}, "processes": 1} for options in (before, now)]
        fields = dict.fromkeys((field.name for field in dataclasses.fields(Record)), None)
        record = Record(**{**fields, "resolved": parts[0], "hash": "of another version"})  # type: ignore[arg-type]
        return job_record.differences(record, SimpleNamespace(resolved=parts[1]))  # type: ignore[arg-type]

    # Versions before counted --keep-last, and had --fp8-param-gather off by default.
    assert differences({"lr": 1.0, "keep_last": 1}, {"lr": 1.0, "fp8_param_gather": False}) == []
    assert differences({"lr": 1.0}, {"lr": 1.0, "fp8_param_gather": True}) == ["fp8-param-gather True (was not set)"]
    assert differences({"fp8_param_gather": True}, {"fp8_param_gather": False}) == ["fp8-param-gather False (was True)"]
