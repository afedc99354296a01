"""--log-quantization-interval: rows about every operand, of a run that they change nothing of."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec import get_recipe
from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.linear_id import DIMS
from megatron_lowprec.mcore.debug.operand_probe import OperandId
from megatron_lowprec.quantization.error_stats import QuantizationError
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.paths import keep_older_run, run_paths
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.models.sizes import linear_sites
from megatron_lowprec.training.monitoring.counterfactuals import check_counterfactuals
from megatron_lowprec.training.monitoring.quantization_log import (
    quantization_lines,
    quantization_row,
    quantization_scalars,
)
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses, rows
from tests.training.test_deterministic import as_before  # noqa: F401 - for the runs in deterministic mode here

LAYERS = ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_proj", "self_attention.linear_qkv")
COMMON: dict[str, Any] = {"train_iters": 4, "bf16": True, "hidden_dropout": 0.1, "no_save": True}


def operands(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows(folder, "quantization.jsonl") if row["operand"] != "output" and "recipe" not in row]


def quantized(recipe: str) -> list[tuple[str, str]]:
    found = get_recipe(recipe)
    return [(gemm, operand) for gemm, operand in DIMS if getattr(getattr(found, gemm), operand) is not None]


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4_all", "mxfp4_rht_sr"])
def test_rows_of_every_operand_and_the_same_run(drive: Drive, capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    sizes = {"hidden_size": 128, "recipe": recipe}
    drive(argv(save="plain", **COMMON, **sizes))
    assert "quantization" not in capsys.readouterr().out
    drive(argv(save="looked at", log_quantization_interval=2, **COMMON, **sizes))
    printed = capsys.readouterr().out
    assert losses(Path("looked at")) == losses(Path("plain"))
    every = operands(Path("looked at"))
    where = [(f"layers.{layer}.{name}", *place) for layer in (1, 2) for name in LAYERS for place in quantized(recipe)]
    for iteration in (2, 4):
        found = [row for row in every if row["iteration"] == iteration]
        assert [(row["linear"], row["gemm"], row["operand"]) for row in found] == where
        assert all(5 < row["snr"] < 60 and 0 <= row["underflow"] < 1 and 0 <= row["saturation"] < 1 for row in found)
        worst = min(found, key=lambda row: row["snr"])
        name = f"{worst['linear']} {worst['gemm']} {worst['operand']}"
        assert f"quantization at iteration {iteration} | lowest SNR: {worst['snr']:.1f} dB, {name} |" in printed
    assert len(every) == 2 * len(where)
    assert "quantization:  looked at/quantization.jsonl" in printed
    tokens, bf16_input = (
        2 * 32,
        next(row for row in every if row["linear"].endswith("fc2") and row["operand"] == "input"),
    )
    assert bf16_input["entries"] == tokens * 4 * 128  # the first of two microbatches


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp4_rht_sr"])
@pytest.mark.parametrize("graphs", [False, True])
def test_native_runs_have_rows_with_and_without_graphs(drive: Drive, recipe: str, graphs: bool) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "seq_length": 128, "recipe": recipe}
    sizes["cuda_graph_impl"] = "local" if graphs else "none"
    common = COMMON | sizes | {"deterministic_mode": True, "train_iters": 6}
    drive(argv(save="plain", **common))
    drive(argv(save="looked at", log_quantization_interval=3, **common))
    # sums for biases are taken in other parts where operands are not made on the way
    for got, want in zip(losses(Path("looked at")), losses(Path("plain")), strict=True):
        assert float.fromhex(got) == pytest.approx(float.fromhex(want), abs=2e-3)
    found = [row for row in operands(Path("looked at")) if row["iteration"] == 6]
    assert len(found) == 2 * len(LAYERS) * len(quantized(recipe))
    assert all(12 < row["snr"] < 40 for row in found)


def test_a_weight_gradient_near_its_noise_is_named_once(
    drive: Drive, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_lowprec.training.monitoring.log.CRITICAL_RATIO", 1e3)
    drive(argv(save="run", **COMMON | {"train_iters": 2}, recipe="mxfp4_rht_sr", log_quantization_interval=1))
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert [line.split(": ")[1] for line in warnings] == [f"layers.{n}.{name}" for n in (1, 2) for name in LAYERS]
    ratios = [row["gradient_to_noise"] for row in rows(Path("run"), "quantization.jsonl") if "gradient_to_noise" in row]
    assert f"weight gradient is {ratios[0]:.2f} times that of its quantization noise" in warnings[0]
    assert all(1 < ratio < 1e3 for ratio in ratios)


def test_recomputed_activations_count_once(drive: Drive) -> None:
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    common = COMMON | {"recipe": "mxfp4_rht_sr", "hidden_size": 128, "log_quantization_interval": 4}
    drive(argv(save="kept", **common))
    drive(argv(save="recomputed", **common, **again))
    assert rows(Path("recomputed"), "quantization.jsonl") == rows(Path("kept"), "quantization.jsonl")


def test_a_run_that_goes_on_writes_each_row_once(drive: Drive) -> None:
    common: dict[str, Any] = {"train_iters": 4, "recipe": "fp8_delayed", "log_quantization_interval": 1}
    drive(argv(save="whole", **common, no_save=True))
    drive(argv(save="stopped", **common, exit_interval=2))
    with Path("stopped/quantization.jsonl").open("a") as file:  # as if it had gone on behind its checkpoint
        file.write(json.dumps({"iteration": 3}) + "\n" + '{"iteration": 4, "li')
    drive(argv(save="stopped", **common))
    assert operands(Path("stopped")) == operands(Path("whole"))
    drive(argv(save="whole", **common, no_save=True))  # a new run
    assert operands(Path("whole")) == operands(Path("stopped"))
    assert len(list(Path("whole").glob("quantization*.jsonl"))) == 2


def test_weights_that_are_fp8_themselves_are_left_out(drive: Drive) -> None:
    flags = {"fp8_param_gather": True, "use_distributed_optimizer": True, "recipe": "fp8_delayed"}
    drive(argv(save="primary", log_quantization_interval=4, **COMMON, **flags))
    found = {(row["gemm"], row["operand"]) for row in operands(Path("primary"))}
    assert found == {place for place in DIMS if place[1] != "weight"}


def test_non_finite_rows_come_first() -> None:
    places = [OperandId(layer, "mlp.linear_fc1", -1, 0, "fprop", "input", "e4m3") for layer in (1, 2)]
    fine, bad = QuantizationError(64, 2.0, 30.0, 1e-3, 0.25, 0.0), QuantizationError(64, math.inf, None, None, 0.0, 0.0)
    operands = list(zip(places, (fine, bad), strict=True))
    assert list(quantization_lines(7, operands)) == [
        " quantization at iteration 7 | not finite: 1 of 2 operands, first layers.2.mlp.linear_fc1 fprop input | "
        "lowest SNR: 30.0 dB, layers.1.mlp.linear_fc1 fprop input | "
        "most underflow: 25.00%, layers.1.mlp.linear_fc1 fprop input | no saturation |"
    ]
    assert quantization_row(7, *operands[1])["amax"] is None
    scalars = quantization_scalars(operands)
    assert scalars["quantization/operands not finite"] == 1.0
    assert scalars["quantization/fprop input SNR lowest"] == 30.0


def test_an_older_run_s_rows_are_kept(tmp_path: Path) -> None:
    config, paths = run_paths(Config(save=str(tmp_path / "run")), "bf16")
    paths.run.mkdir()
    for path in (paths.metrics, paths.quantization, paths.run / "quantization.1.jsonl"):
        path.write_text(path.name)
    assert len(keep_older_run(paths, config)) == 1
    assert sorted(path.name for path in paths.run.iterdir()) == [
        *("metrics.2.jsonl", "quantization.1.jsonl", "quantization.2.jsonl"),
    ]
    assert (paths.run / "quantization.2.jsonl").read_text() == "quantization.jsonl"


def test_curves_of_an_older_run_are_moved_too(tmp_path: Path) -> None:
    config, paths = run_paths(Config(save=str(tmp_path / "run")), "bf16")
    paths.tensorboard.mkdir(parents=True)
    (paths.tensorboard / "events").touch()
    keep_older_run(paths, config)
    assert [path.name for path in paths.run.iterdir()] == ["tensorboard.1"]
    config, shared = run_paths(replace(config, tensorboard_dir=str(tmp_path / "boards")), "bf16")
    shared.tensorboard.mkdir()
    assert keep_older_run(shared, config) == [], "of several runs"


def test_other_recipes_have_phases_of_the_run_s_length(drive: Drive, tmp_path: Path) -> None:
    """--recipe-phase-iters keeps the step of a fraction: here 2 of 8, not 1 of 4."""
    for name in ("own", "other"):
        text = f"base: {'mxfp8' if name == 'own' else 'fp8_current'}\nphases: [{{from_fraction: 0.25, gemms: bf16}}]\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    flags = {"log_quantization_interval": 2, "log_quantization_also": str(tmp_path / "other.yaml"), "train_iters": 4}
    drive(argv(save="out", recipe=str(tmp_path / "own.yaml"), recipe_phase_iters=8, no_save=True, **flags))
    found = rows(Path("out"), "quantization.jsonl")
    assert {(row["iteration"], row.get("recipe")) for row in found} == {(2, None), (2, "other")}


def test_bf16_writes_no_quantization_log(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"log_quantization_interval": 2, "log_quantization_also": ["mxfp8", "fp8_rowwise"]}
    drive(argv(save="plain", recipe="bf16", no_save=True, **flags))
    printed = capsys.readouterr().out
    assert "quantization at iteration 2 | no operand is quantized |" in printed
    assert "quantization at iteration 2 by fp8_rowwise | lowest SNR: " in printed
    found = rows(Path("plain"), "quantization.jsonl")
    assert len(found) == 2 * 2 * len(LAYERS) * len(DIMS)
    assert {row["recipe"] for row in found} == {"mxfp8", "fp8_rowwise"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"log_quantization_interval": 0}, "--log-quantization-interval 0"),
        (
            {"log_quantization_also": "mxfp8"},
            "--log-quantization-also .* does nothing without --log-quantization-interval",
        ),
        (
            {"log_quantization_interval": 5, "transformer_impl": "transformer_engine"},
            "is for --transformer-impl local, and this run has --transformer-impl transformer_engine; give --transf",
        ),
    ],
)
def test_invalid_options_are_refused(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str) -> None:
    monkeypatch.setattr("megatron_lowprec.training.config.resolve._check_implementation", lambda *_: None)
    with pytest.raises(UserError, match=said):
        resolve_run(resolve_model(parse(argv(**changes))[0]), 1, gpus=True)


@pytest.mark.parametrize(
    ("also", "said"),
    [
        ("mxfp8,fp8_delayed", "fp8_delayed has delayed scaling"),
        (["mxfp8", "mxfp8"], "mxfp8 is given twice"),
        ("bf16", "bf16 quantizes nothing"),
        ("mxfp4_rht", "--log-quantization-also mxfp4_rht: .* no multiple of 64.*; or leave it out there"),
        ("mxfp9", "mxfp8"),
    ],
)
def test_other_recipes_that_are_refused(also: Any, said: str) -> None:
    config = resolve_model(parse(argv(log_quantization_interval=5, log_quantization_also=also, hidden_size=96))[0])
    with pytest.raises(UserError, match=said):
        check_counterfactuals(config, linear_sites(config), 2, 1)
