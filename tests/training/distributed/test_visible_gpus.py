"""GPUs that a process was given and does not find are an error, never a run on the CPU."""

from __future__ import annotations

import subprocess

import pytest
import torch

import pretrain_gpt
from megatron_lowprec.errors import UserError
from megatron_lowprec.sweep import local
from megatron_lowprec.training.distributed import startup, visible_gpus


@pytest.fixture(autouse=True)
def driver_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with NVIDIA's driver whose GPUs torch does not find."""
    monkeypatch.setattr(visible_gpus, "has_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def init() -> None:
        raise RuntimeError("Error 805: MPS client failed to connect.\nAnd more")

    monkeypatch.setattr(torch.cuda, "init", init)


@pytest.mark.parametrize("names", ["0", " 1, 0", "GPU-1234", "MIG-1,MIG-2", "0,-1"])
def test_given_gpus_that_are_not_found_are_refused(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    with pytest.raises(UserError) as error:
        visible_gpus.has_gpus()
    assert str(error.value) == (
        f"CUDA_VISIBLE_DEVICES={names.strip()} gives this process GPUs, and torch finds none (Error 805: MPS client "
        "failed to connect); name GPUs that it reaches, under MPS those of the MPS server, or set "
        'CUDA_VISIBLE_DEVICES="" to run on the CPU'
    )


@pytest.mark.parametrize("names", [None, "", " ", "-1", "-1,0", "NoDevFiles"])
def test_a_process_without_given_gpus_is_for_the_cpu(monkeypatch: pytest.MonkeyPatch, names: str | None) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names or "")
    if names is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert not visible_gpus.has_gpus()


def test_a_machine_without_a_driver_is_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(visible_gpus, "has_driver", lambda: False)
    assert not visible_gpus.has_gpus()


def test_found_gpus_need_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert visible_gpus.has_gpus()


def test_a_torch_without_cuda_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(UserError, match=r"\(Torch not compiled with CUDA enabled\)"):
        visible_gpus.has_gpus()


def test_the_driver_ends_before_it_trains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert pretrain_gpt.main(["--config", "configs/models/gpt_tiny.yaml", "--train-iters", "1", "--no-save"]) == 2
    assert "CUDA_VISIBLE_DEVICES=3 gives this process GPUs" in capsys.readouterr().err
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES=3 gives"):
        startup._device(startup.Ranks(0, 1, 0, 1))


def test_a_sweep_starts_no_job_without_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked:
        returncode, stdout, stderr = 0, "0\n", ""

    monkeypatch.setattr(subprocess, "run", lambda *args, **more: Asked)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES=0,1 gives this process GPUs"):
        local.visible_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local.visible_gpus() == []
