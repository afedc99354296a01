"""--cuda-graph-impl: the bits of a run without graphs; reasons why layers cannot be captured."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.mcore.graphs import layer_graphs
from megatron_lowprec.mcore.graphs.layer_graphs import LayerGraphs
from megatron_lowprec.quantization import device_rng_step
from megatron_lowprec.quantization.quantizer import quantize
from megatron_lowprec.quantization.random_stream import RandomStream
from megatron_lowprec.quantization.transform import Transform
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.recipe.schema import HadamardSpec
from megatron_lowprec.training import loop, model
from megatron_lowprec.training.checkpoint import random_state
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.graph_options import resolve_cuda_graphs
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.model import Trainer
from tests.launch import fork_ranks, torchrun
from tests.training.conftest import Drive
from tests.training.helpers import argv, rows
from tests.training.rerun_recorder import RerunRecorder, rerun_on_a_cpu
from tests.training.test_deterministic import as_before  # noqa: F401 - for the runs in deterministic mode here
from tests.weekly import also_weekly, checks_of

GRAPHS: dict[str, Any] = {"cuda_graph_impl": "local"}
EAGER: dict[str, Any] = {"cuda_graph_impl": "none"}


# ---- what is refused


def resolved(
    gpus: bool = True, world_size: int = 1, recipe: str = "bf16", asked: str = "local", **changes: Any
) -> tuple[Config, list[str]]:
    config = resolve_model(parse(argv(cuda_graph_impl=asked, **changes))[0])
    loaded = load_recipe(recipe, config.recipe_override)
    return resolve_cuda_graphs(resolve_run(config, world_size, gpus), loaded, world_size, gpus)


CHOOSE = "leave one of the two out"
OBSTACLES: list[tuple[dict[str, Any], str, str]] = [
    ({"num_experts": 4}, "the sizes of --num-experts 4 follow the router", CHOOSE),
    (
        {"pipeline_model_parallel_size": 2, "world_size": 2},
        "has several microbatches on their way, and graphs hold the activations of one",
        CHOOSE,
    ),
    ({"reset_attention_mask": True}, "--reset-attention-mask gives every microbatch a mask of its own", CHOOSE),
    ({"recompute_granularity": "selective"}, r"selective runs layers twice \(--recompute-gelu works\)", CHOOSE),
    ({"log_quantization_interval": 1}, "runs layers kernel by kernel in every iteration", "give 2 or more"),
    (
        {"distributed_backend": "gloo", "tensor_model_parallel_size": 2, "world_size": 2},
        "collectives on the host",
        "use nccl",
    ),
    (
        {"recipe": "fp8_lm_o2", "global_batch_size": 4},
        "recipe fp8_lm_o2 sums a step's microbatches in fp32 at changing addresses",
        "add --recipe-override gradients.accumulation=format or raise --micro-batch-size",
    ),
    (
        {"recipe": "deepseek_v3"},
        "recipe deepseek_v3 saves activations in formats of its own",
        "add --recipe-override activations.attention_output=none --recipe-override activations.swiglu_input=none",
    ),
]


@pytest.mark.parametrize(("changes", "reason", "remedy"), OBSTACLES)
def test_layers_that_cannot_be_captured_are_named(changes: dict[str, Any], reason: str, remedy: str) -> None:
    with pytest.raises(UserError, match=f"--cuda-graph-impl local was given, but .*{reason}; {remedy}$"):
        resolved(**changes)
    config, (note,) = resolved(asked="auto", **changes)
    assert config.cuda_graph_impl == "none"
    assert re.search(f"^CUDA graphs: off, .*{reason}", note)


def test_layers_are_captured_on_gpus_by_default() -> None:
    assert parse(argv())[0].cuda_graph_impl == "auto"
    config, notes = resolved(asked="auto", recompute_gelu=True)
    assert (config.cuda_graph_impl, notes) == ("local", [])
    config, notes = resolved(asked="none")
    assert (config.cuda_graph_impl, notes) == ("none", [])


@pytest.mark.parametrize(
    "changes",
    [
        {"global_batch_size": 2},
        {"global_batch_size": 4, "world_size": 2},
        {"global_batch_size": 4, "recipe_override": ["gradients.accumulation=format"]},
    ],
)
def test_stored_gradients_are_captured_without_sums_in_fp32(changes: dict[str, Any]) -> None:
    assert resolved(recipe="fp8_lm_o2", **changes)[0].cuda_graph_impl == "local"


def test_it_needs_gpus_and_layers_of_this_project() -> None:
    with pytest.raises(UserError, match="--cuda-graph-impl local was given, but torch sees no GPU; leave it out"):
        resolved(gpus=False)
    config, notes = resolved(gpus=False, asked="auto")
    assert (config.cuda_graph_impl, notes) == ("none", [])  # nothing to say on a CPU
    with pytest.raises(UserError, match="the layers are those of --transformer-impl transformer_engine"):
        resolved(transformer_impl="transformer_engine")
    with pytest.raises(UserError, match="--cuda-graph-impl transformer_engine: layers are captured whole"):
        parse(argv(cuda_graph_impl="transformer_engine"))


def test_megatron_core_s_own_graphs_stay_out() -> None:
    config, _ = resolved(recompute_gelu=True, tensor_model_parallel_size=2, sequence_parallel=True, world_size=2)
    assert config.cuda_graph_impl == "local"
    assert model.transformer_config(config).cuda_graph_impl == "none"


def test_draws_that_a_graph_would_repeat_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = get_recipe("mxfp4_rht_sr").dgrad.grad_output
    assert spec is not None
    x, stream = torch.randn(32, 64), RandomStream((1, 2), row_span=ShardSlice())
    quantize(x, spec, random=stream)
    Transform(HadamardSpec(32), stream).signs(x.device)
    monkeypatch.setattr(device_rng_step, "capturing", lambda: True)
    with pytest.raises(UserError, match="stochastic rounding runs on this device outside of the fused MX kernel"):
        quantize(x, spec, random=stream)
    with pytest.raises(UserError, match="a random Hadamard transform runs on this device"):
        Transform(HadamardSpec(32), stream).signs(x.device)


def test_generators_of_the_tracker_are_saved_and_restored_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    tracker = tensor_parallel.CudaRNGStatesTracker() if hasattr(tensor_parallel, "CudaRNGStatesTracker") else None
    tracker = tracker or type(tensor_parallel.get_cuda_rng_tracker())()
    tracker.set_states({"named": generator, "rng_step": torch.tensor([3, 1])})
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    before = random_state.capture()
    drawn = torch.rand(4, generator=generator)
    tracker.set_states({"named": generator, "rng_step": torch.tensor([4, 0])})
    assert all(isinstance(state, torch.Tensor) for state in before["tracker"].values())
    random_state.restore(before)
    assert tracker.get_states()["named"] is generator
    assert tracker.get_states()["rng_step"].tolist() == [3, 1]
    assert torch.equal(torch.rand(4, generator=generator), drawn)


# ---- the order of things, with recordings that run again on a CPU

SMALL: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 64,
    "seq_length": 32,
    "train_iters": 5,
    "eval_iters": 1,
    "eval_interval": 2,
    "bf16": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "global_batch_size": 4,
    "no_save": True,
}
# of a row of the metrics, exact
KEYS = (
    *("lm loss hex", "lm loss validation hex", "lm loss test hex"),
    *("grad-norm", "params-norm", "skipped iterations"),
)

PHASES: dict[str, Any] = {"recipe": "fp8_delayed", "recipe_override": "phases=[{from_step: 2, fprop: bf16}]"}
Digest = Callable[[], str]


@pytest.fixture
def digest(monkeypatch: pytest.MonkeyPatch) -> Digest:
    """Of all weights of the last run."""
    build, built = model.build, list[Trainer]()

    def kept(*args: Any) -> Trainer:
        built.append(build(*args))
        return built[-1]

    def of_weights() -> str:
        digest = hashlib.sha256()
        for weight in built[-1].chunks[0].parameters():
            digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    monkeypatch.setattr(model, "build", kept)
    return of_weights


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[RerunRecorder]:
    """The flag works on a CPU; what recorders it has made."""
    return rerun_on_a_cpu(monkeypatch)


def history(folder: str) -> list[dict[str, Any]]:
    return [{key: row[key] for key in KEYS if key in row} for row in rows(Path(folder))]


OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
# whose norms find amaxes, whose layers compute and cast again, and whose vocabulary adds its gradients
LARGE_LLAMA: dict[str, Any] = {
    "swiglu": True,
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "save_memory": True,
}
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8_delayed": {"recipe": "fp8_delayed"},
    "overlapped": {"recipe": "fp8_current", **OVERLAP},
    "primary weights": {"recipe": "fp8_current", "fp8_param_gather": True, **OVERLAP},
    "stochastic, three microbatches": {"recipe": "mxfp4_rht_sr", "global_batch_size": 6},
    "one microbatch": {"recipe": "mxfp4_rht_sr", "global_batch_size": 2},
    "rounded gradients": {"recipe": "fp8_delayed", "no_gradient_accumulation_fusion": True},
    "bf16 gradients": {"grad_reduce_in_bf16": True},
    "fp32, megatron-core's attention": {"bf16": None, "attention_backend": "local"},
    "llama": {"swiglu": True, "disable_bias_linear": True, "position_embedding_type": "rope"},
    "llama, as from 1e9 parameters on": {**LARGE_LLAMA, "recipe": "fp8_current", "fp8_param_gather": True, **OVERLAP},
    "llama, as from 1e9 parameters on, emulated": {**LARGE_LLAMA, "recipe": "mxfp4_rht_sr"},
    "stock linears": {"no_lowprec_linears": True},
    "stored gradients": {"recipe": "fp8_lm_o2", "global_batch_size": 2},
    "stored gradients, fp8 weights": {"recipe": "fp8_lm_o3", "global_batch_size": 2, **OVERLAP},
    "stored gradients, two microbatches": {
        "recipe": "fp8_lm_o2",
        "recipe_override": "gradients.accumulation=format",
    },
}
EACH_TIME = [
    "bf16",
    "fp8_delayed",
    "stochastic, three microbatches",
    "fp32, megatron-core's attention",
    "stock linears",
    "stored gradients",
]

# gathers run under the layers; for the norm of all weights they would end before the next step
OVERLAPPED = {**OVERLAP, "global_batch_size": 8, "log_params_norm": None}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data parallel": {"global_batch_size": 8},
    "data parallel, overlapped": OVERLAPPED,
    "data parallel, stored gradients": {**OVERLAPPED, "recipe": "fp8_lm_o2", "global_batch_size": 4},
    "data parallel, primary weights": {**OVERLAPPED, "fp8_param_gather": True},
    "tensor parallel": {"tensor_model_parallel_size": 2},
    "tensor and sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "FP8 codes gathered": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "fp8_sequence_parallel_gather": True,
        "recipe": "fp8_delayed",
    },
}


LAYOUTS_WEEKLY = {"data parallel", "data parallel, overlapped", "tensor parallel"}  # parts of the others


def first_difference(folder: Path, other: Path) -> str:
    """Of two runs' exact rows, in words; empty where there is none."""
    for row, theirs in zip(rows(folder), rows(other), strict=True):
        for key in KEYS:
            if row.get(key) != theirs.get(key):
                return f"iteration {row['iteration']}: {key} {row.get(key)} and {theirs.get(key)}"
    return ""


