"""``--fp8-param-gather`` with this project's layers, in whole runs on one process and on two.

``primary_worker.py`` compares codes and scales with the reference quantizer's at every step of every run here.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_lowprec import QuantSpec, UserError, get_recipe
from megatron_lowprec.commands import evaluate, export_hf
from megatron_lowprec.mcore.optim.fp8_param_gather import finalize
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.training import loop
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.convert.store import read_weights
from megatron_lowprec.training.memory.plan import plan
from megatron_lowprec.training.monitoring.bad_numbers import weights_are_finite
from tests.launch import fork_ranks, torchrun
from tests.once import once
from tests.training.conftest import Drive, driving
from tests.training.helpers import argv, losses, rows
from tests.training.monitoring.test_bad_numbers import at, spoiling
from tests.training.primary_worker import Digests, looking
from tests.weekly import also_weekly

RECIPES: dict[str, dict[str, Any]] = {
    "fp8_current": {"recipe": "fp8_current"},
    "fp8_delayed": {"recipe": "fp8_delayed"},
    # whole blocks on each of two tensor-parallel ranks
    "fp8_blockwise": {"recipe": "fp8_blockwise", "hidden_size": 256, "ffn_hidden_size": 256},
}
EACH_TIME = ("fp8_current",)  # the experts' runs have the blocks of fp8_blockwise
WORKER = "tests/training/primary_worker.py"
COMMON: dict[str, Any] = {"bf16": True, "use_distributed_optimizer": True, "train_iters": 4, "lr_decay_iters": 10}
FLAG: dict[str, Any] = {"fp8_param_gather": True}
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": TP2,
    "sequence parallel": {**TP2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "interleaved": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4},
    "overlapped": OVERLAP,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "disable_bias_linear": True, "swiglu": True}
EXPERT_RECIPES = ("fp8_delayed", "fp8_blockwise")


# Weights that a checkpoint stores in two parts, gradients in bf16, and a forward pass that is run twice.
GATED: dict[str, Any] = {
    "swiglu": True,
    "disable_bias_linear": True,
    "grad_reduce_in_bf16": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def halves(name: str, options: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """A run whose first half is under ``before``, and the second from its checkpoint under ``after``."""
    return {
        f"{name} half": COMMON | options | before | {"save": f"{name} half", "exit_interval": 2},
        f"{name} rest": COMMON | options | after | {"load": f"{name} half", "no_save": True},
    }


def cases(weekly: bool) -> dict[str, dict[str, Any]]:
    """Name -> options on two processes."""
    found: dict[str, dict[str, Any]] = {}
    for recipe in RECIPES if weekly else EACH_TIME:
        options = RECIPES[recipe]
        for layout, sizes in LAYOUTS.items():
            found[f"{recipe} {layout}"] = COMMON | FLAG | sizes | options | {"no_save": True}
        for layout in ("data", "tensor", "overlapped"):
            found |= halves(f"{recipe} {layout}", LAYOUTS[layout] | options, FLAG, FLAG)
        found |= halves(f"{recipe} data to tensor", options, FLAG, FLAG | TP2)
    gated = GATED | TP2 | {"recipe": "fp8_current"}
    found["gated tensor"] = COMMON | FLAG | gated | {"no_save": True}
    found |= halves("gated tensor", gated, FLAG, FLAG)
    found["own scales"] = COMMON | FLAG | TP2 | {"recipe": "fp8_current", "no_amax_reduce": True, "no_save": True}
    for recipe in EXPERT_RECIPES:
        expert = COMMON | FLAG | EXPERTS | RECIPES[recipe] | {"expert_model_parallel_size": 2}
        found[f"{recipe} experts"] = expert | {"save": f"{recipe} experts"}
    return found


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, weekly: bool) -> Path:
    """All runs of ``cases`` on two processes, in one launch."""

    def run(folder: Path) -> None:
        command_lines = {name: argv(**{"save": name} | options) for name, options in cases(weekly).items()}
        (folder / "cases.json").write_text(json.dumps(command_lines))
        fork_ranks(2, [WORKER, "cases.json"], folder)

    return once(tmp_path_factory, "primary_weights", run)


@pytest.fixture(scope="module", params=also_weekly(RECIPES, EACH_TIME))
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Digests]:
    """A recipe, a folder with a run of it on one process, with checkpoints of iterations 2 and 4, and its digests."""
    folder = tmp_path_factory.mktemp("one")
    with driving(folder) as call, looking() as digests:
        call(argv(save="out", save_interval=2, **COMMON, **FLAG, **RECIPES[request.param]))
    return request.param, folder, digests


def digests_of(launch: Path, name: str) -> Digests:
    found: Digests = json.loads((launch / f"{name}.json").read_text())
    return found


def by_layer(digests: dict[str, str]) -> dict[str, str]:
    return {name.removeprefix("module.module."): digest for name, digest in digests.items()}


# ---- the same codes at every layout
@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "interleaved"])
def test_the_same_main_weights_have_the_same_codes_on_any_layout(
    one: tuple[str, Path, Digests], launch: Path, layout: str
) -> None:
    recipe, _, digests = one
    mine = by_layer(digests_of(launch, f"{recipe} {layout}")[0])
    whole = by_layer(digests[0])
    assert len(whole) == 8
    assert len(mine) == (4 if layout == "pipeline" else 8)  # of the first stage
    assert mine.items() <= whole.items()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", also_weekly(RECIPES, EACH_TIME))
def test_every_layout_steps(launch: Path, recipe: str) -> None:
    for layout in LAYOUTS:
        digests = digests_of(launch, f"{recipe} {layout}")
        assert len(digests) == 1 + 4
        for before, after in pairwise(digests):
            assert all(before[name] != after[name] for name in before)
        assert len(losses(launch / f"{recipe} {layout}")) == 4
    assert digests_of(launch, f"{recipe} overlapped") == digests_of(launch, f"{recipe} data")
    assert losses(launch / f"{recipe} overlapped") == losses(launch / f"{recipe} data")


RESUMED = [f"{recipe} {layout}" for recipe in RECIPES for layout in ("data", "tensor", "overlapped")]
RESUMED_EACH_TIME = [name for name in RESUMED if name.startswith(EACH_TIME)]


@pytest.mark.slow
@pytest.mark.parametrize("name", also_weekly([*RESUMED, "gated tensor"], [*RESUMED_EACH_TIME, "gated tensor"]))
def test_resume_is_bit_equal(launch: Path, name: str) -> None:
    whole, rest = digests_of(launch, name), digests_of(launch, f"{name} rest")
    assert rest[1:] == whole[2:]  # once loaded, then its two steps
    assert losses(launch / f"{name} rest") == losses(launch / name)[2:]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", also_weekly(RECIPES, EACH_TIME))
def test_a_checkpoint_has_the_same_codes_on_another_layout(launch: Path, recipe: str) -> None:
    assert digests_of(launch, f"{recipe} data to tensor rest")[1] == digests_of(launch, f"{recipe} data")[2]


@pytest.mark.slow
def test_a_part_s_own_scale_is_honoured(launch: Path) -> None:
    own, shared = (digests_of(launch, name)[0] for name in ("own scales", "fp8_current tensor"))
    assert own.keys() == shared.keys()
    assert own != shared


@pytest.mark.slow
@pytest.mark.parametrize("recipe", EXPERT_RECIPES)
def test_experts(launch: Path, recipe: str) -> None:
    first = digests_of(launch, f"{recipe} experts")[0]
    assert len(first) == 2 * (2 + 2 * 2)  # of each layer attention's, and both of two experts here
    assert all_finite(launch / f"{recipe} experts")


def all_finite(folder: Path) -> bool:
    return all(row["skipped iterations"] == 0 for row in rows(folder) if "lm loss" in row)


# ---- beside the ordinary path
def lm_losses(folder: Path) -> list[float]:
    return [row["lm loss"] for row in rows(folder) if "lm loss" in row]


@pytest.mark.slow
def test_it_trains_as_with_bf16_weights(one: tuple[str, Path, Digests]) -> None:
    recipe, folder, _ = one
    with driving(folder) as call:
        call(argv(save="plain", no_save=True, **COMMON, **RECIPES[recipe]))
    plain, primary = lm_losses(folder / "plain"), lm_losses(folder / "out")
    # the first weights are bf16's own, later main weights are not rounded to it
    assert primary[0] == plain[0]
    assert primary != plain
    assert primary == pytest.approx(plain, rel=1e-3)


# ---- skipped steps
def test_a_skipped_step_leaves_the_weights_alone(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    spoiling(monkeypatch, "wgrad", at(2, "mlp.linear_fc1", step=2, microbatch=0))
    with looking() as digests:
        drive(argv(save="out", recipe="fp8_delayed", no_save=True, **COMMON, **FLAG))
    assert [row["skipped iterations"] for row in rows(Path("out"))] == [0, 0, 1, 1]
    assert digests[3] == digests[2]
    assert digests[4] != digests[3]


@pytest.mark.parametrize("recipe", also_weekly(RECIPES, EACH_TIME))
def test_a_main_weight_that_is_not_finite_is_seen(drive: Drive, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    seen = []

    def step(trainer: Any, *rest: Any, inner: Any = loop.train_step) -> Any:
        result = inner(trainer, *rest)
        seen.append(weights_are_finite(trainer))
        weight = trainer.chunks[0].module.module.decoder.layers[0].mlp.linear_fc1.weight
        weight.main_param[5] = torch.inf
        finalize(trainer.optimizer, trainer.chunks)
        seen.append(weights_are_finite(trainer))
        return result

    monkeypatch.setattr(loop, "train_step", step)
    with pytest.raises(UserError, match="after iteration 1 the weights are not finite"):
        drive(argv(save="out", no_save=True, **COMMON | FLAG | RECIPES[recipe] | {"train_iters": 1}))
    assert seen == [True, False]


# ---- checkpoints
def stored(folder: Path, marker: str) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint whose name holds ``marker``."""
    reader = FileSystemReader(str(folder))
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and marker in name
    }
    load(found, storage_reader=reader, no_dist=True)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_is_what_a_run_without_the_flag_writes(one: tuple[str, Path, Digests]) -> None:
    recipe, folder, _ = one
    with driving(folder) as call:
        call(argv(save="stored plain", **COMMON | RECIPES[recipe] | {"train_iters": 2}))
    primary, plain = (stored(folder / name / "iter_0000002", "") for name in ("out", "stored plain"))
    described = [{name: (t.shape, t.dtype) for name, t in found.items()} for found in (primary, plain)]
    assert described[0] == described[1]
    main = "optimizer.state.param."
    linears = [name for name in primary if name.startswith("decoder.layers.") and ".linear_" in name]
    weights = [name for name in linears if name.endswith(".weight") and ".amax." not in name]
    assert len(weights) == 4
    for name in weights:
        assert torch.equal(primary[name], primary[main + name].bfloat16()), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_flag_may_come_and_go(one: tuple[str, Path, Digests]) -> None:
    recipe, folder, digests = one
    half = folder / "half"
    shutil.copytree(folder / "out" / "iter_0000002", half / "iter_0000002")
    (half / "latest_checkpointed_iteration.txt").write_text("2\n")
    with driving(folder) as call:
        call(argv(save="without", load="half", save_interval=3, **COMMON, **RECIPES[recipe]))
    assert lm_losses(folder / "without") == pytest.approx(lm_losses(folder / "out")[2:], rel=1e-3)
    again = folder / "again"
    shutil.copytree(folder / "without" / "iter_0000003", again / "iter_0000003")
    (again / "latest_checkpointed_iteration.txt").write_text("3\n")
    with driving(folder) as call, looking() as found:
        call(argv(save="with", load="again", no_save=True, **COMMON, **FLAG, **RECIPES[recipe]))
    # looked at: a new model, what was loaded, and a step
    assert len(found) == 3
    assert lm_losses(folder / "with") == pytest.approx(lm_losses(folder / "without")[1:], rel=1e-3)
    # nothing is lost on the way: after a step that is skipped, codes are what they were
    with driving(folder) as call, pytest.MonkeyPatch.context() as monkeypatch:
        spoiling(monkeypatch, "wgrad", at(2, "mlp.linear_fc1", step=2, microbatch=0))
        with pytest.raises(UserError, match="the last iteration was skipped"):
            call(argv(save="through", load="half", **COMMON | RECIPES[recipe] | {"train_iters": 3}))
    with driving(folder) as call, looking() as found:
        call(argv(save="end", load="through", no_save=True, **COMMON, **FLAG, **RECIPES[recipe]))
    assert found[1] == digests[2]


