"""Whole runs of the driver in one process."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.registry import get_recipe, recipes
from megatron_lowprec.training import loop
from tests.refusal import refused
from tests.training.checkpoint.foreign import change
from tests.training.conftest import Drive, driving
from tests.training.helpers import LLAMA, argv, losses, rows
from tests.weekly import also_weekly


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


# What a run saves of a recipe does not depend on the model: a Llama runs one of each kind of state.
SHAPES: dict[str, dict[str, Any]] = {"gpt": {}, "llama": LLAMA}
RESUMED = [(recipe, "llama" if get_recipe(recipe).activations.quantized else "gpt") for recipe in recipes()]
RESUMED += [(recipe, "llama") for recipe in ("bf16", "fp8_delayed", "mxfp4_rht_sr", "fp8_lm_o3")]
# without state, with histories, with draws, with a quantized optimizer state
RESUMED_EACH_TIME = {f"{r}-gpt" for r in ("bf16", "fp8_delayed", "mxfp4_rht_sr", "fp8_lm_o3")}
RESUMED_EACH_TIME |= {"deepseek_v3-llama", "fp8_delayed-llama"}
# Dropout is on, and an evaluation comes between: neither may leave a trace.
# Three layers: where a recipe leaves both ends in bf16, one is quantized.
IN_PARTS: dict[str, Any] = {
    "num_layers": 3,
    "bf16": True,
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "kv_channels": 64,
    "train_iters": 4,
    "save_interval": 2,
    "eval_interval": 2,
    "eval_iters": 1,
}


@pytest.fixture(scope="module")
def losses_in_bf16(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Of each shape."""
    folder = tmp_path_factory.mktemp("bf16")
    with driving(folder) as call:
        for name, shape in SHAPES.items():
            call(argv(save=name, **IN_PARTS | shape, no_save=True))
    return {name: losses(folder / name) for name in SHAPES}


@pytest.mark.parametrize(("recipe", "shape"), also_weekly(RESUMED, RESUMED_EACH_TIME))
def test_every_recipe_resumes_bit_for_bit(
    losses_in_bf16: dict[str, list[str]], drive: Drive, recipe: str, shape: str
) -> None:
    options = IN_PARTS | SHAPES[shape] | {"recipe": recipe}
    drive(argv(save="whole", **options))
    shutil.copytree("whole/iter_0000002", "half/iter_0000002")
    Path("half/latest_checkpointed_iteration.txt").write_text("2\n")
    drive(argv(save="rest", load="half", **options, no_save=True))
    assert losses(Path("rest")) == losses(Path("whole"))[2:]
    if recipe != "bf16":
        assert losses_in_bf16[shape] != losses(Path("whole")), "the recipe changed nothing"


def test_a_longer_run_is_the_shorter_one_and_more(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(save="long", train_iters=5, lr_decay_iters=8, no_save=True))
    drive(argv(save="out", load="out", train_iters=3, lr_decay_iters=8))
    drive(argv(save="out", load="out", train_iters=5, lr_decay_iters=8))
    assert losses(Path("out")) == losses(Path("long"))
    capsys.readouterr()
    # Without a horizon of its own the run stays on the checkpoint's, and says so.
    drive(argv(save="out", load="out", train_iters=6))
    assert "the horizon is 32 samples, the checkpoint's" in capsys.readouterr().out
    assert len(losses(Path("out"))) == 6


def test_a_finished_run_has_nothing_to_train(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(save="out", eval_iters=1))
    drive(argv(save="out", load="out", eval_iters=1))
    assert "nothing to train" in capsys.readouterr().out
    written = rows(Path("out"))
    assert "lm loss test" in written[-1]
    drive(argv(save="out", load="out", eval_iters=0))
    assert rows(Path("out")) == written
    before = {path: path.read_bytes() for path in Path("out").iterdir() if path.is_file()}
    with pytest.raises(UserError, match=r"--train-iters 1: checkpoint .* is at iteration 2; give at least as many"):
        drive(argv(save="out", train_iters=1))
    assert {path: path.read_bytes() for path in before} == before