def launch(folder: Path, script: str, cases: dict[str, dict[str, Any]], hide_gpus: bool) -> str:
    """Runs by the names of their folders, on two processes, one after the other; what they have printed."""
    (folder / "cases.json").write_text(json.dumps([argv(save=name, **options) for name, options in cases.items()]))
    if hide_gpus:
        printed = fork_ranks(2, [script, "cases.json"], folder)
    else:
        done = torchrun(2, [script, "cases.json"], folder)
        printed = done.stdout
        assert done.returncode == 0, f"{printed[-4000:]}\n--- stderr\n{done.stderr[-12000:]}"
    errors = json.loads((folder / "errors.json").read_text())
    assert errors == {}, f"{ {list(cases)[int(number)]: error for number, error in errors.items()} }"
    return printed


def check_replays(folder: Path, script: str, cases: dict[str, dict[str, Any]], hide_gpus: bool = False) -> None:
    """Each case with and without graphs, in one launch; where they differ first, and whether plain runs differ."""
    plain = {name: {"log_params_norm": True} | EAGER | options for name, options in cases.items()}
    pairs = (((f"{name}-plain", case), (f"{name}-replayed", case | GRAPHS)) for name, case in plain.items())
    printed = launch(folder, script, dict(chain(*pairs)), hide_gpus)
    assert printed.count("CUDA graphs: 3 layers captured") == len(cases), printed[-4000:]

    def different(kind: str, among: Iterable[str]) -> dict[str, str]:
        found = {name: first_difference(folder / f"{name}-plain", folder / f"{name}-{kind}") for name in among}
        return {name: where for name, where in found.items() if where}

    found = different("replayed", cases)
    if found:
        launch(folder, script, {f"{name}-again": plain[name] for name in found}, hide_gpus)
        pytest.fail(f"plain and replayed: {found}; plain and plain again: {different('again', found)}")