def expected_digest(weight: torch.Tensor, spec: QuantSpec) -> str:
    """Of a whole weight under its own current scale."""
    made = Fp8Weight.of(weight, spec)
    return hashlib.sha256(made.codes.numpy().tobytes() + made.decode_scale.numpy().tobytes()).hexdigest()[:16]


@pytest.mark.slow
def test_weights_alone_begin_a_fine_tuning(one: tuple[str, Path, Digests]) -> None:
    recipe, folder, _ = one
    with driving(folder) as call, looking() as found:
        options = COMMON | FLAG | RECIPES[recipe] | {"recipe": "fp8_current", "train_iters": 1}
        call(argv(save="tuned", load="out", finetune=True, no_save=True, **options))
    spec, weights = get_recipe("fp8_current").fprop.weight, read_weights(folder / "out" / "iter_0000004")
    assert spec is not None
    assert by_layer(found[1]) == {name: expected_digest(weights[name], spec) for name in by_layer(found[1])}


def test_histories_that_a_checkpoint_lacks_are_filled(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(save="bf16", **COMMON | {"train_iters": 2}))
    common = COMMON | {"load": "bf16", "recipe": "fp8_delayed", "no_save": True}
    drive(argv(save="plain", **common))
    with looking() as found:
        drive(argv(save="primary", **common, **FLAG))
    assert "histories filled by 3 passes" in capsys.readouterr().out
    # a new model, what was loaded, after each pass, and two steps
    assert len(found) == 1 + 1 + 3 + 2
    assert found[2] != found[1]  # at scale 1
    assert found[2] == found[3] == found[4]
    assert lm_losses(Path("primary")) == pytest.approx(lm_losses(Path("plain")), rel=1e-3)


