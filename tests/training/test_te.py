"""``--transformer-impl transformer_engine``: the driver's side of it on a CPU, and all of it on a GPU that has it.

On a CPU a stand-in computes in plain torch what TransformerEngine's layers mean without FP8, so that the same losses to
the last bit show that the same GPT is built, trained, saved and loaded; and it writes down under which recipe it was
called.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.once import once
from tests.training.checkpoint import foreign
from tests.training.conftest import driving
from tests.training.helpers import LLAMA, REPOSITORY, argv, losses, rows
from tests.waiting import PATIENCE


def run(
    folder: Path, name: str, implementation: str, processes: int = 1, gpu: bool = False, **changes: Any
) -> subprocess.CompletedProcess[str]:
    """A run in ``folder/name``, in processes of its own: Megatron-core looks for TransformerEngine when imported."""
    arguments = argv(save=name, transformer_impl=implementation, **changes)
    if gpu or implementation == "local":
        return start(folder, name, "pretrain_gpt.py", arguments, processes, gpu)
    return start(folder, name, "tests/training/te_driver.py", arguments, processes)


def start(
    folder: Path, name: str, script: str, arguments: list[str], processes: int = 1, gpu: bool = False
) -> subprocess.CompletedProcess[str]:
    """A script of the repository, with the stand-in where it is ``te_driver.py``."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    paths = [str(REPOSITORY), *([str(REPOSITORY / "tests/stubs")] if script.endswith("te_driver.py") else [])]
    paths += os.environ["PYTHONPATH"].split(os.pathsep) if "PYTHONPATH" in os.environ else []
    hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, str(REPOSITORY / script), *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),  # as runs in this process: sums of the same order
            **hidden,
            "TE_STAND_IN_LOG": str(folder / f"{name}.log"),
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def must_run(folder: Path, name: str, implementation: str = "transformer_engine", **changes: Any) -> str:
    done = run(folder, name, implementation, **changes)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_all(folder: Path, cases: dict[str, dict[str, Any]], **environment_of_last: str) -> None:
    """Runs with the stand-in, one after the other in one process: what each has printed is in ``NAME.out``.

    The error of one that is refused is in ``NAME.error``.
    """
    lines = {name: argv(save=name, transformer_impl="transformer_engine", **case) for name, case in cases.items()}
    (folder / "cases.json").write_text(json.dumps([lines, environment_of_last]))
    done = start(folder, "cases", "tests/training/te_driver.py", ["runs", "cases.json"])
    assert done.returncode == 0, done.stderr[-3000:]


def run_here(folder: Path, name: str, **changes: Any) -> None:
    """A run with this project's layers in this process; what it has printed is in ``NAME.out``."""
    with driving(folder) as call, (folder / f"{name}.out").open("w") as out, redirect_stdout(out):
        call(argv(save=name, transformer_impl="local", **changes))


def said(folder: Path, name: str) -> str:
    return (folder / f"{name}.out").read_text()


