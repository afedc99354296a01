"""The fused kernel's update is torch's: weights, state, what it skips, and who calls it."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_lowprec.mcore.optim import fused_adamw, spec_optimizer
from megatron_lowprec.mcore.optim import optimizer_step as optimizer_step_module
from megatron_lowprec.mcore.optim.optimizer_step import optimizer_step
from tests.mcore.built_trainers import Build, build, fuse, kinds, main_grads, main_weights, states, weights
from tools.bench.commands.step_worker import _updates

_ = build  # a fixture


@kinds
@pytest.mark.parametrize("scale", [1e-5, 1.0], ids=["small", "clipped"])
def test_the_fused_update_is_torch_s(build: Build, kind: dict[str, Any], scale: float) -> None:
    fused, plain = fuse(build(scale, lr_warmup_iters=0, **kind)), build(scale, lr_warmup_iters=0, **kind)
    grads = [grad.clone() for grad in main_grads(fused)]
    for _ in range(3):
        assert optimizer_step(fused.optimizer) == optimizer_step(plain.optimizer)
        for mine, theirs in zip(main_weights(fused), main_weights(plain), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)
        for grad, start in zip(main_grads(plain), grads, strict=True):  # clipping has scaled it, the fused update not
            grad.copy_(start)
    assert all(torch.equal(a, b) for a, b in zip(grads, main_grads(fused), strict=True))
    for one, other in zip(fused.optimizer.chained_optimizers, plain.optimizer.chained_optimizers, strict=True):
        for mine, theirs in zip(states(one), states(other), strict=True):
            assert mine.keys() == theirs.keys()
            assert float(mine["step"]) == float(theirs["step"]) == 3
    if kind.get("bf16"):
        for chunk in fused.chunks:
            for weight in chunk.parameters():
                if hasattr(weight, "main_param"):
                    assert torch.equal(weight.detach().view(-1), weight.main_param.bfloat16().view(-1))


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_fused_update_of_what_is_not_finite_is_skipped(build: Build, bad: str) -> None:
    trainer = fuse(build(bf16=True, use_distributed_optimizer=True))
    assert optimizer_step(trainer.optimizer)[0]
    before = weights(trainer), [weight.clone() for weight in main_weights(trainer)]
    if bad == "gradient":
        main_grads(trainer)[3].view(-1)[5] = math.inf
    loss = torch.tensor(math.nan if bad == "loss" else 1.0)
    assert not optimizer_step(trainer.optimizer, loss)[0]
    after = weights(trainer), main_weights(trainer)
    assert all(torch.equal(a, b) for a, b in zip(before[0] + before[1], after[0] + after[1], strict=True))
    main_grads(trainer)[3].zero_()
    assert optimizer_step(trainer.optimizer, torch.tensor(1.0))[0]
    (part,) = trainer.optimizer.chained_optimizers
    assert {float(state["step"]) for state in states(part)} == {2.0}
    assert not any(torch.equal(a, b) for a, b in zip(before[0], weights(trainer), strict=True))


def test_the_fused_update_reads_a_loaded_step_count(build: Build) -> None:
    """Bias corrections follow torch's state, replaced or written in place."""
    fused, plain = fuse(build(bf16=True, lr_warmup_iters=0)), build(bf16=True, lr_warmup_iters=0)
    optimizer_step(fused.optimizer)
    optimizer_step(plain.optimizer)
    for replaced in (False, True):
        for trainer in (fused, plain):
            for state in states(trainer.optimizer.chained_optimizers[0]):
                if replaced:
                    state["step"] = torch.tensor(40.0)
                else:
                    state["step"].fill_(20.0)
            optimizer_step(trainer.optimizer)
        for mine, theirs in zip(main_weights(fused), main_weights(plain), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-8)


def test_megatron_s_own_step_updates_by_the_fused_kernel(build: Build) -> None:
    fused, plain = fuse(build(bf16=True, lr_warmup_iters=0)), build(bf16=True, lr_warmup_iters=0)
    for _ in range(2):
        fused.optimizer.step()
        plain.optimizer.step()
    for mine, theirs in zip(main_weights(fused), main_weights(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


@kinds
def test_megatron_lm_s_loop_has_the_driver_s_update(
    build: Build, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    """By ``step`` of the optimizer that it builds, with torch's hooks, which follow the steps."""
    for module in (spec_optimizer, optimizer_step_module):
        monkeypatch.setattr(module, "supports_fused_adamw", lambda part: True)
    fused, driver = build(lr_warmup_iters=0, **kind), fuse(build(lr_warmup_iters=0, **kind))
    spec_optimizer.fuse_update(fused.optimizer)
    stepped = list[Any]()
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(optimizer))
    for _ in range(2):
        assert fused.optimizer.step() == optimizer_step(driver.optimizer)
    handle.remove()
    for mine, theirs in zip(weights(fused), weights(driver), strict=True):
        assert torch.equal(mine, theirs)
    for trainer in (fused, driver):
        inner = [part.optimizer for part in trainer.optimizer.chained_optimizers if not part.is_stub_optimizer]
        assert [stepped.count(optimizer) for optimizer in inner] == [2] * len(inner)


def test_the_benchmark_times_megatron_s_own_update(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, launched = fuse(build(bf16=True)), list[int]()
    update = fused_adamw.adam_update_

    class Clock:
        def wall_milliseconds(self, call: Callable[[], object], calls: int) -> list[float]:
            launched.append(0)
            call()
            return [1.0]

    def counted(*arguments: Any) -> None:
        launched[-1] += 1
        update(*arguments)

    monkeypatch.setattr(fused_adamw, "adam_update_", counted)
    _updates(trainer.optimizer, Clock())
    ours, own = launched
    assert ours > 0
    assert own == 0


def test_a_rank_without_shards_has_torch_s_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_adamw, "have_triton", lambda: True)
    inner = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    inner.param_groups.clear()
    assert not fused_adamw.supports_fused_adamw(SimpleNamespace(optimizer=inner))
