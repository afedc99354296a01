"""--capture-step: the files hold the operands that the step took, and the run is the same without them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_lowprec import get_recipe
from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.linear.capture_file import Capture, RankOf, read_capture, write_capture
from megatron_lowprec.linear.linear_id import DIMS, LinearId
from megatron_lowprec.mcore.debug.sampled_outputs import RowSample
from megatron_lowprec.quantization.error_stats import QuantizationError
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.paths import run_paths
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.monitoring.operand_files import capture_line, check_capture, write_captures
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses, rows

COMMON: dict[str, Any] = {"train_iters": 3, "bf16": True, "hidden_size": 128, "hidden_dropout": 0.1, "no_save": True}


def example(**changes: Any) -> Capture:
    linear = LinearId(3, "mlp.linear_fc1", 5, 1, {"O": ShardSlice(4, 8, 8)}, "O")
    x, w, dy = torch.randn(6, 32).bfloat16(), torch.randn(16, 32).bfloat16(), torch.randn(6, 16)
    made = Capture(x, w, dy, get_recipe("mxfp4_rht_sr"), linear, 7, 1234, {"input": 0.1})
    return replace(made, **changes)


def same(one: Capture, other: Capture) -> bool:
    plain = replace(one, x=other.x, w=other.w, dy=other.dy)
    return plain == other and all(
        torch.equal(getattr(one, name), getattr(other, name)) and getattr(one, name).dtype == getattr(other, name).dtype
        for name in ("x", "w", "dy")
    )


def sampled_outputs(capture: Capture) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """GEMM -> float64 product of the unquantized operands, and the layer's output, on the rows that a run samples."""
    gemms, step, sample = capture.linear_gemms(), capture.rng_step, RowSample(capture.seed)
    x, w, dy = (each.double() for each in (capture.x, capture.w, capture.dy))
    tokens, rows, columns = (sample.of(size, x.device) for size in (len(x), *w.shape))
    return {
        "fprop": (x[tokens] @ w.t(), gemms.fprop(capture.x, capture.w, step)[tokens]),
        "dgrad": (dy[tokens] @ w, gemms.dgrad(capture.dy, capture.w, step)[tokens]),
        "wgrad": (
            dy[:, rows].t() @ x[:, columns],
            gemms.wgrad(capture.dy, capture.x, step, torch.zeros(w.shape))[rows][:, columns],
        ),
    }