@pytest.mark.parametrize("case", also_weekly(CASES, EACH_TIME))
def test_a_run_by_recordings_has_the_bits_of_a_plain_one(
    drive: Drive, digest: Digest, recorders: list[RerunRecorder], case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = SMALL | CASES[case]
    drive(argv(save="plain", **options))
    plain = digest()
    assert not recorders
    capsys.readouterr()
    drive(argv(save="recorded", **GRAPHS | options))
    assert digest() == plain
    assert history("recorded") == history("plain")
    kinds = 1 if options["global_batch_size"] == 2 else 2
    assert f"CUDA graphs: 3 layers captured, {6 * kinds} graphs" in capsys.readouterr().out
    # forwards, in order, then backwards, each replayed for as many microbatches as there are
    (recorder,) = recorders
    assert recorder.made == [True, True, True, False, False, False] * kinds
    later = options["global_batch_size"] // 2 - 1
    step = [*range(6), *[*range(6, 12)] * later]
    assert recorder.replayed == step * 4


class NoHostReads(TorchDispatchMode):
    """Refuses what CUDA refuses during a capture: waiting for a value on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a captured layer reads a value on the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "case",
    [
        {"recipe": "mxfp4_rht_sr"},
        {"recipe": "fp8_blockwise"},
        {"recipe": "fp8_delayed", "emulate_accumulator": True},
        {"recipe": "fp8_lm_o2", "recipe_override": "gradients.accumulation=format"},
    ],
    ids=str,
)
def test_captured_layers_read_nothing_on_the_host(
    drive: Drive, recorders: list[RerunRecorder], monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]
) -> None:
    record = RerunRecorder.record

    def strict(self: RerunRecorder, work: Callable[[], torch.Tensor], draws: bool) -> Any:
        def without_reads() -> torch.Tensor:
            with NoHostReads():
                return work()

        return record(self, without_reads, draws)

    monkeypatch.setattr(RerunRecorder, "record", strict)
    # with dropout Megatron-core compares states of the CPU's generator, which a capture allows
    short = {"train_iters": 2, "eval_iters": 0, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    drive(argv(save="recorded", **GRAPHS | SMALL | short | case))
    assert recorders[0].made


def test_buffers_are_allocated_before_the_recorder_measures_memory(
    drive: Drive, recorders: list[RerunRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would be held by the graphs and allocated, and the peak would count them twice."""
    build, events = RerunRecorder.__init__, list[str]()

    def measured(self: RerunRecorder, *arguments: Any) -> None:
        events.append("recorder")
        build(self, *arguments)

    def allocated(weights: Any) -> Any:
        events.append("buffers")
        return dummies(weights)

    dummies = layer_graphs._dummies
    monkeypatch.setattr(RerunRecorder, "__init__", measured)
    monkeypatch.setattr(layer_graphs, "_dummies", allocated)
    drive(argv(save="recorded", **GRAPHS | SMALL | {"train_iters": 2, "eval_iters": 0}))
    assert events == ["buffers", "recorder"]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory\nof 80 GiB"), UserError("a graph would repeat the draws")]
)
def test_layers_stay_eager_where_the_capture_ends_early(
    drive: Drive,
    digest: Digest,
    recorders: list[RerunRecorder],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    drive(argv(save="plain", **SMALL))
    plain, record = digest(), RerunRecorder.record

    def ends(self: RerunRecorder, work: Callable[[], torch.Tensor], draws: bool) -> Any:
        if len(self.made) == 4:
            raise error
        return record(self, work, draws)

    monkeypatch.setattr(RerunRecorder, "record", ends)
    drop, left = LayerGraphs.drop, list[Any]()

    def dropped(graphs: LayerGraphs) -> None:
        drop(graphs)
        values = [each for value in vars(graphs).values() for each in (value if isinstance(value, tuple) else [value])]
        left.extend(each for each in values if isinstance(each, torch.Tensor))

    monkeypatch.setattr(LayerGraphs, "drop", dropped)
    drive(argv(save="recorded", **GRAPHS | SMALL))
    assert left == []  # memory that could not be had is not held on to
    assert (digest(), history("recorded")) == (plain, history("plain"))
    assert len(recorders) == 1
    assert capsys.readouterr().out.count(f"CUDA graphs: off, {str(error).splitlines()[0]}\n") == 1


def test_each_kind_of_microbatch_has_run_before_it_is_captured(
    drive: Drive, digest: Digest, recorders: list[RerunRecorder]
) -> None:
    """A step's second microbatch runs eagerly once, behind a replayed first one that cached the weights."""
    ramp = SMALL | {"rampup_batch_size": [2, 2, 4], "train_iters": None, "train_samples": 20, "recipe": "mxfp4_rht_sr"}
    drive(argv(save="plain", **ramp))
    plain = digest()
    drive(argv(save="recorded", **GRAPHS | ramp))
    assert (digest(), history("recorded")) == (plain, history("plain"))
    sizes = [row["batch-size"] for row in rows(Path("recorded")) if "batch-size" in row]
    assert sizes == [2, 2, 4, 4, 4, 4]
    assert [recorder.replayed for recorder in recorders] == [[*range(6)] * 2, [*range(12)] * 3]


def test_a_run_continues_with_and_without(drive: Drive, digest: Digest, recorders: list[RerunRecorder]) -> None:
    options = SMALL | {"no_save": None, "recipe": "fp8_delayed", "train_iters": 6, "save_interval": 3}
    drive(argv(save="plain", **options))
    plain = digest()
    drive(argv(save="recorded", **GRAPHS | options | {"exit_interval": 3}))
    drive(argv(save="recorded", **GRAPHS | options))
    assert (digest(), history("recorded")) == (plain, history("plain"))
    assert [len(recorder.replayed) for recorder in recorders] == [2 * 12, 2 * 12]


def test_layers_are_captured_anew_for_a_phase(drive: Drive, digest: Digest, recorders: list[RerunRecorder]) -> None:
    """Behind its first step, which runs eagerly."""
    options = SMALL | PHASES | {"global_batch_size": 2}
    drive(argv(save="plain", **options))
    plain = digest()
    drive(argv(save="recorded", **GRAPHS | options))
    assert (digest(), history("recorded")) == (plain, history("plain"))
    assert [recorder.replayed for recorder in recorders] == [[*range(6)], [*range(6)] * 2]


def test_a_difference_of_two_runs_is_named(tmp_path: Path) -> None:
    for name, last in (("one", "0x1.8p+1"), ("same", "0x1.8p+1"), ("other", "0x1.9p+1")):
        (tmp_path / name).mkdir()
        made = [{"iteration": 1, "lm loss hex": "0x1.0p+2"}, {"iteration": 2, "lm loss hex": last, "seconds": last}]
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in made))
    assert first_difference(tmp_path / "one", tmp_path / "same") == ""
    assert first_difference(tmp_path / "one", tmp_path / "other") == "iteration 2: lm loss hex 0x1.8p+1 and 0x1.9p+1"


