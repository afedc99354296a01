"""What is said of operands is the same at every layout: sums over the ranks that hold parts or copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowprec.linear.capture_file import Capture, read_capture
from tests.once import once
from tests.training.conftest import driving
from tests.training.helpers import argv, many_runs, rows

COMMON: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 128,
    "seq_length": 64,
    "train_iters": 2,
    "lr_decay_iters": 10,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "log_quantization_interval": 2,
}
# From one checkpoint: stages draw other weights than one process does.
START: dict[str, Any] = COMMON | {"exit_interval": 1}
RECIPES = ("mxfp8", "fp8_current", "fp8_rowwise")
# without a loss that balances experts, which a rank takes of its own tokens alone
EXPERTS: dict[str, Any] = {"num_experts": 4, "disable_bias_linear": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    # of the same two samples in the first microbatch
    "data": {"micro_batch_size": 1},
}
ALSO: dict[str, dict[str, Any]] = {"fp8_current": {"log_quantization_also": "fp8_rowwise"}}
CAPTURED: dict[str, Any] = {"capture_step": 2, "capture_layers": "layers.2.mlp.*"}


def cases() -> dict[str, dict[str, Any]]:
    start: dict[str, Any] = COMMON | CAPTURED | {"load": "start", "no_save": True}
    found = {
        f"{recipe} {layout}": start | ALSO.get(recipe, {}) | sizes | {"recipe": recipe}
        for recipe in RECIPES
        for layout, sizes in LAYOUTS.items()
    }
    sizes = {
        "expert_model_parallel_size": 2,
        "micro_batch_size": 1,
        "load": "experts start",
        "no_load_optim": True,
        "no_save": True,
    }
    found["experts"] = COMMON | EXPERTS | {"recipe": "mxfp8"} | sizes
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "quantization_log", run)


def run(folder: Path) -> None:
    with driving(folder) as drive:
        drive(argv(save="start", **START))
        for recipe in RECIPES:
            options = COMMON | CAPTURED | ALSO.get(recipe, {})
            drive(argv(save=f"{recipe} one", **options, recipe=recipe, load="start", no_save=True))
        drive(argv(save="experts start", **START, **EXPERTS))
        drive(argv(save="experts one", **COMMON, **EXPERTS, recipe="mxfp8", load="experts start", no_save=True))
    many_runs(2, [argv(save=name, **options) for name, options in cases().items()], folder)
    assert json.loads((folder / "errors.json").read_text()) == {}


def operands(folder: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {place: row for place, row in logged(folder).items() if place[2] != "output"}


def logged(folder: Path, recipe: str = "") -> dict[tuple[str, str, str], dict[str, Any]]:
    """Rows by the run's recipe, or by another one."""
    found = [row for row in rows(folder, "quantization.jsonl") if row.get("recipe", "") == recipe]
    by_place = {(row["linear"], row["gemm"], row["operand"]): row for row in found}
    assert len(by_place) == len(found)
    return by_place


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layout_logs_the_rows_of_one_process(folder: Path, recipe: str, layout: str) -> None:
    want, got = operands(folder / f"{recipe} one"), operands(folder / f"{recipe} {layout}")
    assert got.keys() == want.keys()
    # blocks along the tokens, and rows of them, lie in one rank's samples
    along_tokens = layout == "data" and recipe != "fp8_current"
    # a scale of all tokens is each data-parallel rank's own
    of_all_tokens = layout == "data" and recipe != "mxfp8"
    for place, row in want.items():
        other, (_, gemm, operand) = got[place], place
        # what several ranks have counts as often as it is there
        column_parallel = place[0].endswith(("linear_qkv", "linear_fc1"))
        whole = {"tensor": "input" if column_parallel else "grad_output", "data": "weight"}
        whole["sequence"] = whole["tensor"]
        assert other["entries"] == row["entries"] * (2 if whole.get(layout) == operand else 1), place
        # a rank's loss is a mean over its own samples
        factor = 2 if layout == "data" and operand == "grad_output" else 1
        assert other["amax"] == pytest.approx(factor * row["amax"], rel=0.2 if of_all_tokens else 1e-4), place
        if operand != "weight" and ((gemm == "wgrad" and along_tokens) or of_all_tokens):
            assert other["snr"] == pytest.approx(row["snr"], abs=1.5), place
        else:
            assert other["snr"] == pytest.approx(row["snr"], abs=0.02), place
            assert other["bias"] == pytest.approx(row["bias"], abs=1e-3), place
            assert other["saturation"] == row["saturation"] == 0.0, place
            assert other["underflow"] == pytest.approx(row["underflow"], abs=1e-3), place


