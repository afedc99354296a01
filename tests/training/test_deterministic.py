"""--deterministic-mode: the same bits each time, and what Megatron asks for around it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.training import model
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses

NAMES = ("NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The mode is a process's; other tests run in this one."""
    before = {name: os.environ.pop(name, None) for name in NAMES}
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


MOE: dict[str, Any] = {"num_experts": 4, "swiglu": True, "disable_bias_linear": True}
OPTIONS: dict[str, Any] = {"deterministic_mode": True, "hidden_size": 128, "bf16": True, "train_iters": 4}


@pytest.mark.parametrize("recipe", ["bf16", "fp8_mxfp4_rht_sr", "fp8_blockwise"])
def test_two_runs_give_the_same_bits(drive: Drive, recipe: str) -> None:
    for name in ("first", "second"):
        drive(argv(save=name, recipe=recipe, no_save=True, **OPTIONS))
    assert torch.are_deterministic_algorithms_enabled()
    assert losses(Path("first")) == losses(Path("second"))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [{}, MOE], ids=["gpt", "moe"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_mxfp4_rht_sr"])
def test_two_runs_on_a_gpu_give_the_same_bits(drive: Drive, recipe: str, shape: dict[str, Any]) -> None:
    # Large enough for sums whose order could vary.
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "seq_length": 512, "vocab_size": 8191, "train_iters": 20}
    for name in ("first", "second"):
        drive(argv(save=name, recipe=recipe, no_save=True, **OPTIONS | sizes | shape))
    assert losses(Path("first")) == losses(Path("second"))


def test_what_nccl_may_use_is_chosen_or_checked(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    drive(argv(save="out", no_save=True, **OPTIONS | {"train_iters": 1}))
    assert os.environ["NCCL_ALGO"] == "Ring"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("NCCL_ALGO", "^NVLS")
    drive(argv(save="out", no_save=True, **OPTIONS | {"train_iters": 1}))
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    with pytest.raises(UserError, match="NCCL_ALGO=NVLS: unset it, or choose one of Ring"):
        drive(argv(save="out", no_save=True, **OPTIONS))


def test_megatron_s_own_fused_cross_entropy_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for triton, deterministic, fused in ((True, True, True), (False, True, False), (False, None, True)):
        monkeypatch.setattr(model, "have_triton", lambda triton=triton: triton)
        config, _, _ = parse(argv(deterministic_mode=deterministic))
        transformer = model.transformer_config(resolve_model(config))
        assert transformer.cross_entropy_loss_fusion is fused
        assert transformer.deterministic_mode is bool(deterministic)
