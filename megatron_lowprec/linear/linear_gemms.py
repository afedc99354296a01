"""The three GEMMs of a linear layer under a recipe. No Megatron, no collectives."""

from collections.abc import Callable
from typing import Any

import torch

from megatron_lowprec.kernels.cast_fp8.source import Fp8Cast, Source
from megatron_lowprec.kernels.dispatch import add_bias_, arch_of
from megatron_lowprec.kernels.gemm.native import ScaledOperand, scaled_product
from megatron_lowprec.kernels.gemm.reference import Operand, contract
from megatron_lowprec.kernels.quantize.reference import tile_amax
from megatron_lowprec.linear.gemms import SIDES, Gemm, LinearId
from megatron_lowprec.linear.operands import AnyOperand, CastFusion, GradOutput, Input, Kept, matrix_of
from megatron_lowprec.linear.weight_cache import QuantizedWeightCache
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.error_stats import error_stats
from megatron_lowprec.quantization.native import amax_for_gemms, cast_for_gemms
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.quantizer import (
    Reduce,
    delayed_encode_scale,
    quantize_both_ways,
    quantize_by_reference,
    quantize_for_gemm,
)
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import tile_sizes
from megatron_lowprec.quantization.transform import Transforms
from megatron_lowprec.recipe.coverage import weight_serves_microbatches
from megatron_lowprec.recipe.native_support import native_gemms
from megatron_lowprec.recipe.schema import HistorySpec, QuantSpec, Recipe


