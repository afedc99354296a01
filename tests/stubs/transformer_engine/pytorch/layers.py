"""Linear layers and norms without tensor parallelism; ``_extra_state`` as bytes, as TransformerEngine keeps it."""

import json
import os
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, fuse: bool, first: bool | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.fuse, ctx.first = fuse, first
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, dy, x = dy @ weight, dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        if not ctx.fuse:
            return dx, dy.t() @ x, None, None
        # The first microbatch of a step overwrites, the others add.
        weight.main_grad.mul_(0 if ctx.first else 1).addmm_(dy.t().float(), x.float())
        weight.grad_added_to_main_grad = True
        return dx, torch.empty_like(weight), None, None


class _Stateful(torch.nn.Module):
    """Keeps a counter of its forwards under FP8 the way TransformerEngine keeps amax histories."""

    seen = 0
    recipe: Recipe | None = None

    def get_extra_state(self) -> torch.Tensor:
        if not self.seen:
            return torch.empty(0, dtype=torch.uint8)
        state = {
            "recipe": self.recipe,
            "amax_history_fwd": torch.tensor([float(self.seen)]),
            "extra_fp8_variables": {"num_gemms": 1, "fp8_max_fwd": 448.0},
        }
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        if state.numel():
            assert os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] == "1"
            self.seen = int(pickle.loads(state.numpy().tobytes())["amax_history_fwd"])


class Linear(_Stateful):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        symmetric_ar_type: Any = None,
    ) -> None:
        assert tp_size == 1, "the stand-in has no tensor parallelism"
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.fuse_wgrad_accumulation, self.return_bias, self.use_bias = fuse_wgrad_accumulation, return_bias, bias
        self.parallel_mode, self.save_original_input = parallel_mode, False
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        assert init_method is not None
        with get_rng_state_tracker().fork():
            init_method(self.weight)
        self.bias: Any = torch.empty(0)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype, device=device))

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        recipe = FP8GlobalStateManager.recipe
        if recipe is not None and torch.is_grad_enabled():
            self.seen += 1
            self.recipe = recipe
        _log(
            size=[self.out_features, self.in_features],
            first=is_first_microbatch,
            training=torch.is_grad_enabled(),
            seen=self.seen,
            fused=self.fuse_wgrad_accumulation,
            **(recipe.described() if recipe is not None else {}),
        )
        y = _LinearFunction.apply(x, self.weight, self.fuse_wgrad_accumulation, is_first_microbatch)
        if self.use_bias and not self.return_bias:
            y = y + self.bias
        return (y, self.bias) if self.return_bias else y


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        return_layernorm_output: bool = False,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **linear: Any,
    ) -> None:
        super().__init__(in_features, out_features, **linear)
        self.eps, self.normalization = eps, normalization
        made = {"dtype": linear["params_dtype"], "device": linear["device"]}
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, **made))
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, **made))

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        size = (x.shape[-1],)
        if self.normalization == "LayerNorm":
            x = F.layer_norm(x, size, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        else:
            x = F.rms_norm(x, size, self.layer_norm_weight, self.eps)
        return super().forward(x, is_first_microbatch)


class _Norm(_Stateful):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=params_dtype, device=device))
        if isinstance(self, LayerNorm):
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=params_dtype, device=device))


class LayerNorm(_Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


class RMSNorm(_Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class GroupedLinear(torch.nn.Module):
    """Named as a base class; never built."""


def _log(**call: Any) -> None:
    path = os.environ.get("TE_STAND_IN_LOG")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(call) + "\n")
