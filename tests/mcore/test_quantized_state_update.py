"""The update under a quantized optimizer state: clipped, skipped, launched early, and of every weight."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_lowprec.mcore.optim.optimizer_step import optimizer_step
from megatron_lowprec.mcore.pending_numbers import PendingNumbers
from megatron_lowprec.training.model import Trainer
from tests.mcore.built_trainers import Build, build, main_grads, states, weights

_ = build  # a fixture


def scaled_state(trainer: Trainer) -> list[torch.Tensor]:
    """Weights, codes, scales and step counts under a quantized optimizer state."""
    (part,) = trainer.optimizer.chained_optimizers
    parts = [value.clone() for state in states(part) for value in state.values()]
    return weights(trainer) + parts + [torch.tensor(group.get("step", 0)) for group in part.optimizer.param_groups]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


FP8_LM = {"recipe": "fp8_lm", "use_distributed_optimizer": True, "lr_warmup_iters": 0}


def test_main_weights_follow_weights_that_were_loaded(build: Build) -> None:
    """By Megatron-core's own call behind a checkpoint without optimizer state, as in Megatron-LM."""
    trainer = build(**FP8_LM, bf16=True)
    for weight in weights(trainer):
        weight.mul_(2)
    trainer.optimizer.reload_model_params()
    (part,) = (part for part in trainer.optimizer.chained_optimizers if not part.is_stub_optimizer)
    shards = [shard for group in part.optimizer.param_groups for shard in group["params"]]
    assert any(bool(shard.any()) for shard in shards)
    for shard in shards:
        found = part.optimizer.get_unscaled_state(shard, "master_param")
        torch.testing.assert_close(found, shard.float(), rtol=1e-3, atol=1e-6)  # FP16


def test_a_quantized_state_is_updated_by_clipped_gradients(build: Build) -> None:
    """Its kernels clip, with the bits of gradients that were clipped before."""
    clipped, plain = build(clip_grad=0.5, **FP8_LM), build(clip_grad=0, **FP8_LM)
    starts = [grad.clone() for grad in main_grads(clipped)]
    for _ in range(2):
        updated, norm, _ = optimizer_step(clipped.optimizer)
        assert updated
        assert norm is not None
        assert norm > 0.5
        for grad in main_grads(plain):
            grad.mul_(0.5 / (norm + 1e-6))
        assert optimizer_step(plain.optimizer)[0]
        for grad, start in zip(main_grads(plain), starts, strict=True):
            grad.copy_(start)
    assert all(torch.equal(a, b) for a, b in zip(starts, main_grads(clipped), strict=True))
    pairs = zip(scaled_state(clipped), scaled_state(plain), strict=True)
    assert all(torch.equal(bits(a), bits(b)) for a, b in pairs)


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_quantized_state_skips_what_is_not_finite(build: Build, bad: str) -> None:
    trainer = build(**FP8_LM)
    assert optimizer_step(trainer.optimizer)[0]
    before = scaled_state(trainer)
    if bad == "gradient":
        main_grads(trainer)[3].view(-1)[5] = math.inf
    loss = torch.tensor(math.nan if bad == "loss" else 1.0)
    assert not optimizer_step(trainer.optimizer, loss)[0]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(before, scaled_state(trainer), strict=True))
    main_grads(trainer)[3].zero_()
    assert optimizer_step(trainer.optimizer, torch.tensor(1.0))[0]
    (part,) = trainer.optimizer.chained_optimizers
    assert {group["step"] for group in part.optimizer.param_groups} == {2}
    assert {float(state["step"]) for state in states(part)} == {2.0}


def test_a_quantized_update_is_launched_before_its_numbers_are_awaited(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, seen = build(**FP8_LM), list[bool]()
    (part,) = trainer.optimizer.chained_optimizers
    wait = PendingNumbers.wait
    monkeypatch.setattr(PendingNumbers, "wait", lambda self: (seen.append(part.optimizer.launched), wait(self))[1])
    optimizer_step(trainer.optimizer)
    assert seen == [True]
    assert not part.optimizer.launched


def test_fp8_lm_moves_every_weight_of_a_model(build: Build) -> None:
    """Norm gains and biases as fp32 AdamW moves them, matrices within 2% on average; each with draws of its own."""
    runs = {}
    for recipe in ("bf16", "fp8_lm"):
        trainer = build(
            recipe=recipe, use_distributed_optimizer=True, lr=1e-4, clip_grad=0, weight_decay=0, lr_warmup_iters=0
        )
        before = weights(trainer)
        generator = torch.Generator().manual_seed(5)
        for grad in main_grads(trainer):  # of one sign
            grad.copy_(torch.exp(torch.randn(grad.shape, generator=generator)))
        for _ in range(30):
            assert optimizer_step(trainer.optimizer)[0]
        runs[recipe] = [after - start for after, start in zip(weights(trainer), before, strict=True)]
    assert len(runs["bf16"]) == 28
    for reference, moved in zip(runs["bf16"], runs["fp8_lm"], strict=True):
        assert float(reference.abs().min()) > 0
        if moved.dim() == 1:
            torch.testing.assert_close(moved, reference, rtol=1e-5, atol=1e-9)
        else:
            assert float(moved.mean()) == pytest.approx(float(reference.mean()), rel=0.02)
    (part,) = trainer.optimizer.chained_optimizers
    places = part.optimizer._places.values()
    keys = [place.stream.key for place in places if not place.keeps_fp32]
    assert len(set(keys)) == len(keys) == 10
