"""Auxiliary losses of experts beside a loss that is averaged over tokens: a microbatch's weigh as its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_lowprec.training import step
from megatron_lowprec.training.data.batches import Batches
from tests.training.conftest import Drive
from tests.training.helpers import TINY, argv

TOKENS = TINY["seq-length"] * TINY["micro-batch-size"]
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "disable_bias_linear": True,
    "train_iters": 1,
    "no_save": True,
    "hidden_dropout": 0,
    "attention_dropout": 0,
}
# so large that the router's gradient is theirs
LOSSES: dict[str, dict[str, Any]] = {
    "aux_loss": {"moe_aux_loss_coeff": 100.0},
    "seq_aux_loss": {"moe_aux_loss_coeff": 100.0, "moe_router_load_balancing_type": "seq_aux_loss"},
    "z-loss": {"moe_z_loss_coeff": 10.0},
}
losses = pytest.mark.parametrize("loss", LOSSES)


@pytest.fixture
def gradients(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function of the tokens with a loss of each microbatch: all gradients of an iteration, and those of routers."""

    def of(*kept: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found: list[dict[str, torch.Tensor]] = []
        remaining = list(kept)
        update, load = step.optimizer_step, Batches._load

        def masked(self: Batches) -> dict[str, torch.Tensor | None]:
            batch = load(self)
            mask = batch["loss_mask"]
            assert mask is not None
            mask.view(-1)[remaining.pop(0) if remaining else 0 :] = 0  # behind them comes a prefetched one
            return batch

        def noted(optimizer: Any, loss: torch.Tensor) -> Any:
            weights = [w for part in optimizer.chained_optimizers for w in part.get_parameters()]
            found.append({str(i): w.main_grad.clone() for i, w in enumerate(weights)})
            return update(optimizer, loss)

        with monkeypatch.context() as patched:
            patched.setattr(Batches, "_load", masked)
            patched.setattr(step, "optimizer_step", noted)
            drive(argv(save="out", **EXPERTS | options))
        (grads,) = found
        routers = [grad for grad in grads.values() if grad.shape == (EXPERTS["num_experts"], TINY["hidden-size"])]
        assert len(routers) == TINY["num-layers"]
        return torch.cat([grad.flatten() for grad in grads.values()]), torch.cat(routers)

    return of


def assert_close(found: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    """Within fp32 sums of another order."""
    for mine, theirs in zip(found, want, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-5


@losses
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS // 4, 2])
def test_with_as_many_tokens_in_each_microbatch_it_is_the_mean_of_microbatches(
    gradients: Any, loss: str, tokens: int
) -> None:
    """Then both ways to average a loss are the same; today's Megatron-core multiplies by all tokens of a rank."""
    options = LOSSES[loss]
    want = gradients(tokens, tokens, **options)
    assert float(want[1].norm()) > 10 * float(gradients(tokens, tokens)[1].norm()), "the auxiliary loss is too small"
    assert_close(gradients(tokens, tokens, calculate_per_token_loss=True, **options), want)


@losses
def test_microbatches_weigh_by_their_tokens_with_a_loss(gradients: Any, loss: str) -> None:
    """A microbatch without such tokens has no weight, which gives the parts of the sum."""
    options = LOSSES[loss] | {"calculate_per_token_loss": True}
    first, second = 40, 8
    parts = gradients(first, 0, **options), gradients(0, second, **options)
    want = [(first * a + second * b) / (first + second) for a, b in zip(*parts, strict=True)]
    assert_close(gradients(first, second, **options), want)


def test_a_recomputation_finds_the_tokens_of_its_microbatch(gradients: Any) -> None:
    options = LOSSES["seq_aux_loss"] | {"moe_z_loss_coeff": 10.0, "calculate_per_token_loss": True}
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    found, want = (gradients(40, 8, **options, **more) for more in (recomputed, {}))
    assert all(map(torch.equal, found, want))
