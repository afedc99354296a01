"""tools.bench: its arithmetic, its gate (no number for what is wrong), and every measurement once at tiny sizes."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.text_tables import Column, render
from tests.waiting import PATIENCE
from tools.bench import (
    exchange,
    exchange_worker,
    experts,
    frozen,
    hugging_face,
    kernels,
    ops,
    overhead,
    quantize,
    scaling,
    shapes,
    step,
)
from tools.bench.__main__ import main
from tools.bench.cases import layer
from tools.bench.cases.op_cases import OpCase
from tools.bench.measure import Bench, Copy, Timing, combined, cycle_inputs, rate
from tools.bench.report import Report

REPOSITORY = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``--device cpu`` sets must not reach other tests of this process."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    return subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted", "tools.bench", *arguments, "--device", "cpu"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("345m", {"qkv": (1024, 3072), "proj": (1024, 1024), "fc1": (1024, 4096), "fc2": (4096, 1024)}),
        ("6.7b", {"qkv": (4096, 12288), "proj": (4096, 4096), "fc1": (4096, 16384), "fc2": (16384, 4096)}),
        # Llama 2: gate and up projection are one linear, and 70B shares keys and values between 8 heads
        ("7b", {"qkv": (4096, 12288), "proj": (4096, 4096), "fc1": (4096, 22016), "fc2": (11008, 4096)}),
        ("70b", {"qkv": (8192, 10240), "proj": (8192, 8192), "fc1": (8192, 57344), "fc2": (28672, 8192)}),
    ],
)
def test_shapes_of_the_published_models(model: str, sizes: dict[str, tuple[int, int]]) -> None:
    found = {linear.name: (linear.in_features, linear.out_features) for linear in shapes.MODELS[model].linears}
    assert found == sizes


def test_configs_of_the_table_have_the_same_sizes() -> None:
    from megatron_lowprec.training.config.arguments import parse
    from megatron_lowprec.training.config.resolve import resolve_model
    from megatron_lowprec.training.models.sizes import linear_sites

    for model in shapes.MODELS.values():
        if model.config is not None and model.name != "smoke":
            config, _, _ = parse(["--config", model.config])
            sites = linear_sites(resolve_model(config))[:4]
            expected = [(linear.in_features, linear.out_features) for linear in model.linears]
            assert [(site.in_features, site.out_features) for site in sites] == expected, model.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["linear", "--shapes", "13b"], "13b: not in the table"),
        (["linear", "--recipes", "mxfp5"], "mxfp4"),
        (["linear", "--linears", "fc3"], "qkv, proj, fc1, fc2"),
        (["linear", "--tokens", "0"], "--tokens 0"),
        (["quantize", "--kinds", "rht"], "rht64"),
        (["quantize", "--sizes", "8192by4096"], "ROWSxCOLUMNS"),
        (["quantize", "--sizes", "128x100"], "multiple of 64"),
        (["step", "--shapes", "70b"], "no config"),
        (["step", "--cuda-graphs"], "--cuda-graphs with --device cpu and --warm-up 5"),
        (["ops", "--ops", "softmax"], "norm, bias, gelu"),
    ],
)
def test_errors_are_named(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--device", "cpu"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize"]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err


def test_a_failed_row_has_no_number() -> None:
    columns = (Column("name", "name"), Column("ms", "ms", ".2f"))
    text = render([{"name": "a", "ms": 1.0}, {"name": "b", "ms": 2.0, "failed": "bits differ"}, {"name": "c"}], columns)
    assert text.splitlines() == ["name    ms", "----  ----", "a     1.00", "b  FAILED: bits differ", "c        -"]


def test_rate_counts_bytes_and_milliseconds() -> None:
    assert rate(4 * 10**12, 1000.0) == pytest.approx(4.0)


def test_rounds_are_joined_by_their_median() -> None:
    joined = combined([Timing(3.0, 2.5, 3.5), Timing(1.0, 0.5, 9.0), Timing(2.0, 1.9, 2.1)])
    assert (joined.ms, joined.low, joined.high) == (2.0, 0.5, 9.0)
    assert joined.noise == pytest.approx(1.0)


def test_alternatives_are_measured_cycle_inputs() -> None:
    order: list[str] = []
    Bench(CPU).compare({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)
    runs = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert runs == ["a", "b", "a", "b"]


def test_input_sets_are_cycled() -> None:
    seen: list[int] = []
    call = cycle_inputs([1, 2, 3], seen.append)
    for _ in range(4):
        call()
    assert seen == [1, 2, 3, 1]


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


@pytest.mark.slow
@pytest.mark.weekly
def test_hugging_face_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "hugging_face.json"
    asked = ["--shapes", "smoke,smoke_experts", "--recipes", "fp8_current", "--rounds", "1", "--peers", "torchao"]
    done = bench("hugging_face", *asked, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    (table,) = json.loads(out.read_text())["tables"]
    of_experts = {row["variant"]: row for row in table["rows"] if row["model"] == "smoke_experts"}
    assert of_experts["fp8_current"]["converted"] == 4 + 2
    rows = {row["variant"]: row for row in table["rows"] if row["model"] == "smoke"}
    assert {name: row["converted"] for name, row in rows.items()} == {"bf16": 0, "fp8_current": 14}
    assert rows["fp8_current"]["over_bf16"] == rows["fp8_current"]["ms"] / rows["bf16"]["ms"]
    assert rows["bf16"]["first_loss"] != rows["fp8_current"]["first_loss"]
    assert "peer torchao is missing: " in done.stdout


@pytest.mark.weekly
def test_frozen_weights_are_measured_in_bf16_and_as_codes() -> None:
    args = argparse.Namespace(seed=0, rounds=1, recipes=["nvfp4_all", "mxfp4"])
    rows = {str(row["variant"]): row for row in frozen._rows("smoke", args, Bench(CPU), Report({}, {}))}
    assert list(rows) == ["bf16", "nvfp4_all", "nvfp4_all, codes", "mxfp4", "mxfp4, codes"]
    assert rows["nvfp4_all"]["loss"] == rows["nvfp4_all, codes"]["loss"] != rows["bf16"]["loss"]
    assert rows["nvfp4_all, codes"]["weights_mib"] < rows["nvfp4_all"]["weights_mib"] == rows["bf16"]["weights_mib"]
    assert "fprop takes the weight in the compute dtype" in str(rows["mxfp4, codes"]["failed"])


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


def test_models_are_measured_where_bf16_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> argparse.Namespace:
            return argparse.Namespace(loss=self.weight.square().sum())

    def fails(model: Any) -> int:
        raise RuntimeError("no such kernel")

    case = argparse.Namespace(
        architecture="llama", vocabulary=8, sequences=1, length=4, build=lambda device: Model(), blocks=lambda model: []
    )
    monkeypatch.setitem(hugging_face.CASES, "smoke", case)
    variants = {"bf16": (fails, None), "fp8_current": (lambda model: 3, None)}
    monkeypatch.setattr(hugging_face, "_variants", lambda *_: variants)
    args = argparse.Namespace(seed=0, rounds=1, no_eager=False, cuda_graphs=False)
    bf16, fp8 = hugging_face._rows("smoke", args, Bench(CPU), Report({}, {}), torchao=False)
    assert bf16["failed"] == "RuntimeError: no such kernel"
    assert (fp8["converted"], fp8["first_loss"], fp8["over_bf16"]) == (3, 1.0, None)


@pytest.mark.parametrize("option", ["--tokens", "--linears"])
def test_hugging_face_refuses_options_that_do_nothing(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["hugging_face", option, "1", "--device", "cpu"])
    assert f"unrecognized arguments: {option} 1" in capsys.readouterr().err


def test_a_snapshot_is_measured_over_a_step_that_runs_the_same_layers() -> None:
    args = argparse.Namespace(cuda_graphs=True, snapshots=True, device="cuda", warm_up=5, optimizers=[])
    found = step.variants_of(args, ["bf16", "mxfp8"])
    eager = ["--cuda-graph-impl", "none"]
    assert found["mxfp8 snapshot"] == [*found["mxfp8"], "--log-quantization-interval", "1"]
    assert found["bf16"] == ["--recipe", "bf16", *eager]
    assert found["mxfp8 graphs"] == ["--recipe", "mxfp8", "--cuda-graph-impl", "local"]
    args.cuda_graphs = False
    assert list(step.variants_of(args, ["bf16", "mxfp8"])) == ["bf16", "mxfp8", "mxfp8 snapshot"]
    assert step.variants_of(args, ["bf16", "mxfp8"]).items() <= found.items()
    args.optimizers, args.snapshots = ["muon"], False
    assert step.variants_of(args, ["bf16"])["bf16 muon"] == ["--recipe", "bf16", "--optimizer", "muon"]


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


@pytest.mark.slow
def test_step_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    asked = ["--shapes", "smoke", "--recipes", "mxfp8", "--warm-up", "1", "--iterations", "2", "--out", str(out)]
    assert main(["step", "--device", "cpu", *asked, "--snapshots"]) == 0
    plain, mxfp8, snapshot = json.loads(out.read_text())["tables"][0]["rows"]
    assert (plain["recipe"], mxfp8["recipe"], snapshot["recipe"]) == ("bf16", "mxfp8", "mxfp8 snapshot")
    assert snapshot["snapshot_ms"] == pytest.approx(snapshot["ms"] - mxfp8["ms"])
    assert snapshot["runs"][0]["losses"] == mxfp8["runs"][0]["losses"]
    assert len(plain["runs"][0]["milliseconds"]) == 3
    assert plain["runs"][0]["losses"] != mxfp8["runs"][0]["losses"]
    assert mxfp8["over_bf16"] == pytest.approx(mxfp8["ms"] / plain["ms"])
    assert plain["update_ms"] > 0
    assert plain["stock_update_ms"] > 0
    assert plain["tokens_per_second"] == pytest.approx(2 * 128 / plain["ms"] * 1e3)


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "says"), [("1,x", "numbers of GPUs"), ("0", "numbers of GPUs")])
def test_scaling_names_mistakes(gpus: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scaling", "--gpus", gpus, "--device", "cpu"]) == 2
    assert says in capsys.readouterr().err
    assert main(["scaling", "--shapes", "70b", "--device", "cpu"]) == 2
    assert "no config" in capsys.readouterr().err


def test_efficiency_is_of_the_first_count() -> None:
    args = argparse.Namespace(micro_batch=None)
    run = {"low": 1.0, "high": 1.0, "micro_batch": 2, "sequence": 128, "peak_gib": 0.0, "losses": [1.0]}
    found = {1: [{"ms": 10.0, **run}], 8: [{"ms": 12.5, **run}], 2: [{"failed": "out of memory"}]}
    row = scaling._row(shapes.MODELS["smoke"], "bf16", 8, found, args)
    assert row["efficiency"] == pytest.approx(0.8)
    assert row["tokens_per_second"] == pytest.approx(8 * 2 * 128 / 12.5e-3)
    assert scaling._row(shapes.MODELS["smoke"], "bf16", 2, found, args)["failed"] == "out of memory"


@pytest.mark.slow
@pytest.mark.weekly
def test_scaling_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "scaling.json"
    asked = ["--gpus", "2", "--recipes", "fp8_delayed", "--warm-up", "1", "--iterations", "2", "--out", str(out)]
    done = bench("scaling", *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    (two,) = json.loads(out.read_text())["tables"][0]["rows"]
    assert (two["processes"], two["batch"], two["efficiency"]) == (2, "2x128", 1.0)
    assert len(two["runs"][0]["losses"]) == 3


@pytest.mark.slow
@pytest.mark.weekly
def test_exchange_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "exchange.json"
    done = bench("exchange", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["tables"][0]["rows"]
    sent = {row["exchange"]: row["sent"] for row in rows if row["part"] == "exchange"}
    # all entries of the tiny model's matrices, of which one of two ranks sends half
    entries = sum(exchange.tensors_of(shapes.MODELS["smoke"]))
    assert sent["fp32 reduce-scatter"] == entries * 4 / 2
    assert sent["bf16 reduce-scatter"] == entries * 2 / 2
    assert sent["fp8_lm, from an fp32 buffer"] == sent["fp8_lm_o2, stored in FP8"] == entries / 2
    assert {row["part"] for row in rows if row["exchange"] == "fp8_lm_o2, stored in FP8"} == {
        "cast, in the backward pass",
        "exchange",
        "sum, before the update",
    }
    far = {row["exchange"]: row["distance"] for row in rows}
    assert far["fp32 reduce-scatter"] == 0.0
    assert 0.0 < far["bf16 reduce-scatter"] < far["fp8_lm_o2, stored in FP8"] < exchange_worker.MOST_DISTANCE


def test_communication_that_other_kernels_hide() -> None:
    def event(name: str, start: int, end: int) -> SimpleNamespace:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start * 3000, end=end * 3000))

    nccl = [event("ncclDevKernel_SendRecv", 2, 6), event("ncclDevKernel_AllGather", 5, 7)]
    others = [event("gemm", 0, 3), event("cast", 1, 4), event("copy", 6, 9)]
    # of 2 to 7, 2 to 4 and 6 to 7 are hidden
    assert kernels.communication_of([*nccl, *others]) == {"ms": 5.0, "exposed_ms": 2.0}


def test_kernels_and_gaps_of_a_step() -> None:
    def event(name: str, start: int, end: int) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, time_range=SimpleNamespace(start=start, end=end), self_device_time_total=end - start
        )

    # three steps of 3 ms, with a gap of 1.5 ms in each but the last
    events = [event("gemm", 1000 * at, 1000 * at + 1500) for at in (0, 3, 6)]
    events += [event("cast", 7500, 9000)]
    gemm, cast = kernels.kernels_of(events)
    assert gemm == {"name": "gemm", "times": 1.0, "ms": 1.5}
    assert cast == {"name": "cast", "times": 1 / 3, "ms": 0.5}
    idle = kernels.idle_of(events)
    assert (idle["ms"], idle["gaps"]) == (1.0, 2 / 3)
    assert idle["longest"][0] == {"ms": 1.5, "after": "gemm", "before": "gemm"}


@pytest.mark.parametrize(
    ("on_gpu", "cuda_graphs", "want"),
    [(True, False, {"default"}), (True, True, {"default", "reduce-overhead"}), (False, True, {"None"})],
)
def test_models_are_compiled_where_there_is_a_gpu(
    on_gpu: bool, cuda_graphs: bool, want: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--no-eager leaves out eager models where others are compiled."""
    made = set()

    class Step:
        def __init__(self, case: Any, tokens: Any, change: Any, mode: str | None, pristine: Any) -> None:
            made.add(f"{mode}")
            raise ValueError("enough")

    monkeypatch.setattr(hugging_face, "Step", Step)
    bench = Bench(CPU)
    bench.on_gpu = on_gpu
    args = argparse.Namespace(seed=0, rounds=1, no_eager=True, cuda_graphs=cuda_graphs, recipes=["fp8_current"])
    rows = list(hugging_face._rows("smoke", args, bench, Report({}, {}), torchao=False))
    assert made == want
    assert len({str(row["variant"]) for row in rows}) == len(rows) == 2 * len(want)