def test_pretrained_weights_load_without_save(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(save="out"))
    first = {}
    for name, options in (("kept", {}), ("not_kept", {"no_save": True})):
        drive(argv(save=name, train_iters=1, pretrained_checkpoint="out", **options))
        assert "weights of out/iter_0000002" in capsys.readouterr().out
        first[name] = losses(Path(name))
    assert first["kept"] == first["not_kept"]
    with pytest.raises(UserError, match="--pretrained-checkpoint nowhere: no checkpoint there"):
        drive(argv(save="new", train_iters=1, pretrained_checkpoint="nowhere", no_save=True))


def test_a_run_resumed_by_its_checkpoints_folder_stays_one_run(drive: Drive) -> None:
    drive(argv(train_iters=2))
    (run,) = Path("runs").iterdir()
    drive(argv(save=str(run / "checkpoints"), train_iters=4))
    assert not (run / "checkpoints" / "metrics.jsonl").exists()
    assert len(losses(run)) == 4
    assert yaml.safe_load((run / "config.yaml").read_text())["options"]["train_iters"] == 4


def test_a_checkpoint_of_another_shape_is_refused(drive: Drive) -> None:
    drive(argv(save="out", train_iters=1))
    with pytest.raises(UserError) as error:
        drive(argv(save="new", load="out", hidden_size=128, normalization="RMSNorm"))
    message = str(error.value)
    for words in ("--hidden-size 128 (checkpoint: 64)", "--normalization RMSNorm (checkpoint: LayerNorm)"):
        assert words in message
    assert not Path("new").exists()


def test_load_without_a_checkpoint_is_refused_unless_it_is_save(drive: Drive) -> None:
    with pytest.raises(UserError, match="no checkpoint there"):
        drive(argv(save="out", load="elsewhere"))
    drive(argv(save="run/checkpoints", train_iters=1))
    with pytest.raises(UserError, match=r"no checkpoint there .*; name run/checkpoints"):
        drive(argv(save="out", load="run"))
    with pytest.raises(UserError, match=r"this is one checkpoint; name run/checkpoints, with --ckpt-step 1"):
        drive(argv(save="out", load="run/checkpoints/iter_0000001"))
    drive(argv(save="out", load="out", train_iters=1, no_save=None))
    assert Path("out/iter_0000001").is_dir()


@pytest.mark.parametrize(
    ("recipe", "field"),
    [("fp8_delayed", []), ("fp8_mxfp4_rht_sr", []), ("fp8_delayed", ["keep_bf16.first_layers=1"])],
)
def test_delayed_scaling_begins_anew_where_a_checkpoint_has_no_history(
    drive: Drive, capsys: pytest.CaptureFixture[str], recipe: str, field: list[str]
) -> None:
    sizes = {"hidden_size": 128, "ffn_hidden_size": 256}
    drive(argv(save="out", train_iters=1, recipe="bf16", **sizes))
    drive(argv(save="new", load="out", train_iters=3, recipe=recipe, recipe_override=field or None, **sizes))
    assert "amax histories" in capsys.readouterr().out
    assert len(losses(Path("new"))) == 2


def test_a_history_of_another_length_begins_anew(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(save="out", train_iters=1, recipe="fp8_mxfp4_rht_sr", hidden_size=128))
    shorter = [word for name in ("input", "weight") for word in ("--recipe-override", f"fprop.{name}.history=16")]
    drive(argv(save="new", load="out", train_iters=2, recipe="fp8_mxfp4_rht_sr", hidden_size=128) + shorter)
    assert "16 amax histories" in capsys.readouterr().out


@pytest.mark.parametrize("damaged", [".metadata", "*.distcp"])
def test_a_damaged_checkpoint_is_one_line(drive: Drive, damaged: str) -> None:
    drive(argv(save="out", train_iters=1))
    for path in Path("out/iter_0000001").glob(damaged):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match="cannot be loaded"):
        drive(argv(save="new", load="out", train_iters=2))


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


