"""The three GEMMs of a linear layer under a recipe. No Megatron, no collectives."""

from collections.abc import Callable
from typing import Any

import torch

from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue
from megatron_lowprec.kernels.dispatch import arch_of
from megatron_lowprec.kernels.gemm.native import ScaledMatrix
from megatron_lowprec.linear.emulated_gemms import EmulatedGemms
from megatron_lowprec.linear.gemms import SIDES, LinearId
from megatron_lowprec.linear.layer_tensors import (
    CastFusion,
    GemmOperand,
    GradOutput,
    Input,
    SavedForBackward,
    matrix_of,
)
from megatron_lowprec.linear.native_gemms import NativeGemms
from megatron_lowprec.linear.weight_cache import QuantizedWeightCache
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.quantizer import Reduce
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.coverage import weight_serves_microbatches
from megatron_lowprec.recipe.native_support import native_gemms
from megatron_lowprec.recipe.schema import HistorySpec, Recipe


class LinearGemms:
    """fprop, dgrad and wgrad of one linear layer under a recipe.

    It decides which operands are made when, and by which of two backends. Its state are slots in amax histories; what
    else it holds (signs of a step, quantized weights of a step) only saves work. A call is a pure function of its
    arguments, the RNG step and the histories.

    Args:
        recipe: what to do.
        place: which layer this is.
        seed: the run's seed.
        history_of: spec of a history -> the history that its tensors share; called once per delayed operand.
        reduce_amax: maximum over the ranks that share ``place.split``; None without such ranks.
        cache_weights: keep a quantized weight, where it is the same for all microbatches of a step, until
            ``forget_weights``; costs a copy of the weight for each such GEMM.
        stores_histories_of: where this layer is left in bf16 under another recipe, that one. Its histories are kept,
            empty: a checkpoint stacks the layers of a model, which must therefore store alike.
        emulate: multiply in the compute dtype also where the device has FP8 products.

    Attributes:
        main_grad_is_zero: lets the next ``wgrad`` overwrite what it accumulates into; ``wgrad`` resets it.
        weight_cache: of this step; empty without ``cache_weights``.
        emulated, native: the backends.
    """

    def __init__(
        self,
        recipe: Recipe,
        place: LinearId,
        seed: int,
        history_of: Callable[[HistorySpec], AmaxHistory],
        reduce_amax: Reduce | None = None,
        cache_weights: bool = False,
        stores_histories_of: Recipe | None = None,
        emulate: bool = False,
    ) -> None:
        self.recipe, self.place = recipe, place
        self.main_grad_is_zero = False
        self._emulate = emulate
        served = [name for name, gemm in recipe.gemms.items() if weight_serves_microbatches(gemm)]
        self.weight_cache = QuantizedWeightCache(served if cache_weights else ())
        self._chosen_for: tuple[torch.device, torch.dtype] | None = None
        self._native_names: frozenset[str] = frozenset()
        self.histories: dict[str, tuple[AmaxHistory, int]] = {}
        for operand, remembered in (stores_histories_of or recipe).delayed_operands().items():
            history = history_of(remembered)
            self.histories[operand] = (history, history.add_tensor())
        self.emulated = EmulatedGemms(recipe, place, seed, self.histories, reduce_amax)
        self.native = NativeGemms(recipe, place, self.histories, reduce_amax)

    def supported_fusion(self, tensor: str, matrix: torch.Tensor) -> CastFusion:
        """How the producer of "input" or "grad_output", of the size and dtype of ``matrix``, spares its casts a pass.

        "source" where the scale is known and one cast gives both operands, so that it may compute what it casts;
        "amax" where the cast begins with the amax of the tensor; else None.
        """
        by_row, by_column = SIDES[tensor]
        spec = getattr(getattr(self.recipe, by_row), tensor)
        if not {by_row, by_column} <= self._native_for(matrix) or spec.granularity != "tensor":
            return None
        if spec != getattr(getattr(self.recipe, by_column), tensor):
            return None
        return "source" if spec.scaling == "delayed" else "amax"

    def accepts_split_input(self, matrix: torch.Tensor) -> bool:
        """Whether dy of the size and dtype of ``matrix`` may be a ``CastPrologue`` that lies in memory in parts."""
        spec = self.recipe.dgrad.grad_output
        native = {"dgrad", "wgrad"} <= self._native_for(matrix)
        return native and spec is not None and spec == self.recipe.wgrad.grad_output and spec.granularity != "row"

    def fprop(
        self, x_TI: torch.Tensor, w_OI: torch.Tensor, rng_step: RngStep, update_amax: bool = True
    ) -> torch.Tensor:
        """``y_TO = x_TI @ w_OI.T`` in x's dtype; ``update_amax=False`` keeps an evaluation out of amax histories."""
        return self.forward(x_TI, w_OI, rng_step, update_amax)[0]

    def forward(
        self,
        x_TI: torch.Tensor | CastPrologue | Input,
        w_OI: torch.Tensor,
        rng_step: RngStep,
        update_amax: bool = True,
        bias_O: torch.Tensor | None = None,
        save_input: bool = False,
        amax: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, SavedForBackward]:
        """``fprop`` plus a bias, and what it made that the backward pass would make again.

        A native product adds the bias before it rounds to bf16; others round twice, as Megatron-core's layers do.

        Args:
            x_TI: a computed one only where ``supported_fusion`` is "source".
            save_input: make wgrad's operand of x now, from the same read, where both products are native; one that
                ``input`` has made is saved anyway.
            amax: fp32 [1] of this rank's part of x, where its producer knows it.
        """
        self.choose_products(w_OI)
        native = self._native_for(x_TI)
        x: GemmOperand | None
        saved_input = None
        if isinstance(x_TI, Input):
            x, saved_input = x_TI.rows, x_TI.columns
        elif "fprop" in native:
            both = save_input and "wgrad" in native and self.recipe.fprop.input == self.recipe.wgrad.input
            x, saved_input, _ = self.native.cast(
                "input", x_TI, rows=True, columns=both, update_amax=update_amax, part_amax=amax
            )
        else:
            x = self.emulated.quantize("fprop", "input", matrix_of(x_TI), rng_step, update_amax)
        weight_amax = None
        if (
            save_input
            and "fprop" in native
            and not isinstance(w_OI, Fp8Weight)
            and not self.weight_cache.keeps("fprop")
        ):
            weight_amax = self.native.weight_amax(w_OI)
        w = self._weight("fprop", w_OI, native, rng_step, update_amax, weight_amax)
        y = self._gemm("fprop", native, x, w, matrix_of(x_TI, made=True).dtype, bias=bias_O)
        return y, SavedForBackward(saved_input, weight_amax)

    def input(self, x_TI: CastPrologue) -> Input:
        """x for ``forward``, as operands for fprop and wgrad; only where ``supported_fusion`` is "source"."""
        rows, columns, _ = self.native.cast("input", x_TI, rows=True, columns=True)
        assert rows is not None
        assert columns is not None
        return Input(x_TI.x, rows, columns)

    def grad_output(
        self,
        dy_TO: torch.Tensor | CastPrologue,
        rng_step: RngStep,
        bias: bool = False,
        amax: torch.Tensor | None = None,
    ) -> GradOutput:
        """dy for ``dgrad`` and ``wgrad``, quantized for both from one read where their specs and a kernel allow it.

        Args:
            dy_TO: computed only where ``supported_fusion`` is "source", in parts where ``accepts_split_input``.
            bias: also give the gradient of a bias, the sum over tokens.
            amax: fp32 [1] of this rank's part of dy, where its producer knows it.
        """
        native = self._native_for(dy_TO)
        operands: dict[str, GemmOperand] = {}
        sums = None
        if {"dgrad", "wgrad"} & native:
            same = self.recipe.dgrad.grad_output == self.recipe.wgrad.grad_output
            rows, columns = "dgrad" in native, "wgrad" in native and (same or "dgrad" not in native)
            by_row, by_column, sums = self.native.cast(
                "grad_output", dy_TO, rows=rows, columns=columns, sums=bias, part_amax=amax
            )
            operands = {name: o for name, o in (("dgrad", by_row), ("wgrad", by_column)) if o is not None}
        else:
            operands |= self.emulated.quantize_grad_output(matrix_of(dy_TO), rng_step)
        db = None
        if bias:
            db = matrix_of(dy_TO).sum(dim=0) if sums is None else sums
        return GradOutput(matrix_of(dy_TO, made=len(operands) == 2), operands, db)

    def dgrad(
        self,
        dy: torch.Tensor | GradOutput,
        w_OI: torch.Tensor,
        rng_step: RngStep,
        weight_amax: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``dx_TI = dy_TO @ w_OI`` in the dtype of dy; ``weight_amax`` as ``forward`` returned it."""
        dy = dy if isinstance(dy, GradOutput) else GradOutput(dy, {})
        native = self._native_for(dy.matrix)
        left = dy.operands.get("dgrad") or self._quantize("dgrad", native, "grad_output", dy.matrix, rng_step)
        w = self._weight("dgrad", w_OI, native, rng_step, amax=weight_amax)
        return self._gemm("dgrad", native, left, w, dy.matrix.dtype)

    def wgrad(
        self,
        dy: torch.Tensor | GradOutput,
        x: torch.Tensor | ScaledMatrix | CastPrologue,
        rng_step: RngStep,
        accumulate_into: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``dw_OI = dy_TO.T @ x_TI`` in the dtype of dy, or added in fp32 to ``accumulate_into``, which is returned.

        Args:
            x: x_TI, or the operand of it that ``forward`` saved; a computed one only where ``supported_fusion`` is
                "source".
            amax: as ``forward`` had it.
        """
        dy = dy if isinstance(dy, GradOutput) else GradOutput(dy, {})
        native = self._native_for(dy.matrix)
        right: GemmOperand | None
        if isinstance(x, ScaledMatrix):
            right = x
        elif "wgrad" in native:
            unseen = self.recipe.fprop.input != self.recipe.wgrad.input  # else fprop has recorded its amax
            right = self.native.cast("input", x, rows=False, columns=True, update_amax=unseen, part_amax=amax).columns
        else:
            right = self.emulated.quantize("wgrad", "input", matrix_of(x).t(), rng_step)
        left = dy.operands.get("wgrad") or self._quantize("wgrad", native, "grad_output", dy.matrix.t(), rng_step)
        return self._gemm("wgrad", native, left, right, dy.matrix.dtype, accumulate_into)

    def load_histories(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Move ``{prefix}amax.<operand>`` from a state dict, as far as present, into the amax histories."""
        for operand, (history, slot) in self.histories.items():
            state = state_dict.pop(f"{prefix}amax.{operand}", None)
            if state is not None:
                history.load_state(slot, state)

    def forget_weights(self) -> None:
        """Drop cached weights, after an update."""
        self.weight_cache.forget()

    def choose_products(self, w_OI: torch.Tensor) -> None:
        """Decide, once for a device and dtype, which GEMMs run on FP8 units."""
        key = (w_OI.device, w_OI.dtype)
        if self._chosen_for != key:
            self._chosen_for, self._native_names = key, frozenset()
            if w_OI.dtype == torch.bfloat16 and not self._emulate:
                self._native_names = native_gemms(self.recipe, arch_of(w_OI.device), w_OI.shape[1], w_OI.shape[0])

    def error_stats(self, gemm: str, operand: str, matrix: torch.Tensor, rng_step: RngStep) -> torch.Tensor:
        """``EmulatedGemms.error_stats``: native operands have the same bits."""
        return self.emulated.error_stats(gemm, operand, matrix, rng_step)

    def _native_for(self, tokens: torch.Tensor | CastPrologue | Input) -> frozenset[str]:
        """The GEMMs that run on FP8 units; an expert without tokens multiplies nothing."""
        return self._native_names if tokens.shape[0] else frozenset()

    def _quantize(
        self, gemm: str, native: frozenset[str], operand: str, matrix: torch.Tensor, rng_step: RngStep
    ) -> GemmOperand:
        """An operand of [R, K], contracted dimension last."""
        if gemm in native:
            return self.native.quantize(gemm, operand, matrix)
        return self.emulated.quantize(gemm, operand, matrix, rng_step)

    def _weight(
        self,
        gemm: str,
        w_OI: torch.Tensor,
        native: frozenset[str],
        rng_step: RngStep,
        update_amax: bool = True,
        amax: torch.Tensor | None = None,
    ) -> GemmOperand:
        """The weight's operand: FP8 itself, cached by an earlier microbatch, or made now."""
        if isinstance(w_OI, Fp8Weight):
            return self._primary_weight(gemm, w_OI, gemm in native, update_amax)
        # also where no amax is updated: the first pass of an activation recomputation
        cached = self.weight_cache.find(gemm, gemm in native)
        if cached is not None:
            return cached
        keeps = update_amax and self.weight_cache.keeps(gemm)
        made: dict[str, GemmOperand]
        if gemm in native:
            both = keeps and {"fprop", "dgrad"} <= native and self.recipe.fprop.weight == self.recipe.dgrad.weight
            by_row, by_column, _ = self.native.cast(
                "weight",
                w_OI,
                rows=both or gemm == "fprop",
                columns=both or gemm == "dgrad",
                update_amax=update_amax,
                amax=amax,
            )
            made = {name: o for name, o in (("fprop", by_row), ("dgrad", by_column)) if o is not None}
        else:
            matrix = w_OI if gemm == "fprop" else w_OI.t()
            made = {gemm: self.emulated.quantize(gemm, "weight", matrix, rng_step, update_amax)}
        if keeps:
            self.weight_cache.keep(made)
        return made[gemm]

    def _primary_weight(self, gemm: str, w_OI: Fp8Weight, native: bool, update_amax: bool) -> GemmOperand:
        """The operand that the codes are already; a native dgrad reads a copy of them that is made once a step."""
        if update_amax and w_OI.spec.scaling == "delayed":
            history, slot = self.histories["weight"]
            history.update_amax(slot, w_OI.main_amax)
        transposed = gemm == "dgrad"
        if not native:
            return w_OI.operand(transposed)
        if not transposed or not (update_amax and self.weight_cache.keeps(gemm)):
            return w_OI.scaled_operand(transposed)
        cached = self.weight_cache.find(gemm, native)
        if cached is None:
            cached = w_OI.scaled_operand(transposed)
            self.weight_cache.keep({gemm: cached})
        return cached

    def _gemm(
        self,
        name: str,
        native: frozenset[str],
        left: Any,
        right: Any,
        out_dtype: torch.dtype,
        accumulate_into: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        overwrite = accumulate_into is not None and self.main_grad_is_zero
        if overwrite:
            self.main_grad_is_zero = False
        backend = self.native if name in native else self.emulated
        return backend.gemm(name, left, right, out_dtype, accumulate_into, overwrite, bias)
