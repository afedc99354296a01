"""Converted layers for tests of torch.compile, and steps that fail where a later one compiles again."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_lowprec import KeepBf16, convert, get_recipe
from megatron_lowprec.kernels.cast_fp8 import reference as cast_reference
from megatron_lowprec.linear import lowprec_linear
from megatron_lowprec.linear.backends import resolved
from megatron_lowprec.linear.backends.hopper_fp8 import dense


class Pair(nn.Module):
    """Two layers, and nothing between that a compiler could round otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


class Pairs(nn.Module):
    """``recompute`` is "", "reentrant" or "not reentrant"."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.recompute, self.layers = recompute, nn.ModuleList([Pair(), Pair()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair in self.layers:
            x = checkpoint(pair, x, use_reentrant=self.recompute == "reentrant") if self.recompute else pair(x)
        return x


def whole(name: str) -> Any:
    """The recipe without layers that stay in bf16."""
    return replace(get_recipe(name), keep_bf16=KeepBf16(), rules=())


def converted(name: str, model: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return convert(model().to(dtype), whole(name))


def steps_of(
    model: nn.Module, steps: int, tokens: tuple[int, ...] = (64,), passes: int = 1, evaluates: bool = False
) -> list[torch.Tensor]:
    """Outputs and gradients, then the state; ``tokens`` of the passes in turn. No step after the second compiles."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    generator, found = torch.Generator().manual_seed(1), []
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            optimizer.zero_grad()
            ys = []
            for index in range(passes):
                x = torch.randn(tokens[(step * passes + index) % len(tokens)], 128, generator=generator).to(dtype)
                ys.append((x.requires_grad_(), model(x)))
            for x, y in ys:  # all forward passes come first, as in a pipeline
                y.backward(y.detach())
                found += [y.detach(), x.grad]
            found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
            optimizer.step()
            if evaluates:
                model.eval()
                with torch.no_grad():
                    found.append(model(x))
                model.train()
    return found + list(model.state_dict().values())


def equal(found: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(found) == len(want) and all(map(torch.equal, found, want))


def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve native backends on the CPU: casts by their reference, products by torch's scaled GEMM."""
    monkeypatch.setattr(resolved, "arch_of", lambda _: "sm90")
    monkeypatch.setattr(dense, "load", lambda _: cast_reference)
    # other tests of this process would find the native GEMMs of their layers
    monkeypatch.setattr(lowprec_linear, "traced_gemms", lru_cache(lowprec_linear.traced_gemms.__wrapped__))


OURS = re.compile(r"= torch\.ops\.megatron_lowprec\.(\w+)")