class LinearGemms:
    """fprop, dgrad and wgrad of one linear layer under a recipe.

    Its state are slots in amax histories; what else it keeps (signs of a moment, quantized weights of a step) only
    saves work. A call is a pure function of its arguments, the moment and the histories.

    Args:
        recipe: what to do.
        place: which layer this is.
        seed: the run's seed.
        history_of: what is remembered -> the history that tensors of that kind share; asked once per delayed operand.
        reduce_amax: maximum over the ranks that share ``place.split``; None without such ranks.
        cache_weights: keep a quantized weight, where it is the same for all microbatches of a step, until
            ``forget_weights``; costs a copy of the weight for each such GEMM.
        stores_histories_of: where this layer is left in bf16 under another recipe, that one. Its histories are kept,
            empty: a checkpoint stacks the layers of a model, which must therefore store alike.
        emulate: multiply in the compute dtype also where the device has FP8 products.

    Attributes:
        main_grad_is_zero: a promise to the next ``wgrad`` that it may overwrite what it accumulates into; it takes it
            back. Whoever sets the gradients to zero makes it.
        weight_cache: of this step; empty without ``cache_weights``.
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
        self._native_on: tuple[torch.device, torch.dtype] | None = None
        self._native: frozenset[str] = frozenset()
        self._gemms = {name: Gemm.of(name, gemm) for name, gemm in recipe.gemms.items()}
        self._rounding = place.rounding_streams(seed)
        hadamard = {name: gemm.hadamard for name, gemm in recipe.gemms.items()}
        self._transforms = Transforms(hadamard, place.sign_streams(seed))
        self._reduce_amax = reduce_amax
        self.histories: dict[str, tuple[AmaxHistory, int]] = {}
        for operand, remembered in (stores_histories_of or recipe).delayed_operands().items():
            history = history_of(remembered)
            self.histories[operand] = (history, history.add_tensor())

    def supported_fusion(self, tensor: str, matrix: torch.Tensor) -> CastFusion:
        """How whoever makes "input" or "grad_output" of the size and dtype of ``matrix`` spares its casts a pass.

        "source" where the scale is known and one cast gives both operands, so that it may compute what it casts;
        "amax" where the amax of the tensor is the first thing that is asked; else None.
        """
        by_row, by_column = SIDES[tensor]
        spec = getattr(getattr(self.recipe, by_row), tensor)
        if not {by_row, by_column} <= self._native_gemms(matrix) or spec.tile != "tensor":
            return None
        if spec != getattr(getattr(self.recipe, by_column), tensor):
            return None
        return "source" if spec.scaling == "delayed" else "amax"

    def accepts_split_input(self, matrix: torch.Tensor) -> bool:
        """Whether dy of the size and dtype of ``matrix`` may be a ``Source`` that lies in memory in parts."""
        spec = self.recipe.dgrad.grad_output
        native = {"dgrad", "wgrad"} <= self._native_gemms(matrix)
        return native and spec is not None and spec == self.recipe.wgrad.grad_output and spec.tile != "row"

    def fprop(
        self, x_TI: torch.Tensor, w_OI: torch.Tensor, rng_step: RngStep, update_amax: bool = True
    ) -> torch.Tensor:
        """``y_TO = x_TI @ w_OI.T`` in the dtype of x; ``update_amax=False`` keeps an evaluation out of amax histories."""
        return self.forward(x_TI, w_OI, rng_step, update_amax)[0]

    def forward(
        self,
        x_TI: torch.Tensor | Source | Input,
        w_OI: torch.Tensor,
        rng_step: RngStep,
        update_amax: bool = True,
        bias_O: torch.Tensor | None = None,
        keep: bool = False,
        amax: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Kept]:
        """``fprop`` plus a bias, and what it made that the backward pass would make again.

        A native product adds the bias before it rounds to bf16; others round twice, as Megatron-core's layers do.

        Args:
            x_TI: a computed one only where ``supported_fusion`` says so.
            keep: make wgrad's operand of x now, from the same read, where both products are native; one that
                ``input`` has made is kept anyway.
            amax: fp32 [1] of this rank's part of x, where whoever made it knows it.
        """
        self.choose_products(w_OI)
        native = self._native_gemms(x_TI)
        x: AnyOperand | None
        x_kept = None
        if isinstance(x_TI, Input):
            x, x_kept = x_TI.rows, x_TI.columns
        elif "fprop" in native:
            both = keep and "wgrad" in native and self.recipe.fprop.input == self.recipe.wgrad.input
            x, x_kept = self._cast("input", x_TI, rows=True, columns=both, update_amax=update_amax, part_amax=amax)[:2]
            assert x is not None
        else:
            x = self._quantized("fprop", "input", matrix_of(x_TI), rng_step, update_amax)
        weight_amax = self._weight_amax(w_OI) if keep and "fprop" in native else None
        w = self._weight("fprop", w_OI, native, rng_step, update_amax, weight_amax)
        y = self._product("fprop", x, w, matrix_of(x_TI, made=True).dtype, bias=bias_O)
        return y, Kept(x_kept, weight_amax)

    def input(self, x_TI: Source) -> Input:
        """x for ``forward``, as operands for fprop and wgrad; only where ``supported_fusion`` is "source"."""
        rows, columns, _ = self._cast("input", x_TI, rows=True, columns=True)
        assert rows is not None
        assert columns is not None
        return Input(x_TI.x, rows, columns)

    def grad_output(
        self, dy_TO: torch.Tensor | Source, rng_step: RngStep, bias: bool = False, amax: torch.Tensor | None = None
    ) -> GradOutput:
        """dy for ``dgrad`` and ``wgrad``, quantized for both from one read where their specs and a kernel allow it.

        Args:
            dy_TO: computed only where ``supported_fusion`` is "source", in parts where ``accepts_split_input``.
            bias: also give the gradient of a bias, the sum over tokens.
            amax: fp32 [1] of this rank's part of dy, where whoever made it knows it.
        """
        dgrad, wgrad = self.recipe.dgrad, self.recipe.wgrad
        spec, native = dgrad.grad_output, self._native_gemms(dy_TO)
        operands: dict[str, AnyOperand] = {}
        sums = None
        if {"dgrad", "wgrad"} & native:
            rows, columns = (
                "dgrad" in native,
                "wgrad" in native and (spec == wgrad.grad_output or "dgrad" not in native),
            )
            made = self._cast("grad_output", dy_TO, rows=rows, columns=columns, sums=bias, part_amax=amax)
            by_row, by_column, sums = made
            operands = {name: o for name, o in (("dgrad", by_row), ("wgrad", by_column)) if o is not None}
        elif spec is not None and spec == wgrad.grad_output:
            both = quantize_both_ways(
                matrix_of(dy_TO),
                spec,
                (self._rounding["dgrad", "grad_output"], self._rounding["wgrad", "grad_output"]),
                (self._transforms.at("dgrad", rng_step), self._transforms.at("wgrad", rng_step)),
                rng_step,
            )
            if both is not None:
                operands = {"dgrad": Operand(both[0]), "wgrad": Operand(both[1])}
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
        """``dx_TI = dy_TO @ w_OI`` in the dtype of dy; ``weight_amax`` as ``forward`` kept it."""
        dy = dy if isinstance(dy, GradOutput) else GradOutput(dy, {})
        left = dy.operands.get("dgrad") or self._operand("dgrad", "grad_output", dy.matrix, rng_step)
        w = self._weight("dgrad", w_OI, self._native_gemms(dy.matrix), rng_step, amax=weight_amax)
        return self._product("dgrad", left, w, dy.matrix.dtype)

    def wgrad(
        self,
        dy: torch.Tensor | GradOutput,
        x: torch.Tensor | ScaledOperand | Source,
        rng_step: RngStep,
        accumulate_into: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``dw_OI = dy_TO.T @ x_TI`` in the dtype of dy, or added in fp32 to ``accumulate_into``, which is returned.

        Args:
            x: x_TI, or the operand of it that ``forward`` kept; a computed one only where ``supported_fusion`` says so.
            amax: as ``forward`` had it.
        """
        dy = dy if isinstance(dy, GradOutput) else GradOutput(dy, {})
        if not isinstance(x, ScaledOperand) and "wgrad" in self._native_gemms(x):
            unseen = self.recipe.fprop.input != self.recipe.wgrad.input  # else fprop has observed its amax
            made = self._cast("input", x, rows=False, columns=True, update_amax=unseen, part_amax=amax).columns
            assert made is not None
            x = made
        left = dy.operands.get("wgrad") or self._operand("wgrad", "grad_output", dy.matrix.t(), rng_step)
        right = x if isinstance(x, ScaledOperand) else self._quantized("wgrad", "input", matrix_of(x).t(), rng_step)
        return self._product("wgrad", left, right, dy.matrix.dtype, accumulate_into)

    def load_histories(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Take ``{prefix}amax.<operand>`` out of a state dict, where they are, into the amax histories."""
        for operand, (history, slot) in self.histories.items():
            state = state_dict.pop(f"{prefix}amax.{operand}", None)
            if state is not None:
                history.load_state(slot, state)

    def forget_weights(self) -> None:
        """The weight has changed."""
        self.weight_cache.forget()

    def choose_products(self, w_OI: torch.Tensor) -> None:
        """Find out, once for a device and dtype, which GEMMs run on FP8 units."""
        key = (w_OI.device, w_OI.dtype)
        if self._native_on != key:
            self._native_on, self._native = key, frozenset()
            if w_OI.dtype == torch.bfloat16 and not self._emulate:
                self._native = native_gemms(self.recipe, arch_of(w_OI.device), w_OI.shape[1], w_OI.shape[0])

    def _native_gemms(self, tokens: torch.Tensor | Source | Input) -> frozenset[str]:
        """The GEMMs that run on FP8 units; an expert without tokens multiplies nothing."""
        return self._native if tokens.shape[0] else frozenset()

    def _cast(
        self,
        tensor: str,
        matrix: torch.Tensor | Source,
        *,
        rows: bool,
        columns: bool,
        update_amax: bool = True,
        amax: torch.Tensor | None = None,
        part_amax: torch.Tensor | None = None,
        sums: bool = False,
    ) -> Fp8Cast:
        """FP8 operands of x, w or dy for the GEMMs that contract its rows and its columns.

        Args:
            amax, part_amax: of a current scale, over all ranks that share it or over this rank's part.
        """
        by_row, by_column = SIDES[tensor]
        spec: QuantSpec = getattr(getattr(self.recipe, by_row if rows else by_column), tensor)
        observed = None
        if spec.scaling == "delayed":
            history, slot = self.histories[tensor]
            amax, newest = history.cells(slot)
            observed = newest if update_amax else None
        reduce = [
            self._reduce_amax if self.place.shares_scale(gemm, tensor, spec) else None for gemm in (by_row, by_column)
        ]
        if part_amax is not None and amax is None:
            over_ranks = reduce[0] or reduce[1]
            amax = part_amax if over_ranks is None else over_ranks(part_amax)
        return cast_for_gemms(
            matrix,
            spec,
            rows=rows,
            columns=columns,
            amax=amax,
            observed=observed,
            reduce_rows=reduce[0],
            reduce_columns=reduce[1],
            sums=sums,
        )

    def _weight_amax(self, w_OI: torch.Tensor) -> torch.Tensor | None:
        """fp32 [1] over the ranks that hold parts, where fprop and dgrad each make an operand by one current scale."""
        spec = self.recipe.fprop.weight
        if spec is None or spec != self.recipe.dgrad.weight or (spec.tile, spec.scaling) != ("tensor", "current"):
            return None
        if self.weight_cache.keeps("fprop") or isinstance(w_OI, Fp8Weight):
            return None
        amax = amax_for_gemms(w_OI)
        return amax if self._reduce_amax is None else self._reduce_amax(amax)

    def _weight(
        self,
        gemm: str,
        w_OI: torch.Tensor,
        native: frozenset[str],
        rng_step: RngStep,
        update_amax: bool = True,
        amax: torch.Tensor | None = None,
    ) -> AnyOperand:
        """The weight's operand: FP8 itself, kept from an earlier microbatch, or made now."""
        if isinstance(w_OI, Fp8Weight):
            return self._primary_weight(gemm, w_OI, gemm in native, update_amax)
        # also where nothing is observed: the first pass of an activation recomputation
        kept = self.weight_cache.find(gemm, gemm in native)
        if kept is not None:
            return kept
        keeps = update_amax and self.weight_cache.keeps(gemm)
        made: dict[str, AnyOperand]
        if gemm in native:
            both = keeps and {"fprop", "dgrad"} <= native and self.recipe.fprop.weight == self.recipe.dgrad.weight
            rows, columns = both or gemm == "fprop", both or gemm == "dgrad"
            by_row, by_column, _ = self._cast(
                "weight", w_OI, rows=rows, columns=columns, update_amax=update_amax, amax=amax
            )
            made = {name: o for name, o in (("fprop", by_row), ("dgrad", by_column)) if o is not None}
        else:
            matrix = w_OI if gemm == "fprop" else w_OI.t()
            made = {gemm: self._quantized(gemm, "weight", matrix, rng_step, update_amax)}
        if keeps:
            self.weight_cache.keep(made)
        return made[gemm]

    def _primary_weight(self, gemm: str, w_OI: Fp8Weight, native: bool, update_amax: bool) -> AnyOperand:
        """The operand that the codes are already; a native dgrad reads a copy of them that is made once a step."""
        if update_amax and w_OI.spec.scaling == "delayed":
            history, slot = self.histories["weight"]
            history.update_amax(slot, w_OI.main_amax)
        transposed = gemm == "dgrad"
        if not native:
            return w_OI.operand(transposed)
        if not transposed or not (update_amax and self.weight_cache.keeps(gemm)):
            return w_OI.scaled_operand(transposed)
        kept = self.weight_cache.find(gemm, native)
        if kept is None:
            kept = w_OI.scaled_operand(transposed)
            self.weight_cache.keep({gemm: kept})
        return kept

    def _operand(
        self, gemm: str, operand: str, matrix: torch.Tensor, rng_step: RngStep, update_amax: bool = True
    ) -> AnyOperand:
        """An operand of [R, K], contracted dimension last, as a native or an emulated product takes it."""
        if gemm not in self._native or matrix.numel() == 0:
            return self._quantized(gemm, operand, matrix, rng_step, update_amax)
        by_row = SIDES[operand][0] == gemm
        source = matrix if by_row else matrix.t()
        by_rows, by_columns, _ = self._cast(operand, source, rows=by_row, columns=not by_row, update_amax=update_amax)
        made = by_rows if by_row else by_columns
        assert made is not None
        return made

    def _product(
        self,
        name: str,
        left: AnyOperand,
        right: AnyOperand,
        out_dtype: torch.dtype,
        accumulate_into: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        gemm = self._gemms[name]
        overwrite = accumulate_into is not None and self.main_grad_is_zero
        if overwrite:
            self.main_grad_is_zero = False
        if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
            return scaled_product(
                left,
                right,
                out_dtype=out_dtype,
                fast_accumulation=gemm.fast_accumulation,
                bias=bias,
                accumulate_into=accumulate_into,
                overwrite=overwrite,
            )
        assert isinstance(left, Operand)
        assert isinstance(right, Operand)
        y = contract(
            left,
            right,
            alpha=gemm.alpha,
            out_dtype=out_dtype,
            accumulate_into=accumulate_into,
            overwrite=overwrite,
        )
        return y if bias is None else add_bias_(y, bias)

    def _quantized(
        self, gemm: str, operand: str, matrix: torch.Tensor, rng_step: RngStep, update_amax: bool = True
    ) -> Operand:
        """``_operand`` of an emulated product."""
        spec, transform = self._gemms[gemm].specs[operand], self._transforms.at(gemm, rng_step)
        if spec is None or matrix.numel() == 0:  # an expert may get no tokens
            return Operand(matrix if transform is None else transform.apply(matrix).to(matrix.dtype))
        if spec.scaling == "delayed" and update_amax:
            history, slot = self.histories[operand]
            history.update_amax(slot, tile_amax(matrix, tile_sizes(spec, matrix)))
        elements, scale = quantize_for_gemm(matrix, spec, **self._how(gemm, operand, spec, rng_step))
        return Operand(elements, scale, tile_sizes(spec, matrix))

    def error_stats(self, gemm: str, operand: str, matrix: torch.Tensor, rng_step: RngStep) -> torch.Tensor:
        """``quantization.fidelity.error_stats`` of an operand as a call at this moment makes it of ``matrix``.

        Nothing is observed, kept or drawn that a call would not draw. Ranks that share its scale must all ask.

        Args:
            matrix: [R, K], contracted dimension last, not empty; of an operand that the recipe quantizes.
        """
        spec: QuantSpec = getattr(getattr(self.recipe, gemm), operand)
        return error_stats(*quantize_by_reference(matrix, spec, **self._how(gemm, operand, spec, rng_step)))

    def _how(self, gemm: str, operand: str, spec: QuantSpec, rng_step: RngStep) -> dict[str, Any]:
        """What quantizing an operand takes beside the matrix and the spec."""
        delayed = spec.scaling == "delayed"
        history, slot = self.histories[operand] if delayed else (None, 0)
        return {
            "random": self._rounding[gemm, operand],
            "rng_step": rng_step,
            "transform": self._transforms.at(gemm, rng_step),
            "encode_scale": None if history is None else delayed_encode_scale(history.in_effect[slot], spec),
            "reduce_amax": self._reduce_amax if self.place.shares_scale(gemm, operand, spec) else None,
        }
