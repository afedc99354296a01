"""--cuda-graph-impl: the bits of a run without graphs, by recordings that run again on a CPU and by graphs on a GPU."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore.graphs import layer_graphs
from megatron_lowprec.mcore.graphs.layer_graphs import LayerGraphs
from megatron_lowprec.training import loop, model
from megatron_lowprec.training.checkpoint import random_state
from megatron_lowprec.training.model import Trainer
from tests.training.conftest import Drive
from tests.training.graph_cases import CASES, EACH_TIME, EAGER, GRAPHS, KEYS, ON_GPU, PHASES, RECIPES, SMALL
from tests.training.helpers import argv, rows
from tests.training.rerun_recorder import RerunRecorder, rerun_on_a_cpu
from tests.training.test_deterministic import as_before  # noqa: F401 - for the runs in deterministic mode here
from tests.weekly import also_weekly


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


# ---- the order of things, with recordings that run again on a CPU


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
