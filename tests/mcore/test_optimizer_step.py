"""The update in few launches: against float64 and against Megatron-core's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from megatron.core import fp8_utils

from megatron_lowprec.mcore.optim.optimizer_step import copy_weights_at_once, grad_norm, optimizer_step
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from tests.mcore.built_trainers import Build, build, kinds, main_grads, main_weights, weights

_ = build  # a fixture


@kinds
def test_the_norm_is_that_of_all_gradients(build: Build, kind: dict[str, Any]) -> None:
    trainer = build(**kind)
    trainer.optimizer.prepare_grads()
    exact = math.sqrt(sum(float(grad.double().square().sum()) for grad in main_grads(trainer)))
    norm = grad_norm(trainer.optimizer)
    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(exact, rel=1e-6)
    assert float(norm) == pytest.approx(trainer.optimizer.get_grad_norm(), rel=1e-6)


@kinds
@pytest.mark.parametrize("scale", [1e-5, 1.0], ids=["small", "clipped"])
def test_one_update_is_megatron_s(build: Build, kind: dict[str, Any], scale: float) -> None:
    trainer, stock = build(scale, lr_warmup_iters=0, **kind), build(scale, lr_warmup_iters=0, **kind)
    for part in stock.optimizer.chained_optimizers:
        vars(part).pop("_copy_main_params_to_model_params", None)
    before = weights(trainer)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(stock), strict=True))
    for _ in range(2):  # moments and step count are right, too
        updated, norm, zeros = optimizer_step(trainer.optimizer)
        stock_updated, stock_norm, _ = stock.optimizer.step()
        assert (updated, stock_updated, zeros) == (True, True, None)
        assert norm == pytest.approx(stock_norm, rel=1e-6)
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    for mine, theirs in zip(main_weights(trainer), main_weights(stock), strict=True):
        # the two norms may differ in their last bit
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("distributed", [False, True])
def test_model_weights_are_the_main_weights_rounded(build: Build, distributed: bool) -> None:
    trainer = build(bf16=True, use_distributed_optimizer=distributed or None)
    optimizer_step(trainer.optimizer)
    for chunk in trainer.chunks:
        for weight in chunk.parameters():
            assert torch.equal(weight.detach().view(-1), weight.main_param.bfloat16().view(-1))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_nothing(build: Build, bad: float) -> None:
    trainer = build(bf16=True)
    before = weights(trainer)
    updated, norm, _ = optimizer_step(trainer.optimizer, torch.tensor(bad))
    assert not updated
    assert norm is not None
    assert math.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    assert optimizer_step(trainer.optimizer, torch.tensor(1.0))[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(build: Build, bad: float) -> None:
    trainer = build(bf16=True)
    before = weights(trainer)
    main_grads(trainer)[3].view(-1)[5] = bad
    updated, norm, _ = optimizer_step(trainer.optimizer)
    assert not updated
    assert norm is not None
    assert not math.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    inner = trainer.optimizer.chained_optimizers[0].optimizer
    assert not any(state for state in inner.state.values())


def test_zeros_are_counted_if_configured(build: Build) -> None:
    trainer = build(bf16=True, log_num_zeros_in_grad=True)
    main_grads(trainer)[0].zero_()
    assert optimizer_step(trainer.optimizer)[2] == main_grads(trainer)[0].numel()


def test_copying_at_once_leaves_other_optimizers_alone(build: Build) -> None:
    trainer = build()
    copy_weights_at_once(trainer.optimizer)
    assert "_copy_main_params_to_model_params" not in vars(trainer.optimizer.chained_optimizers[0])


def test_fp8_weights_of_another_library_are_left_to_megatron(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(bf16=True, use_distributed_optimizer=True)
    (part,) = trainer.optimizer.chained_optimizers
    del part._copy_main_params_to_model_params
    monkeypatch.setattr(fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True)
    monkeypatch.setattr(fp8_utils, "FP8_TENSOR_CLASS", torch.nn.Parameter)
    copy_weights_at_once(trainer.optimizer)
    assert "_copy_main_params_to_model_params" not in vars(part)
    monkeypatch.setattr(fp8_utils, "FP8_TENSOR_CLASS", Fp8Weight)
    copy_weights_at_once(trainer.optimizer)
    assert "_copy_main_params_to_model_params" in vars(part)