@pytest.mark.parametrize(("recipe", "quantized"), [("fp8_delayed", 6), ("nvfp4_all", 6), ("mxfp4_rht_sr", 4)])
def test_telemetry_follows_from_the_files_and_losses_stay(drive: Drive, recipe: str, quantized: int) -> None:
    common = COMMON | {"recipe": recipe}
    drive(argv(save="plain", **common))
    flags: dict[str, Any] = {"capture_step": 3, "capture_layers": ["layers.2.mlp.*", "*_qkv"]}
    flags |= {"log_quantization_interval": 3, "log_quantization_also": "nvfp4_all,fp8_rowwise"}
    drive(argv(save="captured", **common, **flags))
    assert losses(Path("captured")) == losses(Path("plain"))
    files = sorted(Path("captured/captures/iteration_3").iterdir())
    names = ["layers.1.self_attention.linear_qkv", "layers.2.mlp.linear_fc1", "layers.2.mlp.linear_fc2"]
    assert [file.name for file in files] == [
        f"{name}.safetensors" for name in [*names, "layers.2.self_attention.linear_qkv"]
    ]
    logged = {
        (row["linear"], row["gemm"], row["operand"], row.get("recipe", "")): row
        for row in rows(Path("captured"), "quantization.jsonl")
    }
    compared = 0
    for capture in map(read_capture, files):
        assert capture.x.dtype == capture.w.dtype == capture.dy.dtype == torch.bfloat16
        assert capture.x.shape[0] == capture.dy.shape[0] == 2 * 32
        for name in ("", "nvfp4_all", "fp8_rowwise"):
            gemms = replace(capture, recipe=get_recipe(name) if name else capture.recipe).linear_gemms()
            for gemm, operand in DIMS:
                if getattr(gemms.recipe.gemms[gemm], operand) is None:
                    continue
                matrix = {"input": capture.x, "weight": capture.w, "grad_output": capture.dy}[operand]
                found = QuantizationError.of(
                    gemms.backends.resolved.gemms[gemm].error_stats(gemm, operand, matrix, capture.rng_step).tolist()
                )
                row = logged[capture.linear_id.path, gemm, operand, name]
                for field, value in asdict(found).items():
                    assert row[field] == pytest.approx(value, rel=1e-6, abs=1e-7 if field == "bias" else 0.0), field
                compared += 1
        for gemm, (exact, output) in sampled_outputs(capture).items():
            if not capture.recipe.gemms[gemm].quantized:
                continue
            row, error = logged[capture.linear_id.path, gemm, "output", ""], output.double() - exact
            assert row["entries"] == exact.numel()
            ratio = float(exact.norm() / error.norm())
            # the run's sum with a bias was rounded to bf16
            tolerance = 0.05 if gemm == "fprop" and capture.linear_id.name.endswith("qkv") else 1e-3
            assert row["snr"] == pytest.approx(20 * math.log10(ratio), abs=tolerance)
            assert row["bias"] == pytest.approx(float((output * exact).sum() / exact.square().sum()) - 1, abs=1e-4)
            if gemm == "wgrad":
                assert row["gradient_to_noise"] == pytest.approx(ratio, rel=1e-3)
    assert compared == 4 * (quantized + 6 + 6)


def test_a_file_has_the_documented_tensors_and_metadata(tmp_path: Path) -> None:
    path = write_capture(tmp_path, example())
    (tmp_path / "opened").touch()
    assert path.stat().st_mode == (tmp_path / "opened").stat().st_mode
    with safe_open(str(path), "pt") as file:
        metadata = file.metadata()
        assert {name: list(file.get_tensor(name).shape) for name in file.keys()} == {  # noqa: SIM118
            "x": [6, 32],
            "w": [16, 32],
            "dy": [6, 16],
        }
    assert metadata["linear"] == "layers.3.mlp.linear_fc1 of expert 5"
    assert (metadata["iteration"], metadata["seed"], metadata["format_version"]) == ("7", "1234", "1")
    assert metadata["recipe"].startswith("name: mxfp4_rht_sr\n")
    assert json.loads(metadata["shard"])["spans"] == {"O": [4, 8, 8]}


def test_captured_operands_round_trip(tmp_path: Path) -> None:
    wants = example(
        tensor_parallel=RankOf(1, 2),
        data_parallel=RankOf(0, 4),
        recipe=get_recipe("fp8_delayed"),
        amax_in_effect={"input": 0.1, "weight": 3.0, "grad_output": 2.0**-20},
    )
    path = write_capture(tmp_path, wants)
    assert path.name == "layers.3.mlp.linear_fc1.expert5.tp1-of-2.dp0-of-4.safetensors"
    found = read_capture(path)
    assert same(found, wants)
    assert not same(found, replace(wants, w=wants.w + 1))
    history, slot = found.linear_gemms().histories["grad_output"]
    assert float(history.in_effect[slot]) == 2.0**-20
    write_capture(tmp_path, replace(wants, iteration=9))
    assert read_capture(path).iteration == 9
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("tensors", "metadata", "said"),
    [
        (None, {}, "cannot be read"),
        ({"x": torch.ones(1)}, {"format_version": "1"}, "found version 1 and tensors x"),
        (dict.fromkeys(("w", "x", "dy"), torch.ones(1)), {"format_version": "2"}, "found version 2"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, tensors: Any, metadata: dict[str, str], said: str) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(b"no safetensors at all")
    if tensors is not None:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata)
    with pytest.raises(UserError, match=said):
        read_capture(path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "captures").write_text("a file")
    with pytest.raises(UserError, match="captured operands could not be written"):
        write_captures(tmp_path / "captures" / "iteration_3", [example()])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"capture_step": 3}, "--capture-step .* does nothing without --capture-layers"),
        ({"capture_layers": "*"}, "--capture-layers .* does nothing without --capture-step"),
        (
            {"capture_step": [1, 3], "capture_layers": "*"},
            "--capture-step 3 is no iteration of this run, which has 1 to 2",
        ),
        (
            {
                "capture_step": 1,
                "capture_layers": "*",
                "fp8_param_gather": True,
                "use_distributed_optimizer": True,
                "bf16": True,
            },
            "writes unquantized weights",
        ),
        (
            {"capture_step": 1, "capture_layers": "*", "no_lowprec_linears": True},
            "excludes --no-lowprec-linears; leave one of the two out",
        ),
    ],
)
def test_invalid_options_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve_run(resolve_model(parse(argv(**changes))[0]), 1, gpus=False)


