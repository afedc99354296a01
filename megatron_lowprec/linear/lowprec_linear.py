"""Drop-in replacement of ``torch.nn.Linear`` whose three GEMMs follow a recipe. No Megatron, no collectives."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.layer_tensors import SavedForBackward
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep, in_backward_pass
from megatron_lowprec.recipe.coverage import LinearSite, check_site, kept_in_bf16
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.recipe.schema import HistorySpec, Recipe


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x, weight, bias, linear_gemms: LinearGemms, rng_step: RngStep, update_amax: bool
    ):
        y, saved = linear_gemms.forward(x, weight, rng_step, update_amax, bias, save_input=ctx.needs_input_grad[1])
        ctx.save_for_backward(*saved.tensors())
        ctx.linear_gemms, ctx.rng_step, ctx.plain = linear_gemms, rng_step, saved[4:]
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        saved, linear_gemms = SavedForBackward(*ctx.saved_tensors, *ctx.plain), ctx.linear_gemms
        dy = linear_gemms.grad_output(dy, ctx.rng_step, bias=ctx.needs_input_grad[2])
        dx = linear_gemms.dgrad(dy, saved.weight, ctx.rng_step, saved.weight_amax) if ctx.needs_input_grad[0] else None
        dw = linear_gemms.wgrad(dy, saved.input(), ctx.rng_step) if ctx.needs_input_grad[1] else None
        return dx, dw, dy.bias, None, None, None


class LowPrecLinear(nn.Linear):
    """``torch.nn.Linear`` whose three GEMMs follow a recipe, for use outside Megatron.

    Random draws follow torch's CPU generator, as dropout does. ``torch.manual_seed`` repeats them, a saved generator
    state continues them, and ``torch.utils.checkpoint``, reentrant or not, recomputes with the bits of the first pass
    if it preserves random states, its default. A recipe without random draws does not advance the generator.

    Delayed scales are updated at the first forward pass after a step of any ``torch.optim.Optimizer`` in the process,
    or by ``end_step``. Call it if weights are updated otherwise. The ``state_dict`` is ``torch.nn.Linear``'s plus the
    amax histories of delayed scaling.

    Args:
        in_features, out_features, bias, device, dtype: as ``torch.nn.Linear``.
        recipe: a Recipe or the name of one. A layer that its ``keep_bf16`` names is not quantized.
        seed: seed of the random draws, in addition to torch's generator.
        layer, name: number and name of the layer for ``keep_bf16`` (``layers.<layer>.<name>``), counted from 1. Both
            enter the key of its draws: give each layer of a model a different ``layer`` or ``name``.
        num_layers: number of the model's layers, required by ``keep_bf16.last_layers``.

    Attributes:
        rng_step: the RNG step of the last forward pass, drawn from torch's generator.

    Raises:
        UserError: unknown recipe, sizes that its blocks do not divide, or no ``num_layers`` for ``last_layers``.
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
        num_layers: int | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
        kept = self.recipe.quantized and _is_kept(self.recipe, layer, name, num_layers)
        if self.recipe.quantized and not kept:
            check_site(self.recipe, LinearSite(layer, name, in_features, out_features, "column"), 1)
        self._histories: dict[HistorySpec, AmaxHistory] = {}
        self.linear_gemms = LinearGemms(
            get_recipe("bf16") if kept else self.recipe, LinearId(layer, name), seed, self._history
        )
        self.rng_step = RngStep(0, 0)
        # optimizer steps before the last forward pass in training; None once its amaxes have entered the histories
        self._observed_after: int | None = None
        if self._histories:
            _count_optimizer_steps()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias``; x [..., in_features] in the dtype of the weight."""
        training = torch.is_grad_enabled() and (self.weight.requires_grad or x.requires_grad)
        # a recomputation uses the scales of its first pass, even if optimizers step within the backward pass
        if not in_backward_pass():
            self._follow_optimizer()
            if training and self._observed_after is not None:
                self._end_microbatch()
        if training and self._histories:
            self._observed_after = _optimizer_steps
        if self.linear_gemms.recipe.random:
            self.rng_step = RngStep(*torch.randint(1 << 31, (2,), device="cpu").tolist())
        flat = x.reshape(-1, x.shape[-1])
        # Triton launches on the current device; in the backward pass autograd sets it
        with torch.cuda.device_of(flat):
            y = _LinearFunction.apply(flat, self.weight, self.bias, self.linear_gemms, self.rng_step, training)
        return y.view(*x.shape[:-1], self.out_features)

    def end_step(self) -> None:
        """Update delayed scales after an optimizer step."""
        self._observed_after = None
        with torch.cuda.device_of(self.weight):
            for history in self._histories.values():
                history.update()

    def _follow_optimizer(self) -> None:
        """Call ``end_step`` if an optimizer has stepped since the last forward pass in training."""
        if self._observed_after not in (None, _optimizer_steps):
            self.end_step()

    def _end_microbatch(self) -> None:
        for remembered, history in self._histories.items():
            if remembered.update == "microbatch":
                history.update()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self._follow_optimizer()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for operand, (history, slot) in self.linear_gemms.histories.items():
            destination[f"{prefix}amax.{operand}"] = history.state(slot)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.linear_gemms.load_histories(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "LowPrecLinear":
        super()._apply(fn, recurse)
        for history in self._histories.values():
            history.to(self.weight.device)
        return self

    def _history(self, remembered: HistorySpec) -> AmaxHistory:
        return self._histories.setdefault(remembered, AmaxHistory(remembered, self.weight.device))


def end_step(model: nn.Module) -> None:
    """Call ``end_step`` of every ``LowPrecLinear`` in ``model``; required without a ``torch.optim.Optimizer``."""
    for module in model.modules():
        if isinstance(module, LowPrecLinear):
            module.end_step()


def _is_kept(recipe: Recipe, layer: int, name: str, num_layers: int | None) -> bool:
    """Whether ``keep_bf16`` names the layer.

    Raises:
        UserError: ``num_layers`` is smaller than ``layer``, or missing with ``keep_bf16.last_layers``.
    """
    if num_layers is None and recipe.keep_bf16.last_layers:
        raise UserError(
            f"recipe {recipe.name} keeps the last {recipe.keep_bf16.last_layers} layers in bf16: pass num_layers=..., "
            f"the number of the model's layers, to LowPrecLinear"
        )
    if num_layers is not None and layer > num_layers:
        raise UserError(f"LowPrecLinear has layer={layer} of num_layers={num_layers}; layers are numbered from 1")
    return kept_in_bf16(recipe, layer, name, layer if num_layers is None else num_layers)


_optimizer_steps = 0  # of this process, since the first layer with amax histories was built


def _note_optimizer_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


@cache
def _count_optimizer_steps() -> None:
    register_optimizer_step_post_hook(_note_optimizer_step)