def test_a_recipe_of_many_overrides_has_a_folder(drive: Drive) -> None:
    many = [word for i in range(20) for word in ("--recipe-override", f"keep_bf16.names=['layers.{i % 2 + 1}.*']")]
    drive(argv(recipe="mxfp8", hidden_size=128, train_iters=1, no_save=True) + many)
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("gpt-mxfp8+keep_bf16.names")
    assert len(folder.name) == 120


def test_experts_have_biases_by_default(drive: Drive) -> None:
    drive(argv(save="out", num_experts=2, hidden_size=128, recipe="mxfp4_rht_sr", bf16=True))
    assert len(losses(Path("out"))) == 2


@pytest.mark.slow
def test_grouped_and_sequential_experts_continue_each_other(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"num_experts": 2, "recipe": "fp8_delayed", "bf16": True, "disable_bias_linear": True, "train_iters": 2}
    options["log_quantization_interval"] = 1
    drive(argv(save="whole", **options))
    for grouped in (False, True):
        drive(argv(save=f"out {grouped}", moe_grouped_gemm=grouped or None, exit_interval=1, **options))
        drive(argv(save=f"out {grouped}", moe_grouped_gemm=None if grouped else True, **options))
        assert losses(Path(f"out {grouped}")) == losses(Path("whole"))
        log = Path(f"out {grouped}/quantization.jsonl").read_text()
        assert log == Path("whole/quantization.jsonl").read_text()
    why = "--moe-grouped-gemm: experts of a layer run fprop, dgrad, wgrad in a loop (kernels need a GPU and Triton)"
    assert why in capsys.readouterr().out


def test_an_older_run_is_kept_by_a_run_from_elsewhere(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(save="seed", train_iters=1))
    drive(argv(save="out", train_iters=2))
    drive(argv(save="out", load="seed", finetune=True, train_iters=1))
    assert "an older run's metrics moved to" in capsys.readouterr().out
    assert len(Path("out/metrics.1.jsonl").read_text().splitlines()) == 2


def test_options_that_change_where_a_run_resumes_are_recorded(drive: Drive) -> None:
    def earlier(folder: str) -> Any:
        return yaml.safe_load(Path(folder, "config.yaml").read_text()).get("earlier_options")

    drive(argv(save="out", train_iters=1))
    lr = yaml.safe_load(Path("out/config.yaml").read_text())["options"]["lr"]
    drive(argv(save="out", train_iters=2))
    assert earlier("out") is None
    drive(argv(save="out", train_iters=3, lr=lr / 2, clip_grad=0.5))
    assert earlier("out") == [{"until_iteration": 2, "clip_grad": 1.0, "max_lr": lr}]
    drive(argv(save="out", train_iters=4, lr=lr / 2))
    assert earlier("out")[1:] == [{"until_iteration": 3, "clip_grad": 0.5}]
    drive(argv(save="new", load="out", finetune=True, train_iters=1))
    assert earlier("new") is None


def test_resuming_under_another_recipe_has_a_note(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(save="out", train_iters=1, recipe="bf16"))
    drive(argv(save="out", load="out", train_iters=2, recipe="mxfp8"))
    assert "trained with bf16" in capsys.readouterr().out
    assert yaml.safe_load(Path("out/config.yaml").read_text())["earlier_recipes"] == ["bf16"]
    drive(argv(save="out", load="out", train_iters=3))
    assert yaml.safe_load(Path("out/config.yaml").read_text())["earlier_recipes"] == ["bf16"]
    drive(argv(save="out", load="out", train_iters=4, recipe="bf16"))
    assert yaml.safe_load(Path("out/config.yaml").read_text())["earlier_recipes"] == ["bf16", "mxfp8"]
    drive(argv(save="new", load="out", train_iters=1, finetune=True))
    assert "earlier_recipes" not in yaml.safe_load(Path("new/config.yaml").read_text())


