"""AdamW on fp32 state with clipping before it and the model's weights behind it, in one launch for all tensors.

torch's AdamW keeps its state, options and checkpoints; only its ``step`` is replaced. The launch needs no number on the
host: it reads the factor of the gradients from the device and changes nothing if that is NaN. So it follows the
backward pass at once, and the host learns afterwards whether the step was skipped.
"""

from __future__ import annotations

from itertools import chain
from types import MethodType
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from torch.optim import Optimizer

from megatron_lowprec.kernels.dispatch import adam_update_, have_triton
from megatron_lowprec.kernels.scaled_adam.reference import Hyperparameters, Slot


def main_weights(part: MegatronOptimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(model weight or this rank's shard of it, fp32 main weight) of weights that have both, without FP8 weights."""
    if isinstance(part, DistributedOptimizer):
        shards = zip(chain(*part.shard_float16_groups), chain(*part.shard_fp32_from_float16_groups), strict=True)
        return [(shard.data, main) for shard, main in shards if shard is not None]  # FP8 weights have no shard
    if isinstance(part, Float16OptimizerWithFloat16Params):
        weights = zip(chain(*part.float16_groups), chain(*part.fp32_from_float16_groups), strict=True)
        return [(weight.data, main) for weight, main in weights]
    return []


def supports_fused_adamw(part: MegatronOptimizer) -> bool:
    """Whether ``FusedAdamW`` can update a part: torch's own AdamW on fp32 weights on a GPU, with Triton.

    False for a rank without shards, whose update is nothing.
    """
    inner = part.optimizer
    if type(inner) is not torch.optim.AdamW or not have_triton():
        return False
    weights = [main for group in inner.param_groups for main in group["params"]]
    options = [group[name] for group in inner.param_groups for name in ("amsgrad", "maximize")]
    return bool(weights) and not any(options) and all(main.is_cuda and main.dtype == torch.float32 for main in weights)


class FusedAdamW:
    """The update of one of Megatron-core's optimizers around a ``torch.optim.AdamW``, whose ``step`` it replaces.

    ``launch`` updates the weights; ``step``, which Megatron-core calls afterwards, records that it did. A ``step``
    without a launch before it, by Megatron-core's own loop, launches.

    Args:
        part: one of the optimizers inside Megatron-core's; ``supports_fused_adamw`` says which.

    Attributes:
        launched: whether an update was launched that ``step`` has not recorded. Set it to False if it was skipped.
    """

    def __init__(self, part: MegatronOptimizer) -> None:
        self._part = part
        self._inner: torch.optim.AdamW = part.optimizer
        # with the hooks of torch's own, by which others follow the steps of any optimizer
        self._inner.step = MethodType(Optimizer.profile_hook_step(self._step), self._inner)
        self.launched = False
        self._done = 0
        # the counter that _done was read from, and its version
        self._counter: torch.Tensor | None = None
        self._version = 0

    @torch.no_grad()
    def launch(self, grad_factor: torch.Tensor) -> None:
        """Update moments, main weights and the model's weights from the gradients.

        Args:
            grad_factor: fp32 scalar on the weights' device, multiplies the gradients; NaN: nothing changes.
        """
        model = {id(main): weight for weight, main in main_weights(self._part)}
        step = self._count() + 1
        for group in self._inner.param_groups:
            by_dtype: dict[tuple[torch.dtype, torch.dtype | None], list[Slot]] = {}
            for main in group["params"]:
                if main.grad is None:
                    continue
                state, weight = self._state(main), model.get(id(main))
                slot = Slot(main.grad, weight, state["exp_avg"], state["exp_avg_sq"], main.data, state["step"])
                by_dtype.setdefault((main.grad.dtype, None if weight is None else weight.dtype), []).append(slot)
            beta1, beta2 = group["betas"]
            hyperparameters = Hyperparameters(
                float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], step
            )
            for slots in by_dtype.values():
                adam_update_(slots, hyperparameters, None, grad_factor)
        self.launched = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Count the launched update in torch's state; torch's hooks of a step run around it."""
        self._inner.step(closure)

    @torch.no_grad()
    def _step(self, _: Optimizer, closure: None = None) -> None:
        assert closure is None
        if not self.launched:
            self.launch(torch.ones((), device=self._weights()[0].device))
        self.launched = False
        steps = [self._inner.state[main]["step"] for main in self._weights() if main.grad is not None]
        if steps:
            torch._foreach_add_(steps, 1)
            self._done, self._counter, self._version = self._done + 1, steps[0], steps[0]._version

    def _weights(self) -> list[torch.Tensor]:
        return [main for group in self._inner.param_groups for main in group["params"]]

    def _state(self, main: torch.Tensor) -> dict[str, Any]:
        """Adam's state of a main weight, as torch creates it."""
        state: dict[str, Any] = self._inner.state[main]
        if not state:
            state["step"] = torch.zeros((), device=main.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(main), torch.zeros_like(main)
        return state

    def _count(self) -> int:
        """Updates so far; read from the device only if something else has changed the state, such as a checkpoint."""
        steps = (self._state(main)["step"] for main in self._weights() if main.grad is not None)
        found: torch.Tensor | None = next(steps, None)
        if found is not None and (found is not self._counter or found._version != self._version):
            self._done, self._counter, self._version = int(found), found, found._version
        return self._done
