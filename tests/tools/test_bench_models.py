"""tools.bench for whole models: training steps, Hugging Face models, scaling and exchanges of gradients."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.bench_process import CPU, bench, environment  # noqa: F401 - for main in this process
from tools.bench import shapes
from tools.bench.__main__ import main
from tools.bench.commands import exchange, exchange_worker, frozen, hugging_face, scaling, step
from tools.bench.measure import Bench
from tools.bench.report import Report


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


@pytest.mark.slow
@pytest.mark.parametrize("snapshots", [False, pytest.param(True, marks=pytest.mark.weekly)])
def test_step_end_to_end(tmp_path: Path, snapshots: bool) -> None:
    out = tmp_path / "step.json"
    asked = ["--shapes", "smoke", "--recipes", "mxfp8", "--warm-up", "1", "--iterations", "2", "--out", str(out)]
    assert main(["step", "--device", "cpu", *asked, *["--snapshots"] * snapshots]) == 0
    plain, mxfp8, *of_snapshots = json.loads(out.read_text())["tables"][0]["rows"]
    assert (plain["recipe"], mxfp8["recipe"]) == ("bf16", "mxfp8")
    assert [row["recipe"] for row in of_snapshots] == ["mxfp8 snapshot"] * snapshots
    for snapshot in of_snapshots:
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
