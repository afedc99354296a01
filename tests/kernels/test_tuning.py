"""Which tiling is taken, on a stand-in for a GPU: events that count what the candidates say they take."""

import errno
import os
from pathlib import Path

import pytest
import torch

from megatron_lowprec.kernels import tuning

GPU = torch.device("cuda", 0)


class Machine:
    """Runs candidates that are their own milliseconds."""

    def __init__(self) -> None:
        self.clock, self.ran = 0, 0

    def run(self, candidate: int) -> None:
        self.clock += candidate
        self.ran += 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    made = Machine()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0

        def record(self) -> None:
            self.at = made.clock

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, stop: "Event") -> float:
            return stop.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(tuning, "tunes", lambda device: True)
    monkeypatch.setattr(tuning, "_cache", lambda device: tmp_path / "folder" / "tilings.json")
    return made


def test_the_fastest_is_taken_and_remembered(machine: Machine) -> None:
    assert tuning.fastest("kernel", (4, 2, 9, 3), machine.run, GPU) == 2
    ran = machine.ran
    assert tuning.fastest("kernel", (4, 2, 9, 3), machine.run, GPU) == 2
    assert machine.ran == ran


def test_sizes_are_tuned_apart_and_a_capture_decides_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned, large = tuning.Tuned("kernel", (4, 2, 9)), tuning.LARGE_ENOUGH
    assert tuned.choose(large - 1, machine.run, GPU) == 4
    assert machine.ran == 0
    with monkeypatch.context() as capture:
        capture.setattr(tuning, "tunes", lambda device: False)
        assert tuned.choose(large, machine.run, GPU) == 4
    assert tuned.choose(large, machine.run, GPU) == 2
    ran = machine.ran
    assert tuned.choose(large, machine.run, GPU) == 2
    assert machine.ran == ran
    assert tuned.choose(large, machine.run, GPU, below=25) == 2
    assert machine.ran == 2 * ran


def test_a_choice_among_other_candidates_is_not_taken(machine: Machine) -> None:
    """As after an upgrade that lists other tilings: the place in the old list says nothing of the new one."""
    assert tuning.fastest("kernel", (4, 2), machine.run, GPU) == 2
    assert tuning.fastest("kernel", (1, 3, 2), machine.run, GPU) == 1


def test_a_candidate_that_exceeds_the_gpu_is_not_taken(machine: Machine) -> None:
    errors = pytest.importorskip("triton.runtime.errors", reason="triton is not installed")

    def run(candidate: int) -> None:
        if candidate < 4:
            raise errors.OutOfResources(147456, 101376, "shared memory")
        machine.run(candidate)

    assert tuning.fastest("kernel", (9, 2, 4, 3), run, GPU) == 4
    with pytest.raises(RuntimeError, match=r"kernel of \[2, 3\]: none fits cuda:0"):
        tuning.fastest("kernel", (2, 3), run, GPU)

    def wrong(candidate: int) -> None:
        raise ValueError("not of the machine")

    with pytest.raises(ValueError, match="not of the machine"):
        tuning.fastest("other", (2, 3), wrong, GPU)


def test_a_full_disk_costs_a_measurement_and_leaves_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert tuning.fastest("kernel", (4, 2), machine.run, GPU) == 2
    assert list((tmp_path / "folder").iterdir()) == []
