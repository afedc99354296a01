"""Runs that continue from a checkpoint, bit for bit, and checkpoints that no run can continue from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.registry import get_recipe, recipes
from tests.training.conftest import Drive, driving
from tests.training.helpers import LLAMA, argv, losses, rows
from tests.weekly import also_weekly

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
    with pytest.raises(UserError, match="--load out: no checkpoint there"):
        drive(argv(save="out", load="out", finetune=True))  # which has nothing to begin with
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


def test_finetune_takes_weights_alone(drive: Drive) -> None:
    drive(argv(save="out", train_iters=2))
    drive(argv(save="new", load="out", finetune=True, train_iters=1))
    assert [r["iteration"] for r in rows(Path("new"))] == [1]
    assert losses(Path("new"))[0] != losses(Path("out"))[0]
