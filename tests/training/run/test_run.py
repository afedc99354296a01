"""A whole run of the driver in one process: what it learns, logs and saves, and what it refuses at its start."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from megatron.core import parallel_state

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.distributed import rank_sync
from megatron_lowprec.training.run_plan import _without_names
from tests.refusal import refused
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses, rows


def test_a_run_learns_logs_evaluates_and_saves(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(save="out", train_iters=30, eval_iters=1, eval_interval=15, lr_decay_style="constant"))
    row = rows(Path("out"))
    train = [r["lm loss"] for r in row if "lm loss" in r]
    assert len(train) == 30
    # Arithmetic sequences modulo 256: about log(256) at first.
    assert train[0] == pytest.approx(math.log(256), abs=0.1)
    assert train[-1] < train[0] - 0.2
    assert [r["iteration"] for r in row if "lm loss validation" in r] == [15, 30]
    assert [r["iteration"] for r in row if "lm loss test" in r] == [30]
    assert Path("out/latest_checkpointed_iteration.txt").read_text().strip() == "30"
    assert Path("out/iter_0000030/.metadata").exists()
    content = yaml.safe_load(Path("out/config.yaml").read_text())
    assert content["options"]["hidden_size"] == 64
    assert content["recipe"]["name"] == "bf16"
    printed = capsys.readouterr().out
    assert "emulated" not in printed
    assert "64" in next(line for line in printed.splitlines() if line.startswith("model:"))


def test_an_emulated_accumulator_changes_the_loss_and_is_named(
    drive: Drive, capsys: pytest.CaptureFixture[str]
) -> None:
    common: dict[str, Any] = {"recipe": "fp8_current", "bf16": True, "no_save": True}
    drive(argv(save="plain", **common))
    assert "accumulator" not in capsys.readouterr().out
    drive(argv(save="emulated", emulate_accumulator=True, **common))
    assert "--emulate-accumulator: fprop summed as on Hopper's FP8 units" in capsys.readouterr().out
    plain, emulated = losses(Path("plain")), losses(Path("emulated"))
    assert emulated != plain
    assert [*map(float.fromhex, emulated)] == pytest.approx([*map(float.fromhex, plain)], rel=1e-3)
    with pytest.raises(UserError, match="no GEMM of recipe mxfp8 has fast_accumulation"):
        drive(argv(save="no", emulate_accumulator=True, **{**common, "recipe": "mxfp8"}))


def test_no_evaluation_anywhere_at_eval_iters_0(drive: Drive) -> None:
    drive(argv(save="out", eval_iters=0, eval_interval=1, no_save=True))
    assert not [r for r in rows(Path("out")) if "lm loss validation" in r or "lm loss test" in r]


def test_a_file_in_the_place_of_the_folder_is_refused(drive: Drive) -> None:
    Path("out").write_text("")
    with pytest.raises(UserError, match="--save out: out is a file"):
        drive(argv(save="out"))


def test_a_folder_that_cannot_be_made_is_refused(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("")
    with pytest.raises(UserError, match=r"--save file/out: .*file is a file"):
        drive(argv(save="file/out"))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # who runs the tests may be allowed everything
    with pytest.raises(UserError, match=r"--save new/out: .* cannot be written to"):
        drive(argv(save="new/out"))


def test_a_recipe_that_quantizes_nothing_has_a_note(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(recipe="fp8_current_bf16_ends", num_layers=2, train_iters=1, no_save=True))
    assert "recipe fp8_current_bf16_ends quantizes nothing in this model" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [1, 2])
def test_sinkhorn_on_parts_of_a_sequence_has_a_note(
    drive: Drive, capsys: pytest.CaptureFixture[str], ranks: int
) -> None:
    layout = {"sequence_parallel": True, "tensor_model_parallel_size": ranks}
    experts = {"num_experts": 2, "disable_bias_linear": True, "moe_router_load_balancing_type": "sinkhorn"}
    drive(argv(**experts, **layout, explain_recipe=True))
    assert ("sinkhorn: each rank of a sequence balances its own" in capsys.readouterr().out) == (ranks > 1)


def test_a_recipe_of_many_overrides_has_a_folder(drive: Drive) -> None:
    many = [word for i in range(20) for word in ("--recipe-override", f"keep_bf16.names=['layers.{i % 2 + 1}.*']")]
    drive(argv(recipe="mxfp8", hidden_size=128, train_iters=1, no_save=True) + many)
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("gpt-mxfp8+keep_bf16.names")
    assert len(folder.name) == 120


def test_experts_have_biases_by_default(drive: Drive) -> None:
    drive(argv(save="out", num_experts=2, hidden_size=128, recipe="mxfp4_rht_sr", bf16=True))
    assert len(losses(Path("out"))) == 2


def test_a_gradient_that_is_not_finite_changes_nothing(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_lowprec.mcore.optim import optimizer_step

    norms = iter([1.0, math.nan, 1.0])
    monkeypatch.setattr(optimizer_step, "grad_norm", lambda optimizer: torch.tensor(next(norms)))
    drive(argv(save="out", train_iters=3, hidden_dropout=0, attention_dropout=0, log_params_norm=True))
    row = rows(Path("out"))
    assert [r["skipped iterations"] for r in row] == [0, 1, 1]
    assert row[1]["params-norm"] == row[0]["params-norm"] != row[2]["params-norm"]


def test_too_little_data_is_one_line(drive: Drive, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "1 2 3"}\n' * 3)
    with refused("12 tokens in 3 documents", "32 + 1"):
        drive(argv(mock_data=None, data_path=["text.jsonl"], split="1", data_cache_path="cache"))


@pytest.mark.parametrize("path", ["nowhere.jsonl", "nowhere_text_document"])
def test_missing_data_is_refused_before_the_start(drive: Drive, path: str) -> None:
    with pytest.raises(UserError, match="nowhere"):
        drive(argv(mock_data=None, data_path=[path]))
    assert not torch.distributed.is_initialized()


def test_real_data_does_not_depend_on_the_length_of_the_run(drive: Drive, tmp_path: Path) -> None:
    text = " ".join(str(i % 127) for i in range(400))
    (tmp_path / "text.jsonl").write_text(f'{{"text": "{text}"}}\n' * 2)
    data = {"mock_data": None, "train_data_path": ["text.jsonl"], "data_cache_path": "cache", "lr_decay_iters": 30}
    drive(argv(save="short", train_iters=3, no_save=True, **data))
    # 24 samples an epoch: the longer run goes over the data more than once.
    drive(argv(save="long", train_iters=10, no_save=True, **data))
    assert losses(Path("long"))[:3] == losses(Path("short"))


def test_list_and_explain_start_nothing(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(["--list-recipes"])
    assert "mxfp4_rht_sr" in capsys.readouterr().out
    drive(["--explain-recipe", "--recipe", "mxfp4_rht_sr"])
    assert "linear_qkv" in capsys.readouterr().out
    drive(["--explain-recipe", "--recipe", "nvfp4_all", "--bf16", "--device", "sm100"])
    assert "fprop  blackwell_mx, unverified hardware, checked at start" in capsys.readouterr().out
    for device, starts in (("sm90", False), ("sm100", True)):
        drive(["--explain-recipe", "--recipe", "mxfp8", "--bf16", "--device", device, "--native", "require"])
        refused = f"--native require: a run would not start on {device}, GEMMs are emulated"
        assert (refused not in capsys.readouterr().out.splitlines()) == starts
    drive(argv(memory_plan=True, bf16=True, recipe="mxfp8", device="sm100"))
    assert capsys.readouterr().out.startswith("memory plan of one of 1 sm100 GPUs; recipe mxfp8, ")
    for flags, said in (
        ([], "add --explain-recipe or --memory-plan"),
        (["--explain-recipe"], "is not known: give one of cpu, sm80, "),
    ):
        with pytest.raises(UserError, match=said):
            drive(["--recipe", "mxfp8", "--device", "sm999", *flags])
    with pytest.raises(UserError, match="--device cpu was asked of --memory-plan"):
        drive(["--recipe", "mxfp8", "--device", "cpu", "--memory-plan"])
    assert not Path("runs").exists()


def test_ranks_compare_what_they_will_train(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the groups of a layout exist, which options decide; files and folders may differ between nodes."""
    compared: list[dict[str, Any]] = []

    def compare(settings: dict[str, Any]) -> None:
        assert not parallel_state.model_parallel_is_initialized()
        compared.append(settings)
        raise UserError("a rank differs")

    monkeypatch.setattr(rank_sync, "same_as_on_rank_0", compare)
    with refused(match="a rank differs"):
        drive(argv(save="out", norm_epsilon=0.25, recipe="fp8_delayed", tensorboard_dir="logs"))
    (settings,) = compared
    assert settings["--norm-epsilon"] == 0.25
    assert settings["--log-interval"] == 1
    assert settings["the recipe's dgrad.grad_output.format"] == "e5m2"
    assert not settings.keys() & {"--save", "--tensorboard-dir", "--recipe", "--load"}


@pytest.mark.parametrize(
    ("name", "value", "left"),
    [
        ("train_data_path", ["0.9", "a", "0.1", "b"], "of weights 0.9, 0.1"),
        ("data_path", ["a", "b"], "of weights None, None"),
        ("tokenizer_model", "a", "of a file"),
        ("seed", 1, 1),
    ],
)
def test_files_may_have_another_name_on_another_node(name: str, value: Any, left: Any) -> None:
    assert _without_names(name, value) == left
