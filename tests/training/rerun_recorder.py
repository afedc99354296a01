"""CUDA graphs without CUDA: recordings that run their Python again, into the memory that the first result had.

``torchrun rerun_recorder.py CASES.json`` is ``bucket_runs.py`` with them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs
from torch import nn

from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.mcore.graphs.layer_graphs import LayerGraphs


class RerunRecorder:
    """Takes back what recording has done: a capture does nothing.

    Attributes:
        made: whether each recording draws, in the order of making.
        replayed: numbers of recordings, in the order of replays.
    """

    def __init__(self, linear_gemms: Sequence[LinearGemms]) -> None:
        self.made: list[bool] = []
        self.replayed: list[int] = []
        self._linear_gemms = linear_gemms
        self._histories = list({id(h): h for layer in linear_gemms for h, _ in layer.histories.values()}.values())

    def record(self, work: Callable[[], torch.Tensor], draws: bool) -> tuple[Rerun, torch.Tensor]:
        promised = [layer.main_grad_is_zero for layer in self._linear_gemms]
        with self._as_before():
            result = work().detach()
        self.made.append(draws)
        return Rerun(len(self.made) - 1, work, result, self.replayed, partial(self._as_recorded, promised)), result

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    def finish(self) -> int:
        return 0

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        tracker, drawn = get_cuda_rng_tracker(), torch.get_rng_state()
        states, newest = tracker.get_states(), [history.newest.clone() for history in self._histories]
        yield
        tracker.set_states(states)
        torch.set_rng_state(drawn)
        for history, before in zip(self._histories, newest, strict=True):
            history.newest.copy_(before)

    @contextmanager
    def _as_recorded(self, promised: Sequence[bool]) -> Iterator[None]:
        """A graph calls no hooks, and sees and changes no Python: it overwrites what it did when it was captured."""
        now = [layer.main_grad_is_zero for layer in self._linear_gemms]
        for layer, then in zip(self._linear_gemms, promised, strict=True):
            layer.main_grad_is_zero = then
        cuda_graphs._set_capture_start()
        try:
            yield
        finally:
            cuda_graphs._set_capture_end()
            for layer, before in zip(self._linear_gemms, now, strict=True):
                layer.main_grad_is_zero = before


@dataclass
class Rerun:
    number: int
    work: Callable[[], torch.Tensor]
    result: torch.Tensor
    replayed: list[int]
    as_recorded: Callable[[], AbstractContextManager[None]]

    def replay(self) -> None:
        self.replayed.append(self.number)
        with torch.enable_grad(), self.as_recorded():
            again = self.work()
        self.result.data.copy_(again.detach())  # which autograd does not see, as a graph's write


def _rerun_graphs(model: nn.Module, *, recorders: list[RerunRecorder]) -> LayerGraphs:
    """``LayerGraphs`` with such a recorder, which is added to ``recorders`` when it is time to capture."""

    def recorder() -> RerunRecorder:
        recorders.append(RerunRecorder(graphs._linear_gemms))
        return recorders[-1]

    graphs = LayerGraphs(model, recorder)
    return graphs


def rerun_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[RerunRecorder]:
    """Let the driver's --cuda-graph-impl local work with such recordings; the recorders that runs will have made."""
    from megatron_lowprec.training import model, run_plan

    monkeypatch.setattr(run_plan, "resolve_cuda_graphs", lambda config, recipe, world_size, gpus: (config, []))
    return _rerun(monkeypatch, model)


def rerun_under_spec(monkeypatch: pytest.MonkeyPatch) -> list[RerunRecorder]:
    """As ``rerun_on_a_cpu`` for models of ``layer_spec``, as in Megatron-LM."""
    from megatron_lowprec.mcore import step_tracker
    from megatron_lowprec.mcore.graphs import graph_support

    monkeypatch.setattr(graph_support, "_obstacle_here", lambda: None)
    # Megatron-core's own, which TransformerBlock has for inference
    monkeypatch.setattr(cuda_graphs, "CudaGraphManager", lambda config: None)
    return _rerun(monkeypatch, step_tracker)


def _rerun(monkeypatch: pytest.MonkeyPatch, builder: ModuleType) -> list[RerunRecorder]:
    from megatron.core.tensor_parallel import random

    found: list[RerunRecorder] = []
    initialize = random.initialize_rng_tracker
    monkeypatch.setattr(builder, "LayerGraphs", partial(_rerun_graphs, recorders=found))
    # generators that graphs could hold are of a GPU
    monkeypatch.setattr(
        random,
        "initialize_rng_tracker",
        lambda te, inference, graphs, **options: initialize(te, inference, False, **options),
    )
    return found


if __name__ == "__main__":
    from tests.training import bucket_runs

    with pytest.MonkeyPatch.context() as patch:
        rerun_on_a_cpu(patch)
        bucket_runs.main(Path(sys.argv[1]))
