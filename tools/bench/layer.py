"""One linear layer without bias, forward and backward, as plain torch has it and as a recipe does.

The only place in this tool that calls ``LinearNumerics``. Weight gradients are added to an fp32 ``main_grad`` in all of
them, as Megatron's layers do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_lowprec.linear import LinearNumerics, LinearPlace
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import Moment
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.recipe.schema import HistoryRule
from tools.bench.measure import errors, one_line
from tools.bench.shapes import LinearShape


@dataclass(frozen=True)
class Tensors:
    """Inputs of one layer in bf16, and the fp32 [out, in] that its weight gradients are added to."""

    x: torch.Tensor
    weight: torch.Tensor
    dy: torch.Tensor
    main_grad: torch.Tensor


def tensors(shape: LinearShape, tokens: int, device: torch.device, generator: torch.Generator) -> Tensors:
    """Random inputs of the sizes that training has: activations about 1, weights and gradients small."""

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator, device=device) * scale).to(torch.bfloat16)

    x, weight = normal(tokens, shape.in_features, 1.0), normal(shape.out_features, shape.in_features, 0.02)
    dy = normal(tokens, shape.out_features, 1e-3)
    return Tensors(x.requires_grad_(), weight.requires_grad_(), dy, torch.zeros_like(weight, dtype=torch.float32))


class Gemms(Protocol):
    """The three GEMMs of a layer."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """y_TO"""

    def backward(self, t: Tensors) -> torch.Tensor:
        """dx_TI; the weight gradient is added to ``t.main_grad``."""


class RecipeGemms:
    """Under a recipe, through ``LinearNumerics`` as in ``mcore.parallel_linear``.

    Each ``forward`` begins a training step, so that nothing kept within one is found ready made; ``begin_step`` does
    the same for a backward timed alone.
    """

    def __init__(self, recipe: str, device: torch.device, seed: int = 1234) -> None:
        histories: dict[tuple[int, HistoryRule], AmaxHistory] = {}

        def history_of(length: int, rule: HistoryRule) -> AmaxHistory:
            return histories.setdefault((length, rule), AmaxHistory(length, rule, device))

        self.numerics = LinearNumerics(get_recipe(recipe), LinearPlace(1, "bench"), seed, history_of)
        self.moment = Moment(0, 0)

    def begin_step(self) -> None:
        """On to other random numbers."""
        self.moment = Moment(self.moment.step + 1, 0)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """y_TO"""
        self.begin_step()
        return self.numerics.fprop(x, weight, self.moment)

    def backward(self, t: Tensors) -> torch.Tensor:
        """dx_TI"""
        dy = self.numerics.grad_output(t.dy, self.moment)
        dx = self.numerics.dgrad(dy, t.weight, self.moment)
        self.numerics.wgrad(dy, t.x, self.moment, accumulate_into=t.main_grad)
        return dx


class TorchGemms:
    """Three bare bf16 products, the third accumulating in fp32: the least that a layer can do."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """y_TO"""
        return torch.mm(x, weight.t())

    def backward(self, t: Tensors) -> torch.Tensor:
        """dx_TI"""
        dx = torch.mm(t.dy, t.weight)
        if t.dy.is_cuda:
            torch.addmm(t.main_grad, t.dy.t(), t.x, out_dtype=torch.float32, out=t.main_grad)
        else:
            t.main_grad.addmm_(t.dy.t().float(), t.x.float())
        return dx


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, gemms: Gemms, main_grad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gemms, ctx.main_grad = gemms, main_grad
        return gemms.forward(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # A dummy for the weight, as Megatron's data parallelism expects it.
        return ctx.gemms.backward(Tensors(x, weight, dy, ctx.main_grad)), torch.empty_like(weight), None, None


def through_autograd(gemms: Gemms) -> Callable[[Tensors], None]:
    """Forward and backward with autograd around the GEMMs."""

    def call(t: Tensors) -> None:
        t.x.grad = t.weight.grad = None
        _Function.apply(t.x, t.weight, gemms, t.main_grad).backward(t.dy)

    return call


def plain_torch(t: Tensors) -> None:
    """``torch.nn.functional.linear``, its bf16 weight gradient added to ``main_grad`` afterwards."""
    t.x.grad = t.weight.grad = None
    torch.nn.functional.linear(t.x, t.weight).backward(t.dy)
    t.main_grad.add_(_grad(t.weight))


def _grad(weight: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None
    return weight.grad


def without_autograd(gemms: Gemms) -> Callable[[Tensors], None]:
    """The GEMMs alone, for a CUDA graph of the kernels."""

    @torch.no_grad()
    def call(t: Tensors) -> None:
        gemms.forward(t.x, t.weight)
        gemms.backward(t)

    return call


def fault(recipe: str, device: torch.device, generator: torch.Generator) -> str | None:
    """How far the GEMMs on this device are from the reference's on the CPU; None within bf16's rounding.

    The operands have the same bits on both, so only the order of sums and the rounding of the result may differ.
    """
    try:
        return _distance(recipe, device, generator)
    except errors() as error:
        return one_line(error)


def _distance(recipe: str, device: torch.device, generator: torch.Generator) -> str | None:
    shape = LinearShape("check", "check", 256, 128)
    there = tensors(shape, 333, device, generator)
    here = Tensors(*(tensor.detach().cpu().clone() for tensor in (there.x, there.weight, there.dy, there.main_grad)))
    found, expected = RecipeGemms(recipe, device), RecipeGemms(recipe, torch.device("cpu"))
    with torch.no_grad():
        pairs = {
            "fprop": (found.forward(there.x, there.weight), expected.forward(here.x, here.weight)),
            "dgrad": (found.backward(there), expected.backward(here)),
            "wgrad": (there.main_grad, here.main_grad),
        }
    for name, (ours, theirs) in pairs.items():
        error = float((ours.cpu().double() - theirs.double()).norm() / theirs.double().norm())
        if not error < 4e-3:
            return f"{name} is {error:.1e} away from the reference"
    return None
