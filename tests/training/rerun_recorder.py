"""CUDA graphs without CUDA: recordings that run their Python again, into the memory that the first result had.

``torchrun rerun_recorder.py CASES.json`` is ``many_runs.py`` with them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import nn

from megatron_lowprec.mcore.layer_graphs import LayerGraphs
from megatron_lowprec.quantization.amax_history import AmaxHistory


class RerunRecorder:
    """Takes back what recording has done: a capture does nothing.

    Attributes:
        made: whether each recording draws, in the order of making.
        replayed: numbers of recordings, in the order of replays.
    """

    def __init__(self, histories: Sequence[AmaxHistory]) -> None:
        self.made: list[bool] = []
        self.replayed: list[int] = []
        self._histories = histories

    def record(self, work: Callable[[], torch.Tensor], draws: bool) -> tuple[Rerun, torch.Tensor]:
        with self._as_before():
            result = work().detach()
        self.made.append(draws)
        return Rerun(len(self.made) - 1, work, result, self.replayed), result

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


@dataclass
class Rerun:
    number: int
    work: Callable[[], torch.Tensor]
    result: torch.Tensor
    replayed: list[int]

    def replay(self) -> None:
        self.replayed.append(self.number)
        with torch.enable_grad():
            again = self.work()
        self.result.copy_(again.detach())


def _rerun_graphs(model: nn.Module, *, several: bool, recorders: list[RerunRecorder]) -> LayerGraphs:
    """``LayerGraphs`` with such a recorder, which is added to ``recorders`` when it is time to capture."""

    def recorder() -> RerunRecorder:
        found = {id(h): h for numerics in graphs._numerics for h, _ in numerics.histories.values()}
        recorders.append(RerunRecorder(list(found.values())))
        return recorders[-1]

    graphs = LayerGraphs(model, several, recorder)
    return graphs


def rerun_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[RerunRecorder]:
    """Let --cuda-graph-impl local work with such recordings; the recorders that runs will have made."""
    from megatron.core import tensor_parallel

    from megatron_lowprec.training import model, resolve

    found: list[RerunRecorder] = []
    seed = tensor_parallel.model_parallel_cuda_manual_seed
    monkeypatch.setattr(resolve, "_check_cuda_graphs", lambda config, gpus: None)
    monkeypatch.setattr(model, "LayerGraphs", partial(_rerun_graphs, recorders=found))
    monkeypatch.setattr(
        tensor_parallel,
        "model_parallel_cuda_manual_seed",
        lambda base, use_cudagraphable_rng, **options: seed(base, **options),
    )
    return found


if __name__ == "__main__":
    from tests.training import many_runs

    with pytest.MonkeyPatch.context() as patch:
        rerun_on_a_cpu(patch)
        many_runs.main(Path(sys.argv[1]))