def calls(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.log").read_text().splitlines()]


# Three layers, so that one is left where both ends stay in bf16.
SHAPE: dict[str, Any] = {"num_layers": 3, "train_iters": 4, "save_interval": 2}
# With dropout and two microbatches a step; one with main weights beside the model's, one without.
SHAPES: dict[str, dict[str, Any]] = {"gpt": SHAPE, "llama": SHAPE | LLAMA | {"bf16": True}}
RECIPES: dict[str, dict[str, Any]] = {
    "fp8_delayed": {
        "recipe": "DelayedScaling",
        "fp8_format": "hybrid",
        "margin": 0,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "override_linear_precision": [False, False, False],
    },
    "fp8_current_bf16_ends": {"recipe": "Float8CurrentScaling", "fp8_format": "hybrid", "power_of_two": False},
    "fp8_blockwise": {"recipe": "Float8BlockScaling", "fp8_format": "e4m3", "power_of_two": False},
}
OF_RECIPES = {"hidden_size": 128, "ffn_hidden_size": 256, "num_layers": 3, "bf16": True, "eval_iters": 1}
DELAYED: dict[str, Any] = {**SHAPE, "recipe": "fp8_delayed", "lr_decay_iters": 10}
NEWLY = DELAYED | {"load": "other", "train_iters": 5}
EXPERTS: dict[str, Any] = {"num_experts": 2, "train_iters": 1}
SEQUENCE: dict[str, Any] = {"train_iters": 3, "eval_iters": 1, "hidden_dropout": 0, "attention_dropout": 0}
SEQUENCE |= {"no_save": True, "log_params_norm": True}


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs on one rank: a process with the stand-in takes seconds to start."""

    def runs(folder: Path) -> None:
        for name, shape in SHAPES.items():
            run_here(folder, f"our {name}", **shape)
        run_here(folder, "our experts", **EXPERTS)
        of_recipes = {name: OF_RECIPES | {"recipe": name, "no_save": True} for name in RECIPES}
        # its kind of scales is a variable that TransformerEngine reads when it is imported
        blockwise = of_recipes.pop("fp8_blockwise")
        (folder / "fp8_blockwise.out").write_text(must_run(folder, "fp8_blockwise", **blockwise))
        half = {"ckpt_step": 2}
        cases = {f"their {name}": shape for name, shape in SHAPES.items()}
        cases |= {f"our {name} continued": shape | half | {"load": f"our {name}"} for name, shape in SHAPES.items()}
        cases |= of_recipes | {"whole": DELAYED, "rest": DELAYED | half | {"load": "whole"}}
        cases |= {"other": DELAYED | half | {"load": "whole", "recipe": "fp8_current"}, "transformer_engine": NEWLY}
        cases |= {"sequence": SEQUENCE, "their experts": EXPERTS | {"load": "our experts"}, "no blocks": blockwise}
        run_all(folder, cases, TE_STAND_IN_NO_BLOCKS="1")
        assert {path.stem for path in folder.glob("*.error")} == {"their experts", "no blocks"}
        for name, shape in SHAPES.items():
            run_here(folder, f"their {name} continued", load=f"their {name}", ckpt_step=2, **shape)
        run_here(folder, "local", **NEWLY)

    return once(tmp_path_factory, "te", runs)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_model_is_equal_and_checkpoints_are_interchangeable(launch: Path, shape: str) -> None:
    ours = losses(launch / f"our {shape}")
    assert losses(launch / f"their {shape}") == ours
    assert len(set(ours)) == 4
    header = said(launch, f"their {shape}")
    assert "layers:      transformer_engine 2.20.2; optimizer FusedAdam of transformer_engine" in header
    assert all(call["fused"] for call in calls(launch, f"their {shape}"))
    assert losses(launch / f"our {shape} continued") == ours[2:]
    assert losses(launch / f"their {shape} continued") == ours[2:]
    words = "layers: transformer_engine, where the checkpoint was written with local"
    assert words in said(launch, f"our {shape} continued")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_linear_runs_under_the_recipe_s_counterpart(launch: Path, recipe: str) -> None:
    assert f"recipe {recipe} by TransformerEngine, native: --fp8-format" in said(launch, recipe)
    assert "emulated" not in said(launch, recipe)
    gemms = json.loads((launch / recipe / "run.json").read_text())["gemms"]
    assert all(how.startswith("native, TransformerEngine: --fp8-format") for how in gemms.values())
    found = [{k: v for k, v in call.items() if k in RECIPES[recipe]} for call in calls(launch, recipe)]
    layer = [RECIPES[recipe]] * 4
    ends: list[dict[str, Any]] = [{}] * 4 if recipe.endswith("ends") else layer
    # Two steps of two microbatches, then one microbatch of validation and test each.
    assert found == [*ends, *layer, *ends] * (len(found) // 12)
    first = [call["first"] for call in calls(launch, recipe) if call["training"]]
    assert first == ([True] * 12 + [False] * 12) * 2, "a quantized weight is kept for the microbatches of a step alone"


@pytest.mark.slow
def test_its_amax_histories_are_saved_with_the_recipe_and_begin_anew_without(launch: Path) -> None:
    assert losses(launch / "rest") == losses(launch / "whole")[2:]
    assert [call["seen"] for call in calls(launch, "rest")] == [
        call["seen"] for call in calls(launch, "whole") if call["seen"] > 4
    ]
    other = said(launch, "other")
    assert "recipe: fp8_current, where the checkpoint was trained with fp8_delayed" in other
    assert "its amax histories of TransformerEngine are dropped" in other
    assert "filled by" not in other
    assert calls(launch, "other")[0]["seen"] == 1
    for implementation in ("transformer_engine", "local"):
        assert "they begin anew" in said(launch, implementation)
        assert "histories filled by 3 passes over the next batch" in said(launch, implementation)
    # Two microbatches in each of three passes and in the last step.
    assert {call["seen"] for call in calls(launch, "transformer_engine")} == set(range(1, 9))


@pytest.mark.slow
def test_a_sequence_over_two_ranks_trains_the_same(launch: Path, tmp_path: Path) -> None:
    must_run(tmp_path, "two", processes=2, context_parallel_size=2, **SEQUENCE)
    for mine, reference in zip(rows(tmp_path / "two"), rows(launch / "sequence"), strict=True):
        for key in ("lm loss", "lm loss validation", "grad-norm", "params-norm"):
            if key in reference:
                assert mine[key] == pytest.approx(reference[key], rel=2e-6), key


@pytest.mark.slow
def test_a_recipe_that_the_machine_does_not_run_is_one_line(launch: Path) -> None:
    refusal = (launch / "no blocks.error").read_text()
    assert "blockwise scaling, which it does not run on this machine: FP8 block scaled GEMM" in refusal
    assert "\n" not in refusal


@pytest.mark.slow
def test_experts_do_not_change_hands(launch: Path) -> None:
    refusal = (launch / "their experts.error").read_text()
    assert "was written with --transformer-impl local" in refusal
    assert "a layer with experts" in refusal


@pytest.mark.slow
@pytest.mark.weekly  # tests/tools/test_no_code_runs.py has the other readers
def test_no_code_of_an_extra_state_runs(tmp_path: Path) -> None:
    """TransformerEngine unpickles its states freely: the driver and evaluate read them before it does."""
    common = {"recipe": "fp8_delayed", "train_iters": 2, "lr_decay_iters": 10}
    must_run(tmp_path, "whole", **common)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": " ".join(map(str, range(100)))}) + "\n")
    scoring = ["--load", "whole", "--data-path", "text.jsonl", "--data-cache-path", "cache"]
    changes = common | {"train_iters": 3, "load": "whole", "no_save": True}

    def both() -> list[subprocess.CompletedProcess[str]]:
        return [
            run(tmp_path, "rest", "transformer_engine", **changes),
            start(tmp_path, "evaluated", "tests/training/te_driver.py", ["evaluate", *scoring]),
        ]

    honest = both()
    state = torch.frombuffer(bytearray(pickle.dumps(foreign.Foreign())), dtype=torch.uint8)
    folder = tmp_path / "whole/iter_0000002"
    foreign.replace_objects(folder, foreign.saved([state]), lambda key: "_extra_state" in key)
    for crafted, as_written in zip(both(), honest, strict=True):
        assert crafted.returncode == 2, crafted.stderr[-3000:]
        assert "_extra_state asks for posix.mkdir when it is unpickled" in crafted.stderr
        assert as_written.returncode == 0, as_written.stderr[-3000:]
    assert not (tmp_path / foreign.MARKER).exists()


@pytest.mark.slow
def test_a_broken_installation_is_one_line(tmp_path: Path) -> None:
    package = tmp_path / "site/transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    flags = argv(transformer_impl="transformer_engine", recipe="bf16")
    code = f"""
from megatron_lowprec import get_recipe
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.config.te_checks import prepare
prepare(resolve_run(resolve_model(parse({flags!r})[0]), 1, gpus=True), get_recipe("bf16"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path / 'site'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = "cannot be imported: libcudart.so.13: cannot open shared object file; install"
    assert said in done.stderr.splitlines()[-1]


# ---- TransformerEngine itself
needs_te = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="TransformerEngine is not installed"
)
ON_GPU: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "seq_length": 128,
    "micro_batch_size": 8,
    "global_batch_size": 16,
    "bf16": True,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    # the same weights for both implementations
    "use_cpu_initialization": True,
    "no_save": True,
    "gpu": True,
}
FP8 = ("fp8_delayed", "fp8_current", "fp8_blockwise")


def lm_losses(folder: Path) -> list[float]:
    return [row["lm loss"] for row in rows(folder) if "lm loss" in row]


@pytest.mark.gpu
@needs_te
@pytest.mark.parametrize("recipe", ["bf16", *FP8, "fp8_current_bf16_ends"])
def test_a_recipe_means_the_same_to_both(tmp_path: Path, recipe: str) -> None:
    # At scale 1 E5M2 rounds most gradients of the first steps to zero, which of them depends on the order of microbatch
    # and update, and the last losses with it, by 4% and more.
    common = {**ON_GPU, "recipe": recipe, "train_iters": 40, "lr_decay_style": "constant", "calibrate_amax": True}
    said = must_run(tmp_path, "theirs", **common)
    must_run(tmp_path, "ours", "local", **common)
    assert f"recipe {recipe} by TransformerEngine, native" in said
    assert "optimizer FusedAdam of transformer_engine" in said
    theirs, ours = lm_losses(tmp_path / "theirs"), lm_losses(tmp_path / "ours")
    # Sums run in other orders, and bf16 keeps 8 bits: the first loss agrees to those, later ones drift apart.
    assert theirs[0] == pytest.approx(ours[0], rel=2e-3)
    assert sum(theirs[-10:]) == pytest.approx(sum(ours[-10:]), rel=2e-2)
    assert theirs[-1] < theirs[0] - 0.2
    if recipe != "bf16":
        must_run(tmp_path, "plain", **common | {"recipe": "bf16"})
        assert losses(tmp_path / "plain") != losses(tmp_path / "theirs"), "nothing ran in FP8"


@pytest.mark.gpu
@needs_te
@pytest.mark.parametrize("recipe", ["bf16", *FP8])
def test_it_resumes_bit_for_bit(tmp_path: Path, recipe: str) -> None:
    common = {**ON_GPU, "recipe": recipe, "train_iters": 4, "save_interval": 2, "no_save": None}
    common |= {"hidden_dropout": 0.1, "deterministic_mode": True, "use_distributed_optimizer": True}
    must_run(tmp_path, "whole", **common)
    must_run(tmp_path, "rest", load="whole", ckpt_step=2, **common)
    assert losses(tmp_path / "rest") == losses(tmp_path / "whole")[2:]


@pytest.mark.gpu
@needs_te
def test_its_delayed_scaling_is_calibrated_for_a_checkpoint_without_histories(tmp_path: Path) -> None:
    # A mean over 4,096 tokens: at scale 1 E5M2 rounds most of its gradients to zero.
    common = {**ON_GPU, "seq_length": 512, "train_iters": 5, "lr_decay_style": "constant"}
    must_run(tmp_path, "plain", **common | {"train_iters": 4, "no_save": None})
    must_run(tmp_path, "exact", load="plain", **common)
    said = must_run(tmp_path, "new", load="plain", **common | {"recipe": "fp8_delayed"})
    assert "histories filled by 3 passes over the next batch" in said
    exact, new = (rows(tmp_path / name)[0] for name in ("exact", "new"))
    assert new["lm loss"] == pytest.approx(exact["lm loss"], rel=1e-2)
    assert new["grad-norm"] == pytest.approx(exact["grad-norm"], rel=0.05)


@pytest.mark.gpu
@needs_te
@pytest.mark.parametrize("distributed", [True, None], ids=["distributed", "plain"])
def test_checkpoints_are_interchangeable_on_a_gpu(tmp_path: Path, distributed: bool | None) -> None:
    common = {**ON_GPU, "train_iters": 20, "save_interval": 2, "no_save": None, "lr_decay_style": "constant"}
    common |= {"use_distributed_optimizer": distributed}
    for name, implementation in (("ours", "local"), ("theirs", "transformer_engine")):
        must_run(tmp_path, name, implementation, **common)
    must_run(tmp_path, "ours continued", load="ours", ckpt_step=2, **common)
    must_run(tmp_path, "theirs continued", "local", load="theirs", ckpt_step=2, **common)
    for name in ("ours", "theirs"):
        found = lm_losses(tmp_path / f"{name} continued")
        assert found == pytest.approx(lm_losses(tmp_path / name)[2:], rel=1e-2)


@pytest.mark.gpu
@needs_te
@pytest.mark.parametrize("recipe", FP8)
def test_weights_kept_in_fp8_train_the_same(tmp_path: Path, recipe: str) -> None:
    common = {**ON_GPU, "recipe": recipe, "train_iters": 20, "use_distributed_optimizer": True}
    del common["use_cpu_initialization"]  # refused with FP8 weights
    must_run(tmp_path, "bf16 weights", **common)
    must_run(tmp_path, "fp8 weights", fp8_param_gather=True, **common)
    found = lm_losses(tmp_path / "fp8 weights")
    assert found == pytest.approx(lm_losses(tmp_path / "bf16 weights"), rel=1e-2)


@pytest.mark.gpu
@needs_te
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
def test_a_sequence_over_two_gpus_trains_the_same(tmp_path: Path, recipe: str) -> None:
    common = {**ON_GPU, **LLAMA, "recipe": recipe, "train_iters": 10, "eval_iters": 1}
    must_run(tmp_path, "one", **common)
    must_run(tmp_path, "two", processes=2, context_parallel_size=2, **common)
    assert lm_losses(tmp_path / "two") == pytest.approx(lm_losses(tmp_path / "one"), rel=1e-2)
