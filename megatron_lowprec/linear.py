"""A drop-in for ``torch.nn.Linear`` whose three GEMMs follow a recipe. No Megatron, no collectives."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron_lowprec.gemms import LinearPlace
from megatron_lowprec.numerics import LinearNumerics
from megatron_lowprec.operands import Kept
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import Moment
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.recipe.resolve import LinearSite, check_sizes
from megatron_lowprec.recipe.schema import HistoryRule, KeepBf16, Recipe


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x, weight, bias, numerics: LinearNumerics, moment: Moment, observe: bool
    ):
        y, kept = numerics.forward(x, weight, moment, observe, bias, keep=ctx.needs_input_grad[1])
        ctx.save_for_backward(weight, *kept.saved(x))
        ctx.numerics, ctx.moment, ctx.tile = numerics, moment, kept.tile
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        weight, elements, scale, amax = ctx.saved_tensors
        dy = ctx.numerics.grad_output(dy, ctx.moment, bias=ctx.needs_input_grad[2])
        dx = ctx.numerics.dgrad(dy, weight, ctx.moment, amax) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            dw = ctx.numerics.wgrad(dy, Kept.restored(elements, scale, ctx.tile), ctx.moment)
        return dx, dw, dy.bias, None, None, None


class LowPrecLinear(nn.Linear):
    """``torch.nn.Linear`` whose three GEMMs follow a recipe, for use outside Megatron.

    Call ``end_step(model)`` after each optimizer step: it moves the random streams on and updates delayed scales. The
    ``state_dict`` is ``torch.nn.Linear``'s, and the amax histories of delayed scaling; a run that resumes at another
    step sets ``moment``. ``keep_bf16`` of a recipe speaks of a transformer's layers and is not applied here.

    Args:
        in_features, out_features, bias, device, dtype: as ``torch.nn.Linear``.
        recipe: a Recipe or the name of one.
        seed, layer, name: key of the random streams; give each layer of a model another ``layer`` or ``name``.

    Raises:
        UserError: unknown recipe, or sizes that its blocks do not divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str = "bf16",
        seed: int = 0,
        layer: int = 1,
        name: str = "linear",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
        site = LinearSite(layer, name, in_features, out_features, "column")
        check_sizes(replace(self.recipe, keep_bf16=KeepBf16()), [site], layer, 1)
        self._histories: dict[tuple[int, HistoryRule], AmaxHistory] = {}
        self.numerics = LinearNumerics(self.recipe, LinearPlace(layer, name), seed, self._history)
        self.moment = Moment(0, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias``; x [..., in_features] in the dtype of the weight."""
        training = torch.is_grad_enabled() and (self.weight.requires_grad or x.requires_grad)
        flat = x.reshape(-1, x.shape[-1])
        # Triton starts kernels on the current device; for the backward pass autograd itself makes it the tensors'
        with torch.cuda.device_of(flat):
            y = _LinearFunction.apply(flat, self.weight, self.bias, self.numerics, self.moment, training)
        if training:
            self.moment = self.moment._replace(microbatch=self.moment.microbatch + 1)
        return y.view(*x.shape[:-1], self.out_features)

    def end_step(self) -> None:
        """What follows an optimizer step for this layer."""
        self.moment = Moment(self.moment.step + 1, 0)
        with torch.cuda.device_of(self.weight):
            for history in self._histories.values():
                history.update()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for operand, (history, slot) in self.numerics.histories.items():
            destination[f"{prefix}amax.{operand}"] = history.state(slot)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.numerics.load_histories(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "LowPrecLinear":
        super()._apply(fn, recurse)
        for history in self._histories.values():
            history.to(self.weight.device)
        return self

    def _history(self, length: int, rule: HistoryRule) -> AmaxHistory:
        return self._histories.setdefault((length, rule), AmaxHistory(length, rule, self.weight.device))


def end_step(model: nn.Module) -> None:
    """``end_step`` of every ``LowPrecLinear`` in ``model``; call it after each optimizer step."""
    for module in model.modules():
        if isinstance(module, LowPrecLinear):
            module.end_step()