@pytest.mark.parametrize("load", [{"load": "out"}, {}])
def test_a_run_continues_under_the_checkpoint_s_recipe(
    drive: Drive, capsys: pytest.CaptureFixture[str], load: dict[str, str]
) -> None:
    override = ["dgrad.grad_output.format=e5m2"]
    drive(argv(save="out", train_iters=1, recipe="mxfp8", recipe_override=override))
    capsys.readouterr()
    drive(argv(save="out", train_iters=2, **load))
    printed = capsys.readouterr().out
    assert "recipe: the checkpoint's mxfp8+dgrad.grad_output.format=e5m2" in printed
    assert "recipe:      mxfp8+dgrad.grad_output.format=e5m2" in printed
    assert "where the checkpoint was trained with" not in printed
    assert [row["iteration"] for row in rows(Path("out"))] == [1, 2]


def test_a_command_with_overrides_continues_when_repeated(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    command = {"save": "out", "recipe_override": ["keep_bf16.last_layers=1"]}
    drive(argv(**command, train_iters=1))
    capsys.readouterr()
    drive(argv(**command, train_iters=2))
    printed = capsys.readouterr().out
    assert "recipe: the checkpoint's bf16+keep_bf16.last_layers=1\n" in printed
    assert "recipe:      bf16+keep_bf16.last_layers=1\n" in printed
    assert "where the checkpoint was trained with" not in printed


def test_overrides_of_the_command_are_not_called_the_checkpoint_s(
    drive: Drive, capsys: pytest.CaptureFixture[str]
) -> None:
    drive(argv(save="out", train_iters=1, recipe="mxfp8"))
    capsys.readouterr()
    drive(argv(save="out", train_iters=2, recipe_override=["dgrad.grad_output.format=e5m2"]))
    printed = capsys.readouterr().out
    assert "recipe: the checkpoint's mxfp8 with --recipe-override\n" in printed
    assert "recipe: mxfp8+dgrad.grad_output.format=e5m2, where the checkpoint was trained with mxfp8" in printed


def test_an_older_checkpoint_s_recipe_is_no_other_one(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    """Its summary may have other words, and it lacks fields that came later."""
    drive(argv(save="out", train_iters=1, recipe="mxfp8"))
    path = Path("out/iter_0000001/config.yaml")
    content = yaml.safe_load(path.read_text())
    del content["recipe"]["activations"]
    content |= {"recipe": content["recipe"] | {"summary": "as it was called then"}}
    change(path.parent, path.name, yaml.safe_dump(content).encode())
    capsys.readouterr()
    drive(argv(save="out", train_iters=2, recipe="mxfp8"))
    assert "where the checkpoint was trained with" not in capsys.readouterr().out
    assert "earlier_recipes" not in yaml.safe_load(Path("out/config.yaml").read_text())


def test_weights_alone_bring_no_recipe(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(save="out", train_iters=1, recipe="mxfp8"))
    drive(argv(save="new", load="out", finetune=True, train_iters=1))
    assert "recipe:      bf16" in capsys.readouterr().out
    drive(argv(save="newer", pretrained_checkpoint="out", train_iters=1))
    assert "recipe:      bf16" in capsys.readouterr().out


def test_finetune_takes_weights_alone(drive: Drive) -> None:
    drive(argv(save="out", train_iters=2))
    drive(argv(save="new", load="out", finetune=True, train_iters=1))
    assert [r["iteration"] for r in rows(Path("new"))] == [1]
    assert losses(Path("new"))[0] != losses(Path("out"))[0]


def test_a_gradient_that_is_not_finite_changes_nothing(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_lowprec.mcore.optim import optimizer_step

    norms = iter([1.0, math.nan, 1.0])
    monkeypatch.setattr(optimizer_step, "grad_norm", lambda optimizer: torch.tensor(next(norms)))
    drive(argv(save="out", train_iters=3, hidden_dropout=0, attention_dropout=0, log_params_norm=True))
    row = rows(Path("out"))
    assert [r["skipped iterations"] for r in row] == [0, 1, 1]
    assert row[1]["params-norm"] == row[0]["params-norm"] != row[2]["params-norm"]


def test_exit_interval_saves_and_stops(drive: Drive) -> None:
    drive(argv(save="out", train_iters=5, exit_interval=2, eval_iters=1))
    assert Path("out/latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert not [r for r in rows(Path("out")) if "lm loss test" in r]


def test_sigterm_saves_and_stops(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    step = loop.train_step

    def step_and_signal(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return step(*args)

    monkeypatch.setattr(loop, "train_step", step_and_signal)
    try:
        drive(argv(save="out", train_iters=5, exit_signal_handler=True))
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert Path("out/latest_checkpointed_iteration.txt").read_text().strip() == "1"


def test_the_last_iteration_is_the_end_whatever_the_exit_interval(drive: Drive) -> None:
    drive(argv(save="out", train_iters=4, exit_interval=4, eval_iters=1))
    assert [r["iteration"] for r in rows(Path("out")) if "lm loss test" in r] == [4]


PROFILED: dict[str, Any] = {"profile": True, "profile_step_start": 1, "profile_step_end": 3, "lr_decay_iters": 10}


def traces() -> list[str]:
    """Traces of the run in out/, with events; no profiler is left running, which would crash at the process's end."""
    assert not torch.autograd._profiler_enabled()
    found = sorted(Path("out/profile").glob("*.json"))
    assert all(json.loads(path.read_text())["traceEvents"] for path in found)
    return [path.name for path in found]


def test_profile_writes_a_trace(drive: Drive) -> None:
    drive(argv(save="out", train_iters=4, no_save=True, **PROFILED))
    assert traces() == ["rank0.json"]


def test_a_profile_that_ends_early_or_starts_late_writes_what_it_has(
    drive: Drive, capsys: pytest.CaptureFixture[str]
) -> None:
    options = PROFILED | {"profile_step_end": 4, "train_iters": 5}
    drive(argv(save="out", exit_interval=2, **options))
    assert traces() == ["rank0.json"]
    drive(argv(save="out", exit_interval=3, **options))
    assert traces() == ["rank0.json", "rank0_from_2.json"]
    drive(argv(save="out", exit_interval=4, **options))
    assert traces() == ["rank0.json", "rank0_from_2.json", "rank0_from_3.json"]
    assert "--profile: no trace" not in capsys.readouterr().out
    drive(argv(save="out", **options))
    assert len(traces()) == 3
    assert "--profile: no trace, for this start is at iteration 4, and" in capsys.readouterr().out


def test_a_profile_that_never_starts_has_a_note(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(save="out", train_iters=4, exit_interval=1, **PROFILED))
    assert traces() == []
    assert "--profile: no trace, for this start ended at iteration 1, and" in capsys.readouterr().out


@pytest.mark.parametrize("numbers", [(4, 9), (3, 3), (3, 2), (-1, 2)])
def test_a_profile_of_no_iteration_is_refused(drive: Drive, numbers: tuple[int, int]) -> None:
    options = dict(zip(("profile_step_start", "profile_step_end"), numbers))
    with pytest.raises(UserError, match="profile no iteration of this run, which has 4"):
        drive(argv(save="out", train_iters=4, profile=True, **options))


class BrokenError(Exception):
    """An error in the middle of a run."""


@pytest.mark.parametrize("way", ["error", "signal"])
def test_open_files_and_groups_are_closed_after_every_outcome(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    iterate, logs = loop._train_iteration, list[Any]()

    def ending(run: Any, *rest: Any) -> Any:
        if run.progress.iteration == 2:
            logs.append(run.log)
            if way == "error":
                raise BrokenError
            os.kill(os.getpid(), signal.SIGTERM)
        return iterate(run, *rest)

    monkeypatch.setattr(loop, "_train_iteration", ending)
    with pytest.raises(BrokenError) if way == "error" else nullcontext():
        drive(argv(save="out", train_iters=5, **PROFILED | {"profile_step_end": 4}))
    assert traces() == ([] if way == "error" else ["rank0.json"])
    assert logs[0]._metrics.closed
    assert logs[0]._bar is None


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
