"""--native of the driver: what is required, said and recorded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.backends.blackwell_mx.start_check import Check, NativeCheckWarning, StartChecks
from megatron_lowprec.linear.backends.table import choose
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.monitoring import native_check
from megatron_lowprec.training.monitoring.run_metadata import RunRecord

CPU = torch.device("cpu")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartChecks]:
    """Checks of its own, on a pretended Blackwell GPU with one rank."""
    found = StartChecks()
    monkeypatch.setattr(native_check, "CHECKS", found)
    monkeypatch.setattr(native_check, "arch_of", lambda _: "sm100")
    monkeypatch.setattr(native_check, "on_any_rank", lambda here, _: here)
    return found


def said_after(config: Config, iterations: int = 2) -> tuple[list[str], list[dict[str, Any]]]:
    said, recorded = list[str](), list[dict[str, Any]]()
    check = native_check.NativeCheck(config, CPU, said.append, lambda checks, fell_back: recorded.append(checks))
    for _ in range(iterations):
        check.after_iteration()
    return said, recorded


def test_a_required_product_that_would_be_emulated_ends_the_start(start: StartChecks) -> None:
    spec = get_recipe("mxfp8").fprop
    here, elsewhere = (choose("fprop", spec, Target(arch, 256, 256)) for arch in ("sm100", "sm90"))
    native_check.prepare("require", {here: ["fprop"]})
    assert start.required
    with pytest.raises(UserError, match=r"GEMMs are emulated \(fprop: blackwell_mx: no MXFP8 GEMM on sm90\)"):
        native_check.prepare("require", {here: ["fprop"], elsewhere: ["fprop"]})
    native_check.prepare("auto", {elsewhere: ["fprop"]})
    assert not start.required


def test_the_check_is_said_and_recorded_once(start: StartChecks) -> None:
    start.record(("a",), Check("fprop [2, 3]", 0.25))
    said, recorded = said_after(Config())
    assert said == ["native products checked at start: 1 comparisons, the worst at 0.25 of its bound"]
    checks = [{"what": "fprop [2, 3]", "error": 0.25, "fault": ""}]
    assert recorded == [{"fault": "", "experts_fault": "", "checks": checks}]
    assert said_after(Config(native="off")) == ([], [])


def test_a_fault_of_experts_is_said_and_recorded(start: StartChecks) -> None:
    """The products of single experts stay native, and are no fault."""
    start.record(("a",), Check("fprop [2, 3]", 0.25))
    with pytest.warns(NativeCheckWarning, match="a grouped native product failed its check"):
        start.record(("b",), Check("fprop of 2 experts", 3.0, "wrong"), of_experts=True)
    said, (recorded,) = said_after(Config())
    assert said == [
        "native products checked at start: 2 comparisons, the worst at 0.25 of its bound; experts run one after the "
        "other, fprop of 2 experts: wrong"
    ]
    assert (recorded["fault"], recorded["experts_fault"]) == ("", "fprop of 2 experts: wrong")


def test_faults_of_another_rank_are_said(start: StartChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_check, "on_any_rank", lambda *_: True)
    said, _ = said_after(Config())
    assert said == [
        "native products FAILED their check on another rank, which emulates: see its warning",
        "a grouped native product failed its check on another rank: its experts run one by one",
    ]


def test_a_run_whose_products_failed_is_recorded_as_emulated(start: StartChecks, tmp_path: Path) -> None:
    """An emulated speed is never reported as a native one."""
    facts = {"gemms": {"fprop": "hopper_fp8 on sm100", "dgrad": "blackwell_mx on sm100"}}
    record = RunRecord(tmp_path / "run.json", True, facts, continues=False)
    with pytest.warns(NativeCheckWarning):
        start.record(("a",), Check("dgrad [2, 3]", 7.0, "wrong"))
    native_check.NativeCheck(Config(), CPU, lambda *_: None, record.native_check).after_iteration()
    written = json.loads((tmp_path / "run.json").read_text())
    assert written["native_check"]["fault"] == "dgrad [2, 3]: wrong"
    assert written["gemms"] == {
        "fprop": "hopper_fp8 on sm100",
        "dgrad": "emulated (blackwell_mx on sm100: failed its check)",
    }
