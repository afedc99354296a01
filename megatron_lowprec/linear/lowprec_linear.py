"""Drop-in replacement of ``torch.nn.Linear`` whose three GEMMs follow a recipe. No Megatron."""

from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.compiled import record_weight, traced_gemms, traced_pass
from megatron_lowprec.linear.layer_state import StatefulLayer, title, without_autocast
from megatron_lowprec.linear.layer_tensors import SavedForBackward, backward_gemms
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.once_differentiable import once_differentiable, refuse
from megatron_lowprec.linear.opaque import opaque_linear
from megatron_lowprec.linear.sharding.dtensors import UNFINISHED, waited
from megatron_lowprec.linear.sharding.gathered_weight import GatheredWeight
from megatron_lowprec.linear.sharding.tensor_parallel import forward_on_mesh
from megatron_lowprec.quantization.frozen_weight import FrozenWeight
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.recipe.coverage import LinearSite, check_no_phases, check_site
from megatron_lowprec.recipe.layer_match import Layer
from megatron_lowprec.recipe.parsing import RecipeLike, as_recipe
from megatron_lowprec.recipe.recipe import Recipe

_SAVED = len(SavedForBackward._fields) - 1  # tensors; the layout is apart


# without quantization autograd may differentiate dgrad and wgrad
@once_differentiable(lambda ctx: title(ctx.linear_gemms) if ctx.linear_gemms.recipe.quantized else None)
class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x, weight, bias, linear_gemms: LinearGemms, rng_step: Any, update_amax: bool
    ):
        if UNFINISHED in (type(x).__name__, type(weight).__name__, type(bias).__name__):
            x, weight, bias = waited(x), waited(weight), waited(bias)
        with without_autocast(x):
            y, saved = linear_gemms.forward(x, weight, rng_step, update_amax, bias, save_input=ctx.needs_input_grad[1])
        saved = saved if ctx.needs_input_grad[1] else saved.without_input()
        # codes may change between both passes: autograd then refuses, as for any saved tensor
        codes = weight.stored if isinstance(weight, FrozenWeight) else ()
        ctx.save_for_backward(*saved.tensors(), *codes)
        ctx.linear_gemms, ctx.rng_step, ctx.update_amax, ctx.layout = linear_gemms, rng_step, update_amax, saved.layout
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        saved, linear_gemms = SavedForBackward(*ctx.saved_tensors[:_SAVED], layout=ctx.layout), ctx.linear_gemms
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        if type(dy).__name__ == UNFINISHED:
            dy = waited(dy)
        with without_autocast(dy):
            gemms = backward_gemms(needs_x, needs_w)
            dy = linear_gemms.grad_output(dy, ctx.rng_step, bias=needs_b, update_amax=ctx.update_amax, gemms=gemms)
            dx = linear_gemms.dgrad(dy, saved.weight, ctx.rng_step, saved.weight_amax) if needs_x else None
            dw = linear_gemms.wgrad(dy, saved.input(), ctx.rng_step, input_amax=saved.input_amax) if needs_w else None
        return dx, dw, dy.bias, None, None, None


# ``Function.apply`` without its checks of torch.func, which ``forward_local`` has refused
_apply = super(torch.autograd.Function, _LinearFunction).apply