@pytest.mark.slow
def test_it_is_evaluated_and_exported(one: tuple[str, Path, Digests], monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder, _ = one
    monkeypatch.chdir(folder)
    Path("text.jsonl").write_text(json.dumps({"text": " ".join(str(i * i % 251) for i in range(200))}) + "\n")
    with driving(folder):
        flags = ["--load", "out", "--data-path", "text.jsonl", "--split", "0,1,0", "--data-cache-path", "cache"]
        assert evaluate.main([*flags, "--out", "found.json"]) == 0
    (scored,) = json.loads(Path("found.json").read_text())["data"].values()
    assert 4 < scored["loss"] < 7
    assert export_hf.main(["--load", "out", "--out", "hf"]) == 0
    weights = read_weights(folder / "out" / "iter_0000004")
    exported = load_file("hf/model.safetensors")["transformer.h.1.mlp.c_fc.weight"]
    assert torch.equal(exported, weights["decoder.layers.1.mlp.linear_fc1.weight"].t())


# ---- memory and refusals
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("fp8_current_bf16_ends", {"num_layers": 3, "hidden_size": 64}),  # one layer of three is in FP8
        ("fp8_blockwise", {"num_layers": 1, "hidden_size": 128}),
    ],
)
def test_the_plan_counts_their_bytes(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, recipe: str, options: dict[str, int]
) -> None:
    linear = 12 * options["hidden_size"] ** 2  # weights in FP8
    scales = 8 * linear // 128**2 if recipe == "fp8_blockwise" else 0
    held = []

    def step(trainer: Any, *rest: Any, inner: Any = loop.train_step) -> Any:
        (chunk,) = trainer.chunks
        held.append(sum(bytes_of(w) for w in chunk.parameters()))
        buffers = {b.param_data.untyped_storage().data_ptr(): b.param_data.nbytes for b in chunk.buffers}
        held.append(sum(buffers.values()))
        return inner(trainer, *rest)

    monkeypatch.setattr(loop, "train_step", step)
    flags = argv(save="out", recipe=recipe, **COMMON | FLAG | {"train_iters": 1} | options)
    drive([*flags, "--no-save"])
    config = resolve_run(resolve_model(parse(flags)[0]), 1, gpus=False)
    numerics = get_recipe(recipe)
    found = plan(config, numerics, 256, 1)
    assert found.resident["weights"] == held[0]
    assert held[0] <= held[1] + scales < 1.02 * held[0]  # padded to whole buckets
    assert found.resident["kept quantized weights"] == linear  # a transposed copy for two microbatches
    assert plan(config, numerics, 256, 1, arch="cpu").resident["kept quantized weights"] == 0
    ordinary = plan(replace(config, fp8_param_gather=False), numerics, 256, 1).resident
    assert ordinary["weights"] - found.resident["weights"] == linear - scales
    assert ordinary["kept quantized weights"] == 2 * linear
    saving = replace(config, save_memory=True)
    assert plan(saving, numerics, 256, 1).resident["kept quantized weights"] == linear
    unstored = plan(replace(saving, fp8_param_gather=False), numerics, 256, 1).resident
    assert unstored["kept quantized weights"] == 0  # each microbatch casts its weights


