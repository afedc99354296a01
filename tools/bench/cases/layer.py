"""One linear layer without bias, forward and backward, in plain torch and under a recipe.

The only place in this tool that calls ``LinearGemms``. All weight gradients go into an fp32 ``main_grad``,
as in Megatron's layers: a step's first microbatch writes it, later ones (with cached weights) add to it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_lowprec.linear.layer_tensors import InputLayout, SavedForBackward
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.coverage import cached_weights
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.recipe.schema import HistorySpec
from tools.bench.measure import distance, errors_as_faults
from tools.bench.shapes import LinearShape


@dataclass(frozen=True)
class Tensors:
    """bf16 inputs of one layer, and the fp32 [out, in] buffer of its weight gradients."""

    x: torch.Tensor
    weight: torch.Tensor
    dy: torch.Tensor
    main_grad: torch.Tensor


def tensors(shape: LinearShape, tokens: int, device: torch.device, generator: torch.Generator) -> Tensors:
    """Random inputs of the magnitudes of training: activations about 1, weights and gradients small."""

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator, device=device) * scale).to(torch.bfloat16)

    x, weight = normal(tokens, shape.in_features, 1.0), normal(shape.out_features, shape.in_features, 0.02)
    dy = normal(tokens, shape.out_features, 1e-3)
    return Tensors(x.requires_grad_(), weight.requires_grad_(), dy, torch.zeros_like(weight, dtype=torch.float32))


def unquantized(x: torch.Tensor, weight: torch.Tensor) -> SavedForBackward:
    """x and the weight themselves, saved for backward."""
    return SavedForBackward(weight, x, None, None, None, None, InputLayout(x.shape))


class RecipeGemms:
    """The three GEMMs under a recipe, through ``LinearGemms`` as in ``mcore.parallel_linear``.

    Each ``forward`` begins a training step, so that no cached operand is used; ``begin_step`` does the same before a
    backward timed alone. With ``cached``, it begins a later microbatch of one step, which uses cached weights.
    """

    def __init__(self, recipe: str, device: torch.device, seed: int = 1234, cached: bool = False) -> None:
        histories: dict[HistorySpec, AmaxHistory] = {}

        def history_of(remembered: HistorySpec) -> AmaxHistory:
            return histories.setdefault(remembered, AmaxHistory(remembered, device))

        place = LinearId(1, "bench")
        self.linear_gemms = LinearGemms(get_recipe(recipe), place, seed, history_of, cache_weights=True)
        self.rng_step, self.cached = RngStep(0, 0), cached

    def begin_step(self) -> None:
        """Advance to other random numbers."""
        # modulo 8: a training step writes its counter to the device once, for all layers
        self.rng_step = RngStep((self.rng_step.step + 1) % 8, 0)
        self.linear_gemms.main_grad_is_zero = not self.cached
        if not self.cached:
            self.linear_gemms.weight_cache.clear()

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, SavedForBackward]:
        """y_TO, and the tensors saved for backward."""
        self.begin_step()
        return self.linear_gemms.forward(x, weight, self.rng_step, save_input=True)

    def backward(self, dy: torch.Tensor, saved: SavedForBackward, main_grad: torch.Tensor) -> torch.Tensor:
        """dx_TI; adds the weight gradient to ``main_grad``, or writes it in the first microbatch of a step."""
        grad = self.linear_gemms.grad_output(dy, self.rng_step)
        dx = self.linear_gemms.dgrad(grad, saved.weight, self.rng_step, saved.weight_amax)
        amax = saved.input_amax
        self.linear_gemms.wgrad(grad, saved.input(), self.rng_step, accumulate_into=main_grad, input_amax=amax)
        return dx


def keeps_weights(recipe: str) -> bool:
    """Whether any quantized weight is the same for all microbatches of a step, so that it can be cached."""
    return bool(cached_weights(get_recipe(recipe)))


class TorchGemms:
    """Three bf16 GEMMs, the third with fp32 output: the minimum work of a layer."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, SavedForBackward]:
        """y_TO"""
        return torch.mm(x, weight.t()), unquantized(x, weight)

    def backward(self, dy: torch.Tensor, saved: SavedForBackward, main_grad: torch.Tensor) -> torch.Tensor:
        """dx_TI"""
        dx, x = torch.mm(dy, saved.weight), saved.input()
        assert isinstance(x, torch.Tensor)
        if dy.is_cuda:
            torch.mm(dy.t(), x, out_dtype=torch.float32, out=main_grad)
        else:
            torch.mm(dy.t().float(), x.float(), out=main_grad)
        return dx


Gemms = RecipeGemms | TorchGemms


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, gemms: Gemms, main_grad: torch.Tensor) -> torch.Tensor:
        y, saved = gemms.forward(x, weight)
        ctx.save_for_backward(*saved.tensors())
        ctx.gemms, ctx.main_grad, ctx.layout = gemms, main_grad, saved.layout
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = SavedForBackward._make((*ctx.saved_tensors, ctx.layout))
        # A dummy weight gradient, which Megatron's data parallelism expects.
        return ctx.gemms.backward(dy, saved, ctx.main_grad), torch.empty_like(saved.weight), None, None


def through_autograd(gemms: Gemms) -> Callable[[Tensors], None]:
    """Forward and backward with autograd around the GEMMs."""

    def call(t: Tensors) -> None:
        t.x.grad = t.weight.grad = None
        _Function.apply(t.x, t.weight, gemms, t.main_grad).backward(t.dy)

    return call


def plain_torch(t: Tensors) -> None:
    """``torch.nn.functional.linear``, its bf16 weight gradient copied to ``main_grad`` afterwards."""
    t.x.grad = t.weight.grad = None
    torch.nn.functional.linear(t.x, t.weight).backward(t.dy)
    t.main_grad.copy_(_grad(t.weight))


def _grad(weight: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None
    return weight.grad


@torch.no_grad()
def _both_passes(gemms: Gemms, t: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y_TO, dx_TI and the weight gradient."""
    y, saved = gemms.forward(t.x, t.weight)
    dx = gemms.backward(t.dy, saved, t.main_grad)
    return y, dx, t.main_grad


def without_autograd(gemms: Gemms) -> Callable[[Tensors], object]:
    """Only the GEMMs, for a CUDA graph of the kernels."""
    return partial(_both_passes, gemms)


@errors_as_faults
def fault(recipe: str, device: torch.device, generator: torch.Generator) -> str | None:
    """Difference of the GEMMs on this device from the reference on the CPU; None within bf16 rounding.

    The operands have the same bits on both; only the order of sums and the rounding of the result may differ.
    """
    shape, cpu = LinearShape("check", "check", 256, 128), torch.device("cpu")
    there = tensors(shape, 333, device, generator)
    here = Tensors(*(tensor.detach().cpu().clone() for tensor in (there.x, there.weight, there.dy, there.main_grad)))
    found, expected = (_both_passes(RecipeGemms(recipe, where), t) for where, t in ((device, there), (cpu, here)))
    for name, ours, theirs in zip(("fprop", "dgrad", "wgrad"), found, expected, strict=True):
        if not (error := distance(ours, theirs)) < 4e-3:
            return f"{name} differs from the reference by {error:.1e}"
    return None