@pytest.mark.slow
def test_experts_of_all_ranks_are_logged(folder: Path) -> None:
    want, got = operands(folder / "experts one"), operands(folder / "experts")
    assert got.keys() == want.keys()
    experts = {linear for linear, _, _ in want if "of expert" in linear}
    assert len(experts) == 2 * 2 * 4  # layers, linears, experts
    for place, row in want.items():
        if place[0] in experts:
            assert got[place]["entries"] == row["entries"], place  # each token goes to its experts once
            if place[1] != "wgrad":
                assert got[place]["snr"] == pytest.approx(row["snr"], abs=0.02), place


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "sequence"])
def test_outputs_that_ranks_split_are_those_of_one_process(folder: Path, layout: str) -> None:
    want, got = logged(folder / "mxfp8 one"), logged(folder / f"mxfp8 {layout}")
    assert got.keys() == want.keys()
    for place, row in want.items():
        if place[1:] == ("fprop", "output") and place[0].endswith(("linear_qkv", "linear_fc1")):
            assert got[place]["entries"] == row["entries"]
            assert got[place]["snr"] == pytest.approx(row["snr"], abs=0.02), place


def captures(folder: Path, name: str) -> list[Capture]:
    return [read_capture(path) for path in sorted(folder.glob(f"captures/iteration_2/*{name}*"))]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "sequence", "data"])
def test_captures_of_ranks_are_parts_of_one_process_s(folder: Path, layout: str) -> None:
    for name, split, whole in (("fc1", "w dy", "x"), ("fc2", "x w", "dy")):
        (one,) = captures(folder / "mxfp8 one", name)
        parts = captures(folder / f"mxfp8 {layout}", name)
        assert [part.file_name for part in parts] == [
            f"layers.2.mlp.linear_{name}.{'dp' if layout == 'data' else 'tp'}{rank}-of-2.safetensors" for rank in (0, 1)
        ]
        if layout == "data":
            tokens = torch.stack([part.x for part in parts], dim=1).flatten(0, 1)  # two samples a token position
            torch.testing.assert_close(tokens, one.x, rtol=1e-4, atol=1e-5)
            assert all(torch.equal(part.w, one.w) for part in parts)
            continue
        for tensor in split.split():
            axis = 0 if (name, tensor) == ("fc1", "w") else 1
            joined = torch.cat([getattr(part, tensor) for part in parts], dim=axis)
            torch.testing.assert_close(joined, getattr(one, tensor), rtol=1e-3, atol=1e-5)
        for part in parts:
            torch.testing.assert_close(getattr(part, whole), getattr(one, whole), rtol=1e-3, atol=1e-5)
            assert part.linear_id.spans[part.linear_id.split].start == part.tensor_parallel.rank * (
                one.w.shape[part.linear_id.split == "I"] // 2
            )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "sequence", "pipeline"])
def test_counterfactual_rows_equal_those_of_one_process(folder: Path, layout: str) -> None:
    want, got = (logged(folder / f"fp8_current {name}", "fp8_rowwise") for name in ("one", layout))
    assert got.keys() == want.keys() == set(operands(folder / "fp8_current one"))
    for place, row in want.items():
        assert got[place]["snr"] == pytest.approx(row["snr"], abs=0.02), place
        assert got[place]["scale_inv_max"] == pytest.approx(row["scale_inv_max"], rel=1e-3), place
