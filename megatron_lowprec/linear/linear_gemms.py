"""fprop, dgrad and wgrad of a linear layer under a recipe. No Megatron, no collectives."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue
from megatron_lowprec.kernels.dispatch import arch_of
from megatron_lowprec.linear.backend import GemmBackend, check_dtype
from megatron_lowprec.linear.emulated_gemms import EmulatedGemms
from megatron_lowprec.linear.layer_tensors import CastFusion, GradOutput, SavedForBackward, in_memory, transposes
from megatron_lowprec.linear.linear_id import SIDES, LayerAmax, LinearId
from megatron_lowprec.linear.native_gemms import NativeGemms
from megatron_lowprec.linear.weight_cache import QuantizedWeightCache
from megatron_lowprec.quantization.amax_history import AmaxHistory, add_tensors
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.quantizer import Reduce
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.transform import Transforms
from megatron_lowprec.recipe.coverage import weight_serves_microbatches, with_current_scales
from megatron_lowprec.recipe.native_support import native_gemms
from megatron_lowprec.recipe.schema import HistorySpec, LinearRecipe

Gather = Callable[[QuantizedTensor], QuantizedTensor]
"""Rowwise FP8 codes of each rank's tokens -> of all tokens, in the order of the ranks."""


class LinearGemms:
    """fprop, dgrad and wgrad of one linear layer under a recipe.

    It selects the operands that each pass quantizes, and the backend of each GEMM. Its only state is its slots in amax
    histories; signs and quantized weights of a step are caches. A call is a pure function of its arguments, the RNG
    step and the histories.

    Args:
        recipe: what the layer runs.
        linear_id: the layer.
        seed: the run's seed.
        history_of: as ``add_tensors``.
        reduce_amax: maximum over the ranks that share ``linear_id.split``; None without such ranks.
        cache_weights: cache quantized weights that are equal for all microbatches of a step, until
            ``weight_cache.clear``; costs a copy of the weight for each such GEMM.
        histories: tensor -> its amax history and slot, of at least the recipe's tensors; None to make them.
        emulate: multiply in the compute dtype even if the device has FP8 GEMMs.
        emulate_accumulator: as ``EmulatedGemms``.
        gathers: the tensor, "input" or "grad_output", that ranks with parts of its tokens gather as FP8 codes;
            ``why_not_gathered`` must have no reason. None if each rank is given all tokens.
        reads: histories of another instance, to which nothing is recorded.

    Attributes:
        records: whether passes may record amaxes.
        main_grad_is_zero: lets the next ``wgrad`` overwrite ``accumulate_into``; ``wgrad`` resets it.
        weight_cache: weights of this step; empty without ``cache_weights``.
        emulated, native: the backends.
    """

    def __init__(
        self,
        recipe: LinearRecipe,
        linear_id: LinearId,
        seed: int,
        history_of: Callable[[HistorySpec], AmaxHistory],
        reduce_amax: Reduce | None = None,
        cache_weights: bool = False,
        histories: Mapping[str, tuple[AmaxHistory, int]] | None = None,
        emulate: bool = False,
        emulate_accumulator: bool = False,
        gathers: str | None = None,
        reads: Mapping[str, tuple[AmaxHistory, int]] | None = None,
    ) -> None:
        self.recipe, self.linear_id, self.gathers = recipe, linear_id, gathers
        self.main_grad_is_zero = False
        self.records, self._emulate, self._unrecorded = reads is None, emulate, dict[frozenset[str], LinearGemms]()
        fixed: dict[str, Any] = {"linear_id": linear_id, "seed": seed, "reduce_amax": reduce_amax, "emulate": emulate}
        self._with: Callable[..., LinearGemms] = partial(LinearGemms, history_of=AmaxHistory, **fixed)
        cached = [name for name, gemm in recipe.gemms.items() if weight_serves_microbatches(gemm)]
        self.weight_cache = QuantizedWeightCache(cached if cache_weights else ())
        self._chosen_for: tuple[torch.device, torch.dtype] | None = None
        self._native_names: frozenset[str] = frozenset()
        given = histories if reads is None else reads
        self.histories = add_tensors(recipe.delayed_operands(), history_of) if given is None else dict(given)
        layer_amax = LayerAmax(linear_id, self.histories, reduce_amax, records=reads is None)
        transforms = Transforms(
            {name: gemm.hadamard for name, gemm in recipe.gemms.items()}, linear_id.sign_streams(seed)
        )
        rounding = linear_id.rounding_streams(seed)
        self.emulated = EmulatedGemms(recipe, rounding, transforms, layer_amax, emulate_accumulator)
        self.native = NativeGemms(recipe, layer_amax)
        specs = {name: [getattr(recipe.gemms[gemm], name) for gemm in gemms] for name, gemms in SIDES.items()}
        self._specs = {name: by_row for name, (by_row, _) in specs.items()}
        self._one_spec = {name: by_row == by_column for name, (by_row, by_column) in specs.items()}

    def under(self, recipe: LinearRecipe) -> "LinearGemms":
        """The layer under another recipe; amax histories start empty."""
        return self._with(recipe)

    def unrecorded(self, current: frozenset[str] = frozenset()) -> "LinearGemms":
        """The layer for passes that record no amax and gather no codes; tensors in ``current`` get current scales."""
        if current not in self._unrecorded:
            recipe, fp8_sums = with_current_scales(self.recipe, current), bool(self.emulated.products)
            self._unrecorded[current] = self._with(recipe, emulate_accumulator=fp8_sums, reads=self.histories)
        return self._unrecorded[current]

    def supported_fusion(self, tensor: str, matrix: torch.Tensor) -> CastFusion:
        """Fusion of the cast of "input" or "grad_output", of the size and dtype of ``matrix``, with its producer.

        "source" if the scale is known and one cast gives both directions, so the cast may compute the tensor; "amax"
        if the cast needs the tensor's amax first; else None.
        """
        spec = self._specs[tensor]
        if not self._native_for(matrix).issuperset(SIDES[tensor]) or not self._one_spec[tensor]:
            return None
        if spec.granularity != "tensor":
            return None
        return "source" if spec.scaling == "delayed" else "amax"

    def accepts_split_input(self, matrix: torch.Tensor) -> bool:
        """Whether dy of the size and dtype of ``matrix`` may be a ``CastPrologue`` of several tensors in memory."""
        native = self._native_for(matrix).issuperset(SIDES["grad_output"])
        return native and self._one_spec["grad_output"] and self._specs["grad_output"].granularity != "row"

    def fprop(
        self, x_TI: torch.Tensor, w_OI: torch.Tensor, rng_step: RngStep, update_amax: bool = True
    ) -> torch.Tensor:
        """``y_TO = x_TI @ w_OI.T`` in x's dtype; pass ``update_amax=False`` in evaluation."""
        return self.forward(x_TI, w_OI, rng_step, update_amax)[0]

    def forward(
        self,
        x_TI: torch.Tensor | CastPrologue | QuantizedTensor,
        w_OI: torch.Tensor,
        rng_step: RngStep,
        update_amax: bool = True,
        bias_O: torch.Tensor | None = None,
        save_input: bool = False,
        amax: torch.Tensor | None = None,
        layer_input: torch.Tensor | None = None,
        gather: Gather | None = None,
    ) -> tuple[torch.Tensor, SavedForBackward]:
        """``fprop`` plus a bias, and the tensors saved for backward.

        A native GEMM adds the bias before it rounds to bf16; others round twice, as Megatron-core's layers do.

        Args:
            x_TI: a computed prologue only if ``supported_fusion`` is "source"; a quantized one from ``quantize_input``,
                or codes of ``quantize_tokens``, which are saved.
            save_input: quantize x for wgrad from the same read, if both GEMMs are native.
            amax: fp32 [1] of this rank's part of x, if known.
            layer_input: [..., I], saved in place of x: before flattening or gathering.
            gather: if ``gathers`` is "input": x_TI has this rank's tokens; their codes are gathered and saved.
        """
        self.choose_products(w_OI)
        native = self._native_for(x_TI)
        backend = self._backend("fprop", native)
        if isinstance(x_TI, QuantizedTensor):
            x = x_TI
        else:
            both = save_input and native.issuperset(SIDES["input"]) and self._one_spec["input"]
            x, _ = backend.quantize(
                "input",
                x_TI,
                rng_step,
                rowwise=True,
                columnwise=both,
                update_amax=update_amax,
                local_amax=amax,
                codes=gather is not None,
            )
        codes = None
        if gather is not None or (isinstance(x_TI, QuantizedTensor) and x.columnwise_data is None):
            codes, x = x, self._from_codes("input", x if gather is None else gather(x), columnwise=False)
        weight_amax = None
        if save_input and "fprop" in native and not self.weight_cache.holds("fprop"):
            weight_amax = None if isinstance(w_OI, Fp8Weight) else self.native.weight_amax(w_OI)
        w = self._stored_weight("fprop", w_OI, native, update_amax)
        if w is None:
            both = self._caches_both_directions(native, update_amax)
            w, _ = backend.quantize(
                "weight", w_OI, rng_step, rowwise=True, columnwise=both, update_amax=update_amax, amax=weight_amax
            )
            if update_amax:
                self.weight_cache.put("fprop", native, w)
        y = backend.gemm("fprop", x, w, x_TI.dtype, bias=bias_O)
        saved = SavedForBackward.of(w_OI, x_TI if layer_input is None else layer_input, x, weight_amax)
        return y, saved if codes is None else saved.with_codes(codes)

    def quantize_tokens(
        self, tensor: str, tokens: torch.Tensor, w_OI: torch.Tensor, rng_step: RngStep
    ) -> QuantizedTensor:
        """Rowwise codes and scales of "input" or "grad_output", for any layer with this recipe and a weight like this.

        Only if ``why_not_dispatched`` has no reason: a token's codes then depend only on the token. ``forward`` takes
        those of x, ``dispatched_grad_output`` those of dy.
        """
        self.choose_products(w_OI)
        backend = self._backend(SIDES[tensor][0], self._native_for(tokens))
        return backend.quantize(tensor, tokens, rng_step, rowwise=True, columnwise=False, codes=True)[0]

    def dispatched_grad_output(self, codes: QuantizedTensor) -> GradOutput:
        """dy for ``dgrad``, which takes the codes of ``quantize_tokens``, and ``wgrad``, which dequantizes them."""
        return GradOutput(codes.dequantize(codes.dtype), self._from_codes("grad_output", codes, columnwise=False))

    def quantize_input(self, x_TI: CastPrologue, rng_step: RngStep) -> QuantizedTensor:
        """x for ``forward``, in both directions unless it is gathered; only if ``supported_fusion`` is "source"."""
        columnwise = self.gathers != "input"
        return self.native.quantize("input", x_TI, rng_step, rowwise=True, columnwise=columnwise)[0]

    def grad_output(
        self,
        dy_TO: torch.Tensor | CastPrologue,
        rng_step: RngStep,
        bias: bool = False,
        amax: torch.Tensor | None = None,
        shard: bool = False,
        update_amax: bool = True,
        gemms: Collection[str] = SIDES["grad_output"],
    ) -> GradOutput:
        """dy for ``dgrad`` and ``wgrad``, quantized for both from one read if specs and kernel permit.

        Args:
            dy_TO: a computed prologue only if ``supported_fusion`` is "source", a split one if ``accepts_split_input``.
            bias: also return the gradient of a bias, the sum over tokens.
            amax: fp32 [1] of this rank's part of dy, if known.
            shard: if ``gathers`` is "grad_output": dy_TO has this rank's tokens; return their codes, for
                ``gathered_grad_output``.
            update_amax: the same as in ``forward``, also for ``dgrad`` and ``wgrad``.
            gemms: those that follow; dy in memory is not quantized for others.
        """
        native, one_spec = self._native_for(dy_TO), self._one_spec["grad_output"]
        if isinstance(dy_TO, torch.Tensor):
            native = native.intersection(gemms)
        if shard:
            codes, db = self._backend("dgrad", native).quantize(
                "grad_output", dy_TO, rng_step, rowwise=True, columnwise=False, sums=bias, codes=True
            )
            return GradOutput(dy_TO if isinstance(dy_TO, torch.Tensor) else dy_TO.like, codes, db)
        quantized = db = None
        if "dgrad" in native or "wgrad" in native:
            rowwise, wgrad = "dgrad" in native, "wgrad" in native
            quantized, db = self.native.quantize(
                "grad_output",
                dy_TO,
                rng_step,
                rowwise=rowwise,
                columnwise=wgrad and (one_spec or not rowwise),
                update_amax=update_amax,
                local_amax=amax,
                sums=bias,
            )
        elif one_spec and len(gemms) == 2 and self.emulated.fuses_both_directions("grad_output", dy_TO, rng_step):
            quantized, _ = self.emulated.quantize("grad_output", dy_TO, rng_step, rowwise=True, columnwise=True)
        if isinstance(dy_TO, torch.Tensor):
            matrix = dy_TO
        elif quantized is not None and quantized.rowwise_data is not None and quantized.columnwise_data is not None:
            matrix = dy_TO.like
        else:
            matrix = in_memory(dy_TO)
        if bias and db is None:
            db = matrix.sum(dim=0)
        return GradOutput(matrix, quantized, db, update_amax)

    def gathered_grad_output(self, dy: GradOutput, gather: Gather) -> GradOutput:
        """dy of all tokens for ``dgrad`` and ``wgrad`` from this rank's codes; its matrix is a NaN placeholder."""
        assert dy.quantized is not None
        codes = gather(dy.quantized)
        operands = self._from_codes("grad_output", codes, columnwise=False)
        self._from_codes("grad_output", codes, columnwise=True, into=operands)
        return GradOutput(dy.matrix.new_full((), torch.nan).expand(codes.shape), operands)

    def dgrad(
        self,
        dy: torch.Tensor | GradOutput,
        w_OI: torch.Tensor,
        rng_step: RngStep,
        weight_amax: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``dx_TI = dy_TO @ w_OI`` in the dtype of dy; ``weight_amax`` of ``SavedForBackward``."""
        dy = dy if isinstance(dy, GradOutput) else GradOutput(dy)
        native, quantized = self._native_for(dy.matrix), dy.quantized
        backend = self._backend("dgrad", native)
        if quantized is None or quantized.rowwise_data is None:
            quantized, _ = backend.quantize(
                "grad_output", dy.matrix, rng_step, rowwise=True, columnwise=False, update_amax=dy.update_amax
            )
        w = self._stored_weight("dgrad", w_OI, native, dy.update_amax)
        if w is None:
            both = self._caches_both_directions(native, dy.update_amax)
            w, _ = backend.quantize(
                "weight", w_OI, rng_step, rowwise=both, columnwise=True, update_amax=dy.update_amax, amax=weight_amax
            )
            if dy.update_amax:
                self.weight_cache.put("dgrad", native, w)
        return backend.gemm("dgrad", quantized, w, dy.matrix.dtype)

    def wgrad(
        self,
        dy: torch.Tensor | GradOutput,
        x: torch.Tensor | QuantizedTensor | CastPrologue,
        rng_step: RngStep,
        accumulate_into: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
        restored: bool = False,
    ) -> torch.Tensor:
        """``dw_OI = dy_TO.T @ x_TI`` in the dtype of dy, or added in fp32 to ``accumulate_into``, which is returned.

        Args:
            x: x_TI, or the result of ``SavedForBackward.input``; a computed prologue only if ``supported_fusion`` is
                "source". Rowwise codes with scales along features are dequantized and quantized along tokens.
            amax: the same as in ``forward``.
            restored: x is decoded from a ``CachedInput``; its amax is not recorded if fprop recorded its source's.
        """
        dy = dy if isinstance(dy, GradOutput) else GradOutput(dy)
        native, quantized = self._native_for(dy.matrix), dy.quantized
        backend = self._backend("wgrad", native)
        if isinstance(x, QuantizedTensor) and not transposes(x):
            x = x.dequantize(x.dtype)
        if isinstance(x, QuantizedTensor):
            x = x if x.columnwise_data is not None else self._from_codes("input", x, columnwise=True)
        else:
            # a native fprop by the same spec has recorded the amax
            update_amax = dy.update_amax and (not (restored or "wgrad" in native) or not self._one_spec["input"])
            x, _ = backend.quantize(
                "input", x, rng_step, rowwise=False, columnwise=True, update_amax=update_amax, local_amax=amax
            )
        if quantized is None or quantized.columnwise_data is None:
            quantized, _ = backend.quantize(
                "grad_output", dy.matrix, rng_step, rowwise=False, columnwise=True, update_amax=dy.update_amax
            )
        overwrite = accumulate_into is not None and self.main_grad_is_zero
        if overwrite:
            self.main_grad_is_zero = False
        return backend.gemm(
            "wgrad", quantized, x, dy.matrix.dtype, accumulate_into=accumulate_into, overwrite=overwrite
        )

    def choose_products(self, w_OI: torch.Tensor) -> None:
        """Select the GEMMs that run on FP8 tensor cores, once for a device and dtype; UserError for fp16 and fp64."""
        key = (w_OI.device, w_OI.dtype)
        if self._chosen_for != key:
            check_dtype(self.recipe, w_OI.dtype, self.linear_id.path)
            self._chosen_for, self._native_names = key, frozenset()
            if w_OI.dtype == torch.bfloat16 and not self._emulate:
                self._native_names = native_gemms(self.recipe, arch_of(w_OI.device), w_OI.shape[1], w_OI.shape[0])

    def _native_for(self, tokens: torch.Tensor | CastPrologue | QuantizedTensor) -> frozenset[str]:
        """The GEMMs that run on FP8 tensor cores; none for an expert without tokens."""
        return self._native_names if tokens.shape[0] else frozenset()

    def backend(self, gemm: str) -> GemmBackend:
        """The backend of a GEMM, as ``choose_products`` selected."""
        return self._backend(gemm, self._native_names)

    def _backend(self, gemm: str, native: frozenset[str]) -> GemmBackend:
        return self.native if gemm in native else self.emulated

    def _from_codes(
        self, tensor: str, codes: QuantizedTensor, *, columnwise: bool, into: QuantizedTensor | None = None
    ) -> QuantizedTensor:
        """Rowwise codes [T, K] as the operand of one GEMM of a tensor; added to ``into`` if given."""
        into = QuantizedTensor(codes.shape, codes.dtype, codes.spec) if into is None else into
        backend = self._backend(SIDES[tensor][columnwise], self._native_for(codes))
        made = backend.from_codes(codes, columnwise=columnwise)
        if columnwise:
            into.columnwise_data, into.columnwise_scale = made
        else:
            into.rowwise_data, into.rowwise_scale = made
        into.folded = made[1] is None
        return into

    def _stored_weight(
        self, gemm: str, w_OI: torch.Tensor, native: frozenset[str], update_amax: bool
    ) -> QuantizedTensor | None:
        """Weight of fprop (rowwise) or dgrad (columnwise) from the cache or an FP8 primary weight; else None."""
        # the cache also serves passes without amax update, such as the first of an activation recomputation
        is_native, holds = gemm in native, self.weight_cache.holds(gemm)
        cached = self.weight_cache.get(gemm, is_native) if holds else None
        if not isinstance(w_OI, Fp8Weight):
            return cached
        if update_amax and self.records and w_OI.spec.scaling == "delayed":
            history, slot = self.histories["weight"]
            history.update_amax(slot, w_OI.main_amax)
        if cached is not None and update_amax:
            return cached
        on_grid = gemm in self.emulated.products
        weight = w_OI.quantized(columnwise=gemm == "dgrad", codes=is_native, on_grid=on_grid)
        if is_native and gemm == "dgrad" and update_amax:  # a transposed copy; others alias the codes or are cheap
            self.weight_cache.put(gemm, native, weight)
        return weight

    def _caches_both_directions(self, native: frozenset[str], update_amax: bool) -> bool:
        """Whether one cast quantizes the weight for fprop and dgrad, both cached."""
        caches = update_amax and all(map(self.weight_cache.holds, SIDES["weight"]))
        return caches and native.issuperset(SIDES["weight"]) and self._one_spec["weight"]