def bytes_of(weight: torch.Tensor) -> int:
    if not isinstance(weight, Fp8Weight):
        return weight.nbytes
    blocks = (weight.decode_scale, weight.main_amax) if weight.spec.block else ()
    return weight.codes.nbytes + sum(each.nbytes for each in blocks)


def test_recipes_without_one_fp8_weight_are_refused(drive: Drive) -> None:
    with pytest.raises(UserError, match="mxfp8 takes the weight in fprop e4m3 by 1x32"):
        drive(argv(save="out", recipe="mxfp8", **COMMON, **FLAG))
    assert not torch.distributed.is_initialized()


def test_layers_that_stay_in_bf16_are_ordinary(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    options = COMMON | FLAG | {"train_iters": 2, "rerun_in_bf16": ["layers.1.mlp.linear_fc1.dgrad"]}
    with looking() as digests:
        drive(argv(save="out", recipe="fp8_current", no_save=True, **options))
    assert "--fp8-param-gather: 7 weights on this stage are FP8, without a bf16 copy" in capsys.readouterr().out
    assert all(len(found) == 7 for found in digests)


# ---- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("recipe", also_weekly(RECIPES, EACH_TIME))
def test_native_runs_are_near_emulated_ones(tmp_path: Path, recipe: str) -> None:
    common = COMMON | FLAG | {"hidden_size": 128, "train_iters": 20, "lr_decay_style": "constant"} | RECIPES[recipe]
    runs = {"native": {}, "emulated": {"emulate": True}, "overlapped": OVERLAP, "ordinary": {"fp8_param_gather": None}}
    command_lines = {name: argv(**{"save": name, "no_save": True} | common | more) for name, more in runs.items()}
    (tmp_path / "cases.json").write_text(json.dumps(command_lines))
    done = torchrun(1, [WORKER, "cases.json"], tmp_path)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    said = dict(zip(runs, done.stdout.split("--- ")[1:], strict=True))
    assert "fprop, dgrad, wgrad: hopper_fp8" in said["native"]
    assert "fprop, dgrad, wgrad: emulated" in said["emulated"]
    found = {name: lm_losses(tmp_path / name) for name in runs}
    assert found["native"] != found["emulated"]
    for name in ("emulated", "overlapped", "ordinary"):
        assert found["native"] == pytest.approx(found[name], rel=1e-2), name
