"""Stand-in of the optimizers: torch's AdamW, which counts updates in groups of weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool,
    ) -> None:
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight] = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
            states = [self.state[weight] for weight in weights]
            before = group.get("step", 0)
            adamw(
                weights,
                [weight.grad for weight in weights],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [torch.tensor(float(before)) for _ in weights],
                foreach=False,
                fused=True,  # as the driver sets it for AdamW
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            group["step"] = before + 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for state in state_dict["state"].values():
            unknown = state.keys() - {"exp_avg", "exp_avg_sq"}
            if unknown:
                raise KeyError(*unknown)
        super().load_state_dict(state_dict)


class FusedSGD(torch.optim.SGD):
    """Never used: Megatron-core imports both from one line."""