class LowPrecLayer(StatefulLayer):
    """Base of a linear layer whose three GEMMs follow a recipe.

    A subclass has ``weight`` and ``bias``.

    Attributes:
        gathers_fp8: set by ``enable_fp8_all_gather``.
        holds_codes: whether codes stand for the weight, as ``quantize_frozen_weights`` makes them.
    """

    gathers_fp8 = holds_codes = _opaque = False

    bias: nn.Parameter | None

    @property
    def weight_OI(self) -> torch.Tensor:  # noqa: N802 - a shape suffix
        """The weight [O, I], differentiable; a view of the parameter."""
        return self.weight

    @property
    def opaque(self) -> bool:
        """Whether torch.compile sees one operator that hides the layer, for debugging; False unless it is set.

        Raises:
            UserError: set for a recipe with random draws or delayed scales.
        """
        return self._opaque

    @opaque.setter
    def opaque(self, opaque: bool) -> None:
        if opaque and self.group is not None:
            raise UserError(
                f"opaque was asked of {title(self.linear_gemms)}, which has random draws or delayed scales that one "
                "operator cannot hold: leave it out"
            )
        self._opaque = opaque

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight_OI.T + bias``; x [..., I] in the dtype of the weight, or any under autocast.

        Raises:
            UserError: dtypes differ, the layer was converted before ``init_process_group`` and draws, or its weight
                was not gathered as ``enable_fp8_all_gather`` asks; as ``tensor_parallel.forward_on_mesh`` for DTensors.
        """
        stored = self._parameters.get("weight")  # a parametrization would compute the attribute here, and again below
        if "DTensor" in (type(stored).__name__, type(x).__name__):  # as ``is_dtensor``, without its calls
            y: torch.Tensor = forward_on_mesh(self, x)
            return y
        return self.forward_local(x, self.weight_OI, self.bias)

    def forward_local(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``forward`` of plain tensors: of the whole layer, or of this rank's shard."""
        kind = x.device.type
        if kind == "meta":  # shapes without numbers, which autocast does not know
            return nn.functional.linear(x, weight, bias)
        if self.gathers_fp8:
            self._check_gathered(weight, kind)
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if x.dtype != weight.dtype:
            self.check_dtypes(x, weight.dtype)
        if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
            self.refuse_features(x, weight.shape[-1])
        if torch._C._are_functorch_transforms_active():  # a compiled jvp would be 0
            refuse(title(self.linear_gemms), "torch.func")
        flat = x.reshape(-1, x.shape[-1])
        if not torch.compiler.is_compiling():
            y = _run(self, flat, weight, bias)
        elif self.gathers_fp8:
            y = _run_outside_graph(self, flat, weight, bias)
        elif not self._opaque and not _data_decide(flat.shape[0]):
            grad = torch.is_grad_enabled()
            y = _traced(flat, weight, bias, self.recipe_key, self.identity, grad, self.training and grad)
        elif self.group is None:
            y = opaque_linear(flat, [weight], bias, self.recipe_key)
        else:
            y = _run_with_state(self, flat, weight, bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _check_gathered(self, weight: torch.Tensor, kind: str) -> None:
        name = self.linear_gemms.linear_id.name
        if not isinstance(weight, (Fp8Weight, GatheredWeight)):
            raise UserError(
                f"the weight of {name} was not gathered as FP8 codes: the model was moved or its parameters replaced "
                f"after enable_fp8_all_gather; call that last"
            )
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != weight.dtype:
            raise UserError(
                f"autocast would convert the FP8 weight of {name} to {torch.get_autocast_dtype(kind)} and quantize it "
                f"again: set MixedPrecisionPolicy(param_dtype=...) in place of torch.autocast"
            )

    def extra_repr(self) -> str:
        """Sizes, as the replaced layer's, and the recipe."""
        return f"{super().extra_repr()}, recipe={self.linear_gemms.recipe.name}"


def _run(layer: LowPrecLayer, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y_TO of x_TI and the weight [O, I], with draws and amax histories."""
    layer.histories.to(x.device)  # a wrapper may have moved the weight without a call of the layer
    linear_gemms = layer.begin_pass()
    # a pass in training without gradients is recorded by its recomputation
    update_amax = layer.training and torch.is_grad_enabled()
    arguments = x, weight, bias, linear_gemms, layer.rng_step, update_amax
    with torch.cuda.device_of(x):  # Triton launches on the current device; in the backward pass autograd sets it
        return _apply(*arguments)


_run_outside_graph = torch.compiler.disable(_run, reason="FSDP2 gathers the codes of a weight outside the graph")
_run_with_state = torch.compiler.disable(
    _run,
    reason="data decide whether a layer with random draws or delayed scales gets tokens: promise them by "
    "torch._check(x.shape[0] > 1) before it, or leave fullgraph=True out",
)


def _data_decide(tokens: Any) -> bool:
    """Whether no guard tells the number of tokens from 0 and 1, of which ``_traced`` makes graphs of their own."""
    return guard_or_true(tokens > 1) != guard_or_false(tokens > 1)


@torch.compiler.allow_in_graph
def _traced(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    key: int,
    identity: torch.Tensor | None,
    grad: bool,
    update_amax: bool,
) -> torch.Tensor:
    """``_run`` as the compiler traces it; ``key`` of ``recipe_key``, ``identity`` and ``grad`` of ``traced_pass``."""
    linear_gemms = traced_gemms(key, weight.device, weight.dtype, tuple(weight.shape))
    at = traced_pass(identity, grad)
    if x.shape[0] == 0:  # a graph of its own, with empty or zero results
        if update_amax and at is not None:
            record_weight(identity, at, weight.detach())
        return nn.functional.linear(x, weight, bias)
    y: torch.Tensor = _LinearFunction.apply(x, weight, bias, linear_gemms, at, update_amax)
    return y


class LowPrecLinear(LowPrecLayer, nn.Linear):  # type: ignore[misc]  # torch does not declare a missing bias
    """``torch.nn.Linear`` whose three GEMMs follow a recipe, for use outside Megatron.

    Random draws follow ``seed``, ``layer``, ``name`` and the number of the forward pass in training. They do not touch
    torch's generators. ``torch.utils.checkpoint``, reentrant or not, recomputes with the bits of the first pass.

    Delayed scales are updated after each step of a ``torch.optim.Optimizer`` that holds a parameter of the layer, for a
    frozen layer of any, or by ``end_step``. Call it if weights are updated otherwise. Only passes in training are
    recorded: in mode ``training`` and not under ``torch.no_grad``. In evaluation without recorded amaxes, and where the
    weight changed without a step, scales are current, with a warning.

    The ``state_dict`` is ``torch.nn.Linear``'s plus amax histories and the number of passes, where a recipe has them. A
    layer built here serves one process; ``megatron_lowprec.convert`` also serves data-parallel ranks.

    Args:
        in_features, out_features, bias, device, dtype: as ``torch.nn.Linear``.
        recipe: a Recipe, the name of one, or a YAML file. Its rules choose what the layer runs. Its fields of
            optimizer, gradients, activations and FP8 weights are the caller's to follow.
        seed: seed of the random draws.
        layer, name: number and name of the layer for rules (``layers.<layer>.<name>``), counted from 1. Both
            enter the key of its draws: give each layer of a model a different ``layer`` or ``name``.
        num_layers: number of the model's layers, required by rules that count from the last one.

    Raises:
        UserError: unknown recipe, or one with phases; sizes that its blocks do not divide; no ``num_layers`` for such a
            rule.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: RecipeLike = "bf16",
        seed: int = 0,
        layer: int = 1,
        name: str = "linear",
        num_layers: int | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        recipe, place = as_recipe(recipe), Layer(layer, name, num_layers)
        _check_place(recipe, place)
        check_site(recipe.at(place), LinearSite(layer, name, in_features, out_features, "column"), 1)
        self.bind(recipe, place, seed)


class LowPrecConv1D(LowPrecLayer):
    """``transformers.pytorch_utils.Conv1D`` under a recipe: a linear layer that stores its weight as [I, O].

    ``megatron_lowprec.convert`` makes it. ``nx`` and ``nf`` are the input and output features.
    """

    nx: int
    nf: int

    @property
    def weight_OI(self) -> torch.Tensor:  # noqa: N802 - a shape suffix
        """The transposed parameter, a view."""
        return self.weight.t()

    def extra_repr(self) -> str:
        """Sizes and recipe."""
        return f"nf={self.nf}, nx={self.nx}, recipe={self.linear_gemms.recipe.name}"


def end_step(model: nn.Module) -> None:
    """Update the delayed scales of all layers in ``model``; required without a ``torch.optim.Optimizer``.

    Collective for a converted model on several ranks.
    """
    layers = [module for module in model.modules() if isinstance(module, StatefulLayer)]
    for group in dict.fromkeys(layer.group for layer in layers if layer.group is not None):
        group.end_step()


def _check_place(recipe: Recipe, layer: Layer) -> None:
    """Check that the recipe answers for the layer without a run.

    Raises:
        UserError: ``num_layers`` is smaller than ``layer``, or missing with a rule that counts from the last layer; the
            recipe has phases.
    """
    check_no_phases(recipe, "LowPrecLinear")
    if layer.num_layers is None and any(rule.counts_from_end for rule in recipe.all_rules):
        raise UserError(
            f"recipe {recipe.name} has a rule that counts layers from the last one: pass num_layers=..., the number of "
            f"the model's layers, to LowPrecLinear"
        )
    if layer.num_layers is not None and layer.number > layer.num_layers:
        raise UserError(
            f"LowPrecLinear has layer={layer.number} of num_layers={layer.num_layers}; layers are numbered from 1"
        )
