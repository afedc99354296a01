"""tools.bench for kernels and layers: no number for what is wrong, and each measurement once at tiny sizes."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowprec.errors import UserError
from tests.tools.bench_process import CPU, bench, environment  # noqa: F401 - for main in this process
from tools.bench import shapes
from tools.bench.__main__ import main
from tools.bench.cases import layer
from tools.bench.cases.op_cases import OpCase
from tools.bench.commands import experts, ops, overhead, quantize
from tools.bench.measure import Bench, Copy, Timing
from tools.bench.report import Report


def test_bytes_of_both_directions_count_one_read() -> None:
    (both,) = quantize.variants(["e2m1"], ["nearest"], ["both"])
    (rows,) = quantize.variants(["e2m1"], ["nearest"], ["rows"])
    assert (rows.moved_bytes(100), both.moved_bytes(100)) == (400, 600)


@pytest.fixture
def kernel_is_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_kernel(x: torch.Tensor, variant: quantize.Variant, signs: object) -> dict[str, torch.Tensor]:
        return {way: quantize.run_reference(x, variant, way).contiguous() for way in variant.directions}

    monkeypatch.setattr(quantize, "run_kernel", run_kernel)
    monkeypatch.setattr(quantize, "kernel_signs", lambda variant, device: {})


@pytest.mark.slow
@pytest.mark.usefixtures("kernel_is_reference")
def test_one_wrong_bit_costs_the_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = quantize.run_kernel

    def run_kernel(x: torch.Tensor, variant: quantize.Variant, signs: dict[str, Any]) -> dict[str, torch.Tensor]:
        outputs = sound(x, variant, signs)
        if variant.kind == "sr" and "columns" in outputs:
            outputs["columns"].view(torch.int16)[-1, -1] ^= 1
        return outputs

    monkeypatch.setattr(quantize, "run_kernel", run_kernel)
    out = tmp_path / "found.json"
    arguments = ["--sizes", "64x64", "--formats", "e2m1", "--directions", "rows,columns", "--device", "cpu"]
    assert main(["quantize", *arguments, "--out", str(out)]) == 1
    rows = json.loads(out.read_text())["tables"][0]["rows"]
    failed = [(row["kind"], row["direction"]) for row in rows if "failed" in row]
    assert failed == [("sr", "columns")]
    assert all(("ms" in row) != ("failed" in row) for row in rows)
    assert "1 of 5760 entries differ" in capsys.readouterr().out


@pytest.mark.usefixtures("kernel_is_reference")
def test_a_kernel_that_raises_is_a_failed_row(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    def broken(*arguments: object) -> dict[str, torch.Tensor]:
        raise RuntimeError("out of resources")

    (variant,) = quantize.variants(["e2m1"], ["nearest"], ["rows"])
    assert quantize.fault(variant, CPU, generator) is None
    monkeypatch.setattr(quantize, "run_kernel", broken)
    assert quantize.fault(variant, CPU, generator) == "RuntimeError: out of resources"


def test_a_wrong_gemm_fails_the_layer(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    assert layer.fault("mxfp4_rht_sr", CPU, generator) is None
    sound, calls = layer.LinearGemms.dgrad, iter([1.02, 1.0])

    def dgrad(self: layer.LinearGemms, *arguments: Any) -> torch.Tensor:
        return sound(self, *arguments) * next(calls)

    monkeypatch.setattr(layer.LinearGemms, "dgrad", dgrad)
    reason = layer.fault("mxfp4_rht_sr", CPU, generator)
    assert reason is not None
    assert reason.startswith("dgrad differs from the reference")


def test_all_variants_of_a_layer_do_the_same_work(generator: torch.Generator) -> None:
    shape = shapes.MODELS["smoke"].linears[1]
    found = []
    for call in (
        layer.plain_torch,
        layer.through_autograd(layer.TorchGemms()),
        layer.through_autograd(layer.RecipeGemms("bf16", CPU)),
        layer.without_autograd(layer.TorchGemms()),
    ):
        t = layer.tensors(shape, 48, CPU, generator.manual_seed(7))
        call(t)
        call(t)
        found.append((t.main_grad, t.x.grad))
    for main_grad, dx in found[1:]:
        assert (main_grad - found[0][0]).norm() < 4e-3 * found[0][0].norm()
        assert dx is None or torch.equal(dx, found[0][1])
    assert found[0][0].abs().sum() > 0


def test_shares_are_of_the_recipe_that_has_both() -> None:
    ms = {"bf16": 5.0, "mxfp4": 6.0, "mxfp4_rht": 8.0, "mxfp4_sr": 9.0, "mxfp4_rht_sr": 10.0}
    timings = {name: Timing(value, value, value) for name, value in ms.items()}
    assert overhead._shares(timings, "mxfp4_rht_sr") == pytest.approx({"over_bf16": 2.0, "rht": 0.1, "sr": 0.2})
    assert overhead._shares(timings, "mxfp4") == {"over_bf16": pytest.approx(1.2), "rht": None, "sr": None}


def test_a_layers_overhead_is_of_sums_not_a_mean_of_ratios() -> None:
    def part(base: float, rht: float) -> dict[str, Timing]:
        ms = {"gemm": base - 1, "cast": 1.0, "rht_cast": 1.0 + rht - base, "base": base, "rht": rht}
        return {name: Timing(value, value, value, (value,)) for name, value in ms.items()}

    row = overhead._fp8_row([part(10.0, 11.0), part(90.0, 90.0)], 3 * 10**9, copy_rate=3.0)
    assert row["added"] == pytest.approx(0.01)
    assert row["by_parts"] == pytest.approx(0.01)
    assert row["over_gemm"] == pytest.approx(1 / 98)
    assert row["cast_of_copy"] == pytest.approx(0.5)


def test_sizes_of_shapes_are_activations_and_weights() -> None:
    args = argparse.Namespace(shapes=["345m"], linears=["proj", "fc1"], tokens=512, sizes="")
    assert quantize.sizes_of(args) == [(512, 1024), (1024, 1024), (4096, 1024)]
    with pytest.raises(UserError, match="not in the table"):
        quantize.sizes_of(argparse.Namespace(shapes=["1b"], linears=["proj"], tokens=512))


@pytest.mark.slow
def test_linear_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "linear.json"
    asked = ["--shapes", "smoke", "--linears", "proj", "--recipes", "mxfp4_rht_sr", "--tokens", "32", "--rounds", "1"]
    assert main(["linear", "--device", "cpu", *asked, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    rows = {row["recipe"]: row for row in found["tables"][0]["rows"]}
    assert set(rows) == {"torch F.linear", "torch, bare GEMMs", "bf16", "mxfp4_rht_sr"}
    assert rows["bf16"]["over_bf16"] == 1.0
    assert rows["mxfp4_rht_sr"]["over_bf16"] == rows["mxfp4_rht_sr"]["ms"] / rows["bf16"]["ms"]
    assert all(row["host_us"] > 0 for row in rows.values())
    assert found["header"]["torch"] == torch.__version__
    assert "smoke test" in found["header"]["device"]
    assert "no graph: bf16: no CUDA graphs on a CPU" in capsys.readouterr().out


@pytest.mark.slow
def test_quantize_end_to_end_by_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    done = bench("quantize", "--sizes", "33x64", "--formats", "e2m1", "--kinds", "rht64+sr", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert "e2m1 rht64+sr both: bits agree" in done.stderr
    assert "of same-size copy" in done.stdout


@pytest.mark.slow
@pytest.mark.weekly  # quantize runs so on every change
def test_ops_end_to_end_by_tritons_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "ops.json"
    done = bench("ops", "--shapes", "smoke", "--rounds", "1", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    (table,) = json.loads(out.read_text())["tables"]
    found = {(row["op"], row["variant"]): row for row in table["rows"]}
    forward, backward = (found[f"norm {direction}", "ours"] for direction in ("forward", "backward"))
    assert (forward["moved_bytes"], backward["moved_bytes"]) == (32 * 128 * 4, 32 * 128 * 6)
    assert forward["over"] == pytest.approx(forward["ms"] / found["norm forward", "torch"]["ms"])
    assert forward["step_ms"] == pytest.approx(49 * forward["ms"])
    ours = {op for op, variant in found if variant == "ours"}
    assert ours == {op for op, variant in found if variant in ("torch", "Megatron-core")}
    assert len(ours) == 17


@pytest.mark.slow
@pytest.mark.weekly
def test_experts_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "experts.json"
    asked = ["--shapes", "smoke", "--tokens", "24", "--recipes", "bf16,fp8_current", "--rounds", "1", "--peers", "te"]
    done = bench("experts", *asked, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    (table,) = json.loads(out.read_text())["tables"]
    rows = {row["experts"]: row for row in table["rows"]}
    ours = {f"{recipe}{how}" for recipe in ("bf16", "fp8_current") for how in ("", ", grouped")}
    assert set(rows) == {"Megatron-core, bf16", "torch grouped product, bf16", *ours}
    assert all(row["ms"] > 0 and "failed" not in row for row in rows.values())
    assert rows["bf16, grouped"]["over_stock"] == rows["bf16, grouped"]["ms"] / rows["Megatron-core, bf16"]["ms"]
    assert "peer te is missing: " in done.stdout


def test_expert_tokens_are_multiples_and_sum_up() -> None:
    shape = shapes.EXPERTS["smoke"]
    inputs = experts._inputs(shape, 40, CPU, torch.Generator().manual_seed(0))
    assert sum(inputs.counts) == 40 * shape.topk == len(inputs.x)
    assert sum(count % 16 != 0 for count in inputs.counts) <= 1


@pytest.mark.parametrize("failing", ["bf16", "bf16, grouped"])
def test_experts_are_measured_where_others_of_the_recipe_fail(
    failing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> experts.Block:
        raise RuntimeError("no such kernel")

    def works() -> experts.Block:
        return lambda inputs: inputs.x.detach()

    makes = {name: fails if name == failing else works for name in ("bf16", "bf16, grouped")}
    monkeypatch.setattr(experts, "_makes", lambda *_: makes)
    args = argparse.Namespace(tokens=40, rounds=1)
    shape = shapes.EXPERTS["smoke"]
    inputs = experts._inputs(shape, 40, CPU, torch.Generator().manual_seed(0))
    rows = experts._rows(shape, inputs, args, Bench(CPU), Report({}, {}))
    assert {row["experts"]: row.get("failed") for row in rows} == {
        name: "RuntimeError: no such kernel" if name == failing else None for name in makes
    }


def test_an_op_with_another_result_has_no_number() -> None:
    right, wrong = torch.ones(4), torch.ones(4) * 1.1
    case = OpCase("x", "4", 1, 16, {"torch": lambda: None, "ours": lambda: None}, lambda: [(wrong, right)])
    copy = Copy(16, 1.0)
    (row,) = ops._rows(shapes.MODELS["smoke"], case, 1, Bench(CPU), copy, set())
    assert row["failed"].startswith("results differ by 1.0e-01")
    assert "ms" not in row


def test_an_op_whose_first_variant_fails_is_compared_with_nothing() -> None:
    def fails() -> None:
        raise RuntimeError("no such kernel")

    case = OpCase("x", "4", 1, 16, {"torch": fails, "ours": lambda: None})
    copy = Copy(16, 1.0)
    first, ours = ops._rows(shapes.MODELS["smoke"], case, 1, Bench(CPU), copy, set())
    assert "no such kernel" in first["failed"]
    assert ours["over"] is None
    assert ours["ms"] >= 0


@pytest.mark.slow
@pytest.mark.weekly
def test_overhead_end_to_end_by_tritons_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "overhead.json"
    done = bench("overhead", "--shapes", "smoke", "--tokens", "32", "--rounds", "1", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    fp8, backward = json.loads(out.read_text())["tables"]
    assert [row["linear"] for row in fp8["rows"]] == [f"smoke {n}" for n in ("qkv", "proj", "fc1", "fc2", "layer")]
    total = fp8["rows"].pop()
    assert total["base_ms"] == pytest.approx(sum(row["base_ms"] for row in fp8["rows"]))
    assert [row["recipe"] for row in backward["rows"]] == list(overhead.RECIPES)