@pytest.mark.slow
def test_recordings_on_two_processes_have_the_bits_of_plain_runs(weekly: bool, tmp_path: Path) -> None:
    layouts = checks_of(LAYOUTS, LAYOUTS_WEEKLY, weekly)
    cases = {name: SMALL | {"recipe": "fp8_current"} | LAYOUTS[name] for name in layouts}
    check_replays(tmp_path, "tests/training/rerun_recorder.py", cases, hide_gpus=True)


def check_that_a_bad_number_is_traced(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    iterate = loop._train_iteration

    def spoiled(run: Any, *rest: Any) -> Any:
        weight = run.trainer.chunks[0].module.module.decoder.layers[1].mlp.linear_fc1.weight.data
        before = weight[0, 0].clone()
        if run.progress.iteration == 3:
            weight[0, 0] = torch.inf
        row = iterate(run, *rest)
        weight[0, 0] = before if run.progress.iteration == 4 else weight[0, 0]
        return row

    monkeypatch.setattr(loop, "_train_iteration", spoiled)
    for name, flag in (("plain", EAGER), ("with graphs", GRAPHS)):
        drive(argv(save=name, **options | flag))
        printed = capsys.readouterr().out
        assert "iteration 4 skipped" in printed
        assert "not finite: layers.2.mlp.linear_fc1, fprop, operand weight: 0 NaN and 1 Inf" in printed
    assert history("with graphs") == history("plain")
    assert [row["skipped iterations"] for row in history("plain") if "skipped iterations" in row] == [0, 0, 0, 1, 1]


def test_non_finite_values_are_found_in_eager_layers(
    drive: Drive, recorders: list[RerunRecorder], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_that_a_bad_number_is_traced(drive, monkeypatch, capsys, SMALL)
    assert len(recorders[0].replayed) == 4 * 12


# ---- on GPUs

ON_GPU: dict[str, Any] = SMALL | {"hidden_size": 256, "num_attention_heads": 4, "seq_length": 128, "train_iters": 6}
ON_GPU |= {"deterministic_mode": True, "log_params_norm": True}
RECIPES = ["bf16", "fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp4_rht_sr"]
GPU_CASES: dict[str, dict[str, Any]] = {
    **{recipe: {"recipe": recipe} for recipe in RECIPES},
    **{name: case for name, case in CASES.items() if name not in RECIPES},
    "phases": PHASES,
    "recomputed GELU": {"recipe": "fp8_delayed", "recompute_gelu": True},
    "without dropout": {"recipe": "fp8_current", "hidden_dropout": 0.0, "attention_dropout": 0.0},
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES)
def test_replays_have_the_bits_of_a_plain_run(
    drive: Drive, digest: Digest, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ON_GPU | GPU_CASES[case]
    drive(argv(save="plain", **EAGER | options))
    plain = digest()
    capsys.readouterr()
    drive(argv(save="replayed", **GRAPHS | options))
    assert history("replayed") == history("plain")
    assert digest() == plain
    assert "CUDA graphs: 3 layers captured" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp4_rht_sr"])
def test_replays_continue_from_checkpoints_of_either_kind(drive: Drive, digest: Digest, recipe: str) -> None:
    options = ON_GPU | {"no_save": None, "recipe": recipe, "save_interval": 3}
    drive(argv(save="plain", **EAGER | options))
    plain = digest()
    for name, first, second in (("replayed", GRAPHS, GRAPHS), ("mixed", EAGER, GRAPHS)):
        drive(argv(save=name, **options | first | {"exit_interval": 3}))
        drive(argv(save=name, **options | second))
        assert history(name) == history("plain")
        assert digest() == plain


@pytest.mark.gpu
def test_a_bad_number_of_a_replay_is_found_in_layers_run_as_they_are(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_that_a_bad_number_is_traced(drive, monkeypatch, capsys, ON_GPU | {"train_iters": 5})


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replays_on_two_gpus_have_the_bits_of_plain_runs(tmp_path: Path, layout: str) -> None:
    recipes = ["fp8_delayed", "fp8_current"] if "fp8_param_gather" in LAYOUTS[layout] else RECIPES
    recipes = [LAYOUTS[layout]["recipe"]] if "recipe" in LAYOUTS[layout] else recipes
    cases = {recipe: ON_GPU | LAYOUTS[layout] | {"recipe": recipe} for recipe in recipes}
    check_replays(tmp_path, "tests/training/bucket_runs.py", cases)
