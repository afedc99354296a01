"""`megatron-lowprec lab` operand-error and recipe-diff on operands written as a run writes them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowprec import get_recipe
from megatron_lowprec.commands import lab as numerics
from megatron_lowprec.errors import UserError
from megatron_lowprec.lab import experiment
from megatron_lowprec.lab.captured import captured_products, operand_error, recipe_diff
from megatron_lowprec.linear.backends import resolved
from megatron_lowprec.linear.capture_file import Capture, RankOf, write_capture
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import GEMM_OPERANDS

TOKENS, IN, OUT = 64, 96, 64


def capture_of(recipe: str, **changes: Any) -> Capture:
    generator = torch.Generator().manual_seed(5)
    x, w, dy = (torch.randn(shape, generator=generator) for shape in ((TOKENS, IN), (OUT, IN), (TOKENS, OUT)))
    identity = LinearId(3, "mlp.linear_fc1")
    tensors = {"x": x.bfloat16(), "w": (0.02 * w).bfloat16(), "dy": 1e-3 * dy}
    return Capture(
        **tensors, recipe=get_recipe(recipe), linear_id=identity, iteration=7, seed=1, amax_in_effect={}, **changes
    )


def rows_of(recipe: str, draws: int = 16, captured: str = "bf16") -> dict[tuple[str, str], Any]:
    found = operand_error.error_rows(capture_of(captured), get_recipe(recipe), draws)
    return {(row["gemm"], row["what"]): row for row in found}


def test_the_error_of_draws_parts_into_a_shared_one_and_noise() -> None:
    signal = torch.full((1000,), 10.0, dtype=torch.float64)
    noise = torch.tensor([1.0, -1.0] * 500, dtype=torch.float64)
    row = operand_error.draw_row(signal, [signal + 0.5 + noise, signal + 0.5 - noise])
    assert row["one"] == pytest.approx(10 * math.log10(100 / 1.25))
    assert row["mean"] == pytest.approx(10 * math.log10(100 / 0.25))
    # two draws that share 0.25 and have noise of 1: their mean would keep half of the noise, but here it cancels
    assert row["bias"] is None
    assert row["slope"] == pytest.approx(0.05)
    fixed = operand_error.draw_row(signal, [signal + noise] * 4)
    assert fixed["one"] == fixed["mean"] == pytest.approx(20.0)
    assert fixed["bias"] == pytest.approx(20.0)


def test_the_mean_over_linears_is_of_relative_energies() -> None:
    case = {"recipe": "r", "gemm": "wgrad", "mean": None, "bias": None}
    rows = [{**case, "linear": "a", "one": 10.0, "slope": -0.2}, {**case, "linear": "b", "one": 20.0, "slope": 0.1}]
    (row,) = operand_error.layer_means(rows)
    assert row["one"] == pytest.approx(-10 * math.log10((0.1 + 0.01) / 2))
    assert row["slope"] == pytest.approx(0.15)
    assert (row["count"], row["mean"], row["bias"]) == (2, None, None)
    result = operand_error.error_result([{**row, "what": "product"} for row in rows], 2)
    assert [table.name for table in result.tables] == ["layers", "products", "operands"]


@pytest.mark.parametrize("recipe", ["mxfp4_rht_sr", "fp8_blockwise", "fp8_rowwise", "fp8_delayed"])
def test_values_of_operands_multiply_to_the_product(recipe: str) -> None:
    """So transform, headroom and scales are undone as the GEMM cancels them."""
    capture = operand_error.prepared(capture_of(recipe), get_recipe(recipe))
    gemms, step = capture.linear_gemms(), capture.rng_step
    for name, gemm in capture.recipe.gemms.items():
        if gemm.quantized:
            values = []
            for tensor in GEMM_OPERANDS[name]:
                matrix = operand_error.matrix_of(capture, name, tensor)
                values.append(operand_error.quantized_values(gemms, name, tensor, matrix, step).double())
                assert values[-1].shape == matrix.shape
            product = operand_error.product(gemms, capture, name, step)
            torch.testing.assert_close(
                product.double(), values[0] @ values[1].t(), rtol=1e-4, atol=1e-5 * float(product.abs().max())
            )


def test_stochastic_rounding_is_unbiased_and_nearest_rounding_is_not() -> None:
    draws = 16
    gain = 10 * math.log10(draws)
    noisy, fixed = rows_of("mxfp4_rht_sr", draws), rows_of("mxfp4", draws)
    assert (
        noisy.keys()
        == fixed.keys()
        == {(gemm, what) for gemm in ("dgrad", "wgrad") for what in (*GEMM_OPERANDS[gemm], "product")}
    )
    for case, row in noisy.items():
        assert row["mean"] - row["one"] == pytest.approx(gain, abs=1.0), case
        assert row["bias"] is None or row["bias"] > row["mean"] + 3, case
        assert fixed[case]["mean"] == pytest.approx(fixed[case]["one"])
        assert fixed[case]["bias"] == pytest.approx(fixed[case]["one"])
        assert fixed[case]["one"] > row["one"]
        assert abs(row["slope"]) < abs(fixed[case]["slope"])


def test_a_history_that_was_not_kept_is_replaced_by_the_tensors_amax() -> None:
    delayed, current = rows_of("fp8_delayed", 2), rows_of("fp8_current", 2)
    assert {case: row["one"] for case, row in delayed.items()} == {case: row["one"] for case, row in current.items()}
    kept = operand_error.error_rows(
        operand_error.replace(
            capture_of("fp8_delayed"), amax_in_effect={"input": 1e-4, "weight": 1.0, "grad_output": 1.0}
        ),
        get_recipe("fp8_delayed"),
        2,
    )
    assert next(iter(kept))["one"] < 1.0  # nearly all of the input saturates


def test_fields_that_differ() -> None:
    table = recipe_diff.field_table(get_recipe("mxfp8"), get_recipe("mxfp8_ocp"))
    operands = [f"{gemm}.{tensor}" for gemm, tensors in GEMM_OPERANDS.items() for tensor in tensors]
    assert {row["field"] for row in table.rows} == {f"{each}.scale.rule" for each in operands}
    assert {(row["first"], row["second"]) for row in table.rows} == {("round_up", "floor")}
    ruled = {row["field"]: row for row in recipe_diff.field_table(get_recipe("mxfp8"), get_recipe("nvfp4")).rows}
    assert ruled["rules"]["first"] == "none"
    assert "last_fraction" in ruled["rules"]["second"]
    rows = {row["field"]: row for row in recipe_diff.field_table(get_recipe("bf16"), get_recipe("mxfp4_rht_sr")).rows}
    assert rows.keys() == {f"{each}" for each in operands if "fprop" not in each} | {"dgrad.hadamard", "wgrad.hadamard"}
    assert rows["dgrad.hadamard"] == {
        "field": "dgrad.hadamard",
        "first": "none",
        "second": "block 64, signs random, output fp32",
    }
    assert rows["wgrad.input"]["second"].startswith("E2M1, granularity 1x32, e8m0 scale floor, stochastic")


def test_both_commands_on_files(tmp_path: Path) -> None:
    file = write_capture(tmp_path, capture_of("mxfp8"))
    out = tmp_path / "out"
    assert numerics.main(["operand-error", str(file), "--out", str(out), "--draws", "2"]) == 0
    found = json.loads((out / "operand-error.json").read_text())
    assert found["header"]["command"].startswith(
        "megatron-lowprec lab operand-error layers.3.mlp.linear_fc1.safetensors --out DIR"
    )
    own = found["tables"]["products"]["rows"]
    assert [(row["linear"], row["recipe"], row["gemm"]) for row in own] == [
        ("layers.3.mlp.linear_fc1", "mxfp8", gemm) for gemm in GEMM_OPERANDS
    ]
    assert numerics.main(["recipe-diff", "mxfp8", "mxfp8_ocp", str(file), "--out", str(out), "--draws", "2"]) == 0
    tables = json.loads((out / "recipe-diff.json").read_text())["tables"]
    assert len(tables["fields"]["rows"]) == 6
    compared = [row for row in tables["compared"]["rows"] if row["what"] == "product"]
    assert [row["one-0"] for row in compared] == [row["one"] for row in own]
    assert all(row["one-0"] != row["one-1"] for row in compared)
    assert (out / "recipe-diff.png").is_file()


def test_captures_of_one_linear_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By step and rank, and by a number if these are equal; their mean counts the linear once."""
    files, capture = list[str](), capture_of("mxfp8")
    captured = {"step 7": {}, "step 8": {"iteration": 8}, "step 7, tp 1 of 2": {"tensor_parallel": RankOf(1, 2)}}
    for at, changes in enumerate([*captured.values(), {"iteration": 8}]):
        (tmp_path / str(at)).mkdir()
        files.append(str(write_capture(tmp_path / str(at), replace(capture, **changes))))
    lab = experiment.Lab(torch.device("cpu"), 0)
    result = recipe_diff.run(lab, ["mxfp8", "mxfp8_ocp", *files], [], 2)
    found = {table.name: table for table in result.tables}
    for name in ("compared", "products", "operands"):
        assert list(dict.fromkeys(row["captured"] for row in found[name].rows)) == [*captured, "step 8 (2)"]
        assert [column.key for column in found[name].columns][:2] == ["linear", "captured"]
    assert len([row for row in found["compared"].rows if row["what"] == "product"]) == 4 * len(GEMM_OPERANDS)
    assert {row["count"] for row in found["layers"].rows} == {1}

    def equal_rows(capture: Capture, recipe: Recipe, left_out: list[str]) -> list[dict[str, Any]]:
        left_out.append("wgrad is emulated")
        return [{"linear": capture.linear_id.path, "recipe": recipe.name}]

    monkeypatch.setattr(captured_products, "equal_rows", equal_rows)
    monkeypatch.setattr(captured_products, "HOPPER_CAPABILITY", None)
    result = captured_products.run(lab, files, [], 1)
    assert [row["captured"] for row in result.tables[0].rows] == [*captured, "step 8 (2)"]
    assert [column.key for column in result.tables[0].columns][:2] == ["linear", "captured"]
    assert result.notes[:1] == ("wgrad is emulated",) != result.notes[1:2]


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_blockwise", "fp8_rowwise"])
def test_reference_outputs_are_the_beginning_of_the_product(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that emulates Hopper's accumulator takes the place of the GPU; it promotes no other GEMM."""
    monkeypatch.setattr(captured_products, "SIZE", 48)

    def product(_: Any, capture: Capture, gemm: str, step: Any) -> torch.Tensor:
        wide = operand_error.prepared(capture, capture.recipe)
        gemms = LinearGemms(capture.recipe, capture.linear_id, 1, AmaxHistory, emulate=True, emulate_accumulator=True)
        for tensor, (history, slot) in gemms.histories.items():
            history.in_effect[slot] = wide.amax_in_effect[tensor]
        return operand_error.product(gemms, wide, gemm, step).bfloat16()

    monkeypatch.setattr(captured_products, "product", product)

    def resolve(recipe: Recipe, _: Any, emulate: bool) -> dict[str, str]:  # of any sizes
        return dict.fromkeys(recipe.gemms, "emulated" if emulate else "hopper_fp8")

    monkeypatch.setattr(resolved, "resolve", resolve)
    rows = {row["gemm"]: row for row in captured_products.equal_rows(capture_of("bf16"), get_recipe(recipe), [])}
    assert list(rows) == list(GEMM_OPERANDS)
    fast = [name for name, gemm in get_recipe(recipe).gemms.items() if gemm.fast_accumulation]
    for name, row in rows.items():
        assert row["length"] == {"fprop": IN, "dgrad": OUT, "wgrad": TOKENS}[name]
        assert row["accumulation"] == ("fast" if name in fast else "promoted every 128")
        assert row["equal" if name in fast else "fp32_sums"] == 1.0
        assert row["equal" if name not in fast else "fp32_sums"] > 0.8


def test_emulated_products_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out: list[str] = []
    assert list(captured_products.equal_rows(capture_of("bf16"), get_recipe("fp8_current"), left_out)) == []
    assert left_out == [
        f"layers.3.mlp.linear_fc1: {gemm} of fp8_current is emulated and left out" for gemm in GEMM_OPERANDS
    ]
    # on Hopper, of a layer whose widths are no multiples of 128
    monkeypatch.setattr(resolved, "arch_of", lambda device: "sm90")
    monkeypatch.setattr(captured_products, "product", lambda *_: torch.zeros(OUT, IN))
    left_out.clear()
    rows = captured_products.equal_rows(capture_of("bf16"), get_recipe("fp8_blockwise"), left_out)
    assert [row["gemm"] for row in rows] == ["wgrad"]
    assert [line.split()[1] for line in left_out] == ["fprop", "dgrad"]


@pytest.mark.parametrize("capability", [None, (8, 9)])
def test_products_are_compared_with_those_of_a_hopper_gpu(
    capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    lab = experiment.Lab(torch.device("cpu" if capability is None else "cuda"), 0)
    remedy = "add --device cuda on a machine with one" if capability is None else "8.9 is this GPU's; run it on"
    with pytest.raises(UserError, match=f"was asked to run on {lab.device}; {remedy}"):
        captured_products.run(lab, ["FILE"], [], 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["captured-products"], "name files that --capture-step wrote"),
        (["captured-products", "FILE"], "compares with products of a Hopper GPU"),
        (["operand-error"], "name files that --capture-step wrote"),
        (["operand-error", "none.safetensors"], "none.safetensors: cannot be read"),
        (["operand-error", "FOLDER"], "is a folder: give the files in it, as "),
        (["recipe-diff", "mxfp8", "bf16", "FOLDER"], "is a folder: give the files in it, as "),
        (["operand-error", "FILE"], "no recipe that was asked quantizes"),
        (["operand-error", "FILE", "--draws", "1"], "a mean needs at least 2"),
        (["recipe-diff", "mxfp8"], "asked with 1 recipes"),
        (["recipe-diff", "mxfp8", "mxfp9"], "there is no recipe 'mxfp9'"),
        (["recipe-diff", "mxfp8", "bf16", "--recipes", "mxfp8"], "--recipes is for operand-error"),
        (
            ["formats", "--draws", "3", "--recipes", "mxfp8"],
            "--recipes, --draws was given, but formats does not read it",
        ),
        (["report", "--quick", "--seed", "5"], "--seed, --quick was given, but report does not read it; leave it out"),
        (["formats", "x.safetensors"], "formats takes no files and no recipes, but x.safetensors was given"),
    ],
)
def test_refusals(arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write_capture(tmp_path, capture_of("bf16")))
    given = [{"FILE": file, "FOLDER": str(tmp_path)}.get(each, each) for each in arguments]
    assert numerics.main([*given, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