def test_a_glob_without_a_layer_lists_the_names() -> None:
    flags: dict[str, Any] = {"num_experts": 4, "disable_bias_linear": True, "capture_step": 1}
    config = resolve_model(parse(argv(**flags, capture_layers=["*of expert 3", "layers.3.*"]))[0])
    with pytest.raises(UserError) as raised:
        check_capture(config)
    assert str(raised.value) == (
        "--capture-layers layers.3.* matches no linear layer; this model has "
        "layers.N.self_attention.linear_qkv (N from 1 to 2), layers.N.self_attention.linear_proj (N from 1 to 2), "
        "layers.N.mlp.experts.linear_fc1 of expert E (0 to 3) (N from 1 to 2), "
        "layers.N.mlp.experts.linear_fc2 of expert E (0 to 3) (N from 1 to 2)"
    )


def test_the_size_that_is_announced_is_the_size_of_the_files(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"capture_step": 2, "capture_layers": "*"}
    drive(argv(save="run", no_save=True, recipe="mxfp8", **flags))
    files = list(Path("run/captures/iteration_2").iterdir())
    assert len(files) == 8
    written = sum(tensor.nbytes for file in files for tensor in (read_capture(file).x, read_capture(file).w))
    written += sum(read_capture(file).dy.nbytes for file in files)
    config, paths = run_paths(resolve_run(resolve_model(parse(argv(save="run", **flags))[0]), 1, gpus=False), "mxfp8")
    assert "in iteration 2 (behind: written before, or never): " in capture_line(config, paths, 1, completed=2)
    line = capture_line(config, paths, 1, completed=1)
    assert line == (f"operands of 8 linear layers in iteration 2: {written / 2**30:.3f} GiB each time, in run/captures")
    printed = capsys.readouterr().out
    assert line in printed
    assert "operands of iteration 2 written to run/captures/iteration_2" in printed


def test_an_expert_has_a_file(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    experts: dict[str, Any] = {"num_experts": 4, "disable_bias_linear": True, "recipe": "mxfp8", "no_save": True}
    drive(argv(save="run", **experts, capture_step=2, capture_layers="layers.1.*of expert 3"))
    assert "operands of 2 linear layers in iteration 2: about " in capsys.readouterr().out
    first, second = map(read_capture, sorted(Path("run/captures/iteration_2").iterdir()))
    assert first.file_name == "layers.1.mlp.experts.linear_fc1.expert3.safetensors"
    assert (first.linear_id.expert, first.linear_id.path) == (3, "layers.1.mlp.experts.linear_fc1 of expert 3")
    assert len(first.x) == len(first.dy) == len(second.x) <= 2 * 2 * 32  # at most two of four experts take a token
    assert first.w.shape == (first.dy.shape[1], first.x.shape[1])
