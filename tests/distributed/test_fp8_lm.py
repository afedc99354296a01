"""Recipe fp8_lm on two processes: narrow optimizer state and gradients sent in FP8, on layouts, stopped and resumed.

All runs share one launch of torchrun, but those of one process.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.errors import UserError
from tests.training.conftest import driving
from tests.training.helpers import argv, losses, many_runs, rows

STATE = [
    word
    for override in ("optimizer.exp_avg=e4m3", "optimizer.exp_avg_sq=fp16", "optimizer.master=fp16")
    for word in ("--recipe-override", override)
]
COMMON: dict[str, Any] = {"train_iters": 4, "lr_decay_iters": 10, "log_params_norm": True}
COMPARABLE: dict[str, Any] = COMMON | {"hidden_dropout": 0, "attention_dropout": 0}
LM: dict[str, Any] = COMMON | {"recipe": "fp8_lm", "bf16": True}
OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
}
ALIKE = ("data", "tensor", "sequence")  # stages of a pipeline draw other weights
RESUMED: dict[str, dict[str, Any]] = {
    "data": OVERLAP | {"async_save": True},
    "data, half gradients": {"grad_reduce_in_bf16": True},
    "data, fp32": {"bf16": None},
    "sequence": LAYOUTS["sequence"],
    "pipeline": LAYOUTS["pipeline"],
    "interleaved": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4},
    "experts": {"num_experts": 4, "expert_model_parallel_size": 2, "disable_bias_linear": True},
}


def cases() -> dict[str, list[str]]:
    """Folder -> command line, in the order in which they run."""
    found: dict[str, list[str]] = {}
    for layout in ALIKE:
        sizes = LAYOUTS[layout]
        found[f"state {layout}"] = argv(**COMPARABLE | sizes, recipe="bf16", no_save=True) + STATE
    found["state data, overlapped"] = [
        *argv(**COMPARABLE | OVERLAP, recipe="bf16", no_save=True, use_distributed_optimizer=True),
        *STATE,
    ]
    found["exchange"] = argv(**LM, no_save=True)
    found["exchange overlapped"] = argv(**LM | OVERLAP, no_save=True, use_distributed_optimizer=True)
    found["exchange, rounded sums"] = [*argv(**LM, no_save=True), "--recipe-override", "gradients.sum=format"]
    found["fp8_delayed"] = argv(**LM | {"recipe": "fp8_delayed"}, no_save=True, use_distributed_optimizer=True)
    for name, options in RESUMED.items():
        common = LM | {"use_distributed_optimizer": True} | options
        found[f"{name} whole"] = argv(**common, no_save=True)
        found[f"{name} resumed"] = argv(**common, exit_interval=2)
        found[f"{name} resumed again"] = argv(**common | {"save": f"{name} resumed"})
    # Written by one recipe or layout, continued by another.
    found["half of fp8_lm"] = argv(**LM, exit_interval=2)
    for layout in ("tensor", "pipeline"):
        found[f"to {layout}"] = argv(**LM | LAYOUTS[layout], load="half of fp8_lm", no_save=True)
    found["to fp8_delayed"] = argv(
        **LM | {"recipe": "fp8_delayed"}, load="half of fp8_lm", no_save=True, use_distributed_optimizer=True
    )
    found["half of fp8_delayed"] = argv(
        **LM | {"recipe": "fp8_delayed"}, exit_interval=2, use_distributed_optimizer=True
    )
    found["from fp8_delayed"] = argv(**LM, load="half of fp8_delayed", no_save=True)
    found["from weights"] = argv(**LM, load="half of fp8_delayed", no_save=True, finetune=True)
    found["from weights, fp8_delayed"] = argv(
        **LM | {"recipe": "fp8_delayed"},
        load="half of fp8_delayed",
        no_save=True,
        finetune=True,
        use_distributed_optimizer=True,
    )
    found["bad numbers"] = argv(**LM, lr=1e38, max_skipped_steps=2)
    return {name: line if "--save" in line else [*line, "--save", name] for name, line in found.items()}


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all workers of xdist: the first that comes makes it, the others wait."""
    common = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        common = common.parent
    folder = common / "fp8_lm"
    with (common / "fp8_lm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            many_runs(2, list(cases().values()), folder)
    errors = json.loads((folder / "errors.json").read_text())
    assert list(errors) == [str(list(cases()).index("bad numbers"))], errors
    return folder


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one")
    with driving(folder) as call:
        call([*argv(save="out", no_save=True, recipe="bf16", **COMPARABLE), *STATE])
    return rows(folder / "out")


def values(found: list[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in found if key in row]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ALIKE)
def test_the_state_means_the_same_on_any_layout(one_process: list[dict[str, Any]], launch: Path, layout: str) -> None:
    # In fp32 compute. Gradients differ by the order of their sums, which moves an entry's code here and there: its
    # moment by a sixteenth, a ten-thousandth of the learning rate's step on average over entries.
    found = rows(launch / f"state {layout}")
    assert values(found, "lm loss")[0] == pytest.approx(values(one_process, "lm loss")[0], rel=1e-6)
    for key, tolerance in (("lm loss", 2e-6), ("grad-norm", 2e-5), ("params-norm", 2e-6)):
        assert values(found, key) == pytest.approx(values(one_process, key), rel=tolerance), key


@pytest.mark.slow
def test_collectives_on_their_way_change_no_bit(launch: Path) -> None:
    assert losses(launch / "state data, overlapped") == losses(launch / "state data")
    assert losses(launch / "exchange overlapped") == losses(launch / "exchange")
    assert len(losses(launch / "exchange")) == 4


@pytest.mark.slow
def test_it_trains_as_fp8_delayed_does_and_not_the_same(launch: Path) -> None:
    reference = values(rows(launch / "fp8_delayed"), "lm loss")
    for name in ("exchange", "exchange, rounded sums"):
        found = rows(launch / name)
        assert values(found, "lm loss") == pytest.approx(reference, rel=5e-3)
        assert values(found, "lm loss")[0] == reference[0]
        assert values(found, "grad-norm")[0] != values(rows(launch / "fp8_delayed"), "grad-norm")[0]
        assert values(found, "grad-norm")[0] == pytest.approx(
            values(rows(launch / "fp8_delayed"), "grad-norm")[0], rel=0.05
        )
    assert losses(launch / "exchange") != losses(launch / "exchange, rounded sums")


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_bit_equal(launch: Path, name: str) -> None:
    assert losses(launch / f"{name} resumed") == losses(launch / f"{name} whole")
    assert len(losses(launch / f"{name} whole")) == 4


@pytest.mark.slow
def test_its_checkpoint_is_any_layout_s_and_any_recipe_s(launch: Path) -> None:
    whole = values(rows(launch / "data whole"), "lm loss")[2:]
    # Dropout draws otherwise on another layout.
    for layout in ("tensor", "pipeline"):
        assert values(rows(launch / f"to {layout}"), "lm loss") == pytest.approx(whole, rel=5e-3)
    assert values(rows(launch / "to fp8_delayed"), "lm loss") == pytest.approx(whole, rel=5e-3)
    delayed = values(rows(launch / "fp8_delayed"), "lm loss")[2:]
    assert values(rows(launch / "from fp8_delayed"), "lm loss") == pytest.approx(delayed, rel=5e-3)


@pytest.mark.slow
def test_without_an_optimizer_s_state_main_weights_are_the_loaded_weights(launch: Path) -> None:
    found, reference = (values(rows(launch / f"from weights{more}"), "lm loss") for more in ("", ", fp8_delayed"))
    assert found[0] == reference[0]
    assert found == pytest.approx(reference, rel=5e-3)


@pytest.mark.slow
def test_gradients_that_are_not_finite_take_no_step(launch: Path) -> None:
    (error,) = json.loads((launch / "errors.json").read_text()).values()
    assert "2 iterations in a row were skipped" in error
    assert [row["skipped iterations"] for row in rows(launch / "bad numbers")] == [0, 1, 2]


@pytest.mark.slow
def test_what_it_needs_is_switched_on_and_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with driving(tmp_path) as call:
        call(argv(save="out", no_save=True, recipe="fp8_lm", train_iters=1))
    said = capfd.readouterr().out
    assert "recipe fp8_lm: --use-distributed-optimizer is on" in said
    assert "optimizer ScaledAdamW of megatron_lowprec" in said
    assert "optimizer: exp_avg E4M3, exp_avg_sq FP16, master FP16" in said
    assert "gradients: exchanged by data-parallel ranks in E4M3" in said


def test_fp8_weights_have_no_main_weights_to_be_made_from(tmp_path: Path) -> None:
    with driving(tmp_path) as call, pytest.raises(UserError, match="makes FP8 weights from fp32 main weights"):
        call(argv(save="out", recipe="fp8_lm", bf16=True, fp8_param_gather=True, use_distributed_optimizer=True))
