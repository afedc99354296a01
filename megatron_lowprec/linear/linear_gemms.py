"""fprop, dgrad and wgrad of a linear layer under a recipe. No Megatron, no collectives."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue
from megatron_lowprec.linear.backends.protocol import (
    BOTH,
    COLUMNWISE,
    ROWWISE,
    CastRequest,
    GemmBackend,
    KnownAmax,
    LayerContext,
)
from megatron_lowprec.linear.backends.resolved import LayerBackends, Resolved
from megatron_lowprec.linear.backends.table import Emulate
from megatron_lowprec.linear.layer_tensors import CastFusion, GradOutput, SavedForBackward, in_memory, transposes
from megatron_lowprec.linear.linear_id import SIDES, LayerAmax, LinearId
from megatron_lowprec.linear.sharding.gathered_weight import GatheredWeight
from megatron_lowprec.linear.weight_cache import QuantizedWeightCache
from megatron_lowprec.quantization.amax_history import AmaxHistory, add_tensors
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.quantizer import Reduce
from megatron_lowprec.quantization.random_stream import NO_DRAWS, RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.transform import Transforms
from megatron_lowprec.recipe.coverage import cached_weights, with_current_scales
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
        save_memory: cache only operands of FP8 primary weights.
        histories: tensor -> its amax history and slot, of at least the recipe's tensors; None to make them.
        emulate: multiply in the compute dtype even if the device has FP8 GEMMs, or native ones of these backends.
        emulate_accumulator: as ``LayerContext``.
        gathers: the tensor, "input" or "grad_output", that ranks with parts of its tokens gather as FP8 codes;
            ``why_not_gathered`` must have no reason. None if each rank is given all tokens.
        reads: histories of another instance, to which nothing is recorded.

    Attributes:
        records: whether passes may record amaxes.
        main_grad_is_zero: lets the next ``wgrad`` overwrite ``accumulate_into``; ``wgrad`` resets it.
        weight_cache: weights of this step; empty without ``cache_weights``.
        caches_copies: whether it takes quantized weights beside those in the compute dtype.
        transforms: Hadamard transforms of the GEMMs.
        backends: of the GEMMs; ``backends.resolve(weight)`` comes before the first pass.
    """

    def __init__(
        self,
        recipe: LinearRecipe,
        linear_id: LinearId,
        seed: int,
        history_of: Callable[[HistorySpec], AmaxHistory],
        reduce_amax: Reduce | None = None,
        cache_weights: bool = False,
        save_memory: bool = False,
        histories: Mapping[str, tuple[AmaxHistory, int]] | None = None,
        emulate: Emulate = False,
        emulate_accumulator: bool = False,
        gathers: str | None = None,
        reads: Mapping[str, tuple[AmaxHistory, int]] | None = None,
    ) -> None:
        self.recipe, self.linear_id, self.gathers = recipe, linear_id, gathers
        self.main_grad_is_zero = False
        self.records, self._unrecorded = reads is None, dict[frozenset[str], LinearGemms]()
        fixed: dict[str, Any] = {"linear_id": linear_id, "seed": seed, "reduce_amax": reduce_amax, "emulate": emulate}
        self._with: Callable[..., LinearGemms] = partial(LinearGemms, history_of=AmaxHistory, **fixed)
        self._fp8_sums = emulate_accumulator
        self.weight_cache = QuantizedWeightCache(cached_weights(recipe) if cache_weights else ())
        self.caches_copies = bool(self.weight_cache.gemms) and not save_memory
        given = histories if reads is None else reads
        self.histories = add_tensors(recipe.delayed_operands(), history_of) if given is None else dict(given)
        layer_amax = LayerAmax(linear_id, self.histories, reduce_amax, records=reads is None)
        self.transforms = Transforms(
            {name: gemm.hadamard for name, gemm in recipe.gemms.items()}, linear_id.sign_streams(seed)
        )
        rounding = linear_id.rounding_streams(seed)
        context = LayerContext(recipe, rounding, self.transforms, layer_amax, emulate_accumulator)
        self.backends = LayerBackends(context, emulate)

    def under(self, recipe: LinearRecipe) -> "LinearGemms":
        """The layer under another recipe; amax histories start empty."""
        return self._with(recipe)

    def on_shard(self, linear_id: LinearId, reduce_amax: Reduce | None) -> "LinearGemms":
        """The GEMMs of a rank's shard of the layer, with the same amax histories."""
        options: dict[str, Any] = {"linear_id": linear_id, "reduce_amax": reduce_amax, "histories": self.histories}
        return self._with(self.recipe, emulate_accumulator=self._fp8_sums, **options)

    @property
    def is_pure(self) -> bool:
        """Whether the layer's output is a function of only x, weight and bias: no draws and no histories."""
        return not self.recipe.random and not self.histories

    def unrecorded(self, current: frozenset[str] = frozenset()) -> "LinearGemms":
        """The layer for passes that record no amax and gather no codes; tensors in ``current`` get current scales."""
        if current not in self._unrecorded:
            recipe = with_current_scales(self.recipe, current)
            self._unrecorded[current] = self._with(recipe, emulate_accumulator=self._fp8_sums, reads=self.histories)
        return self._unrecorded[current]

    def supported_fusion(self, tensor: str, matrix: torch.Tensor) -> CastFusion:
        """Fusion of the cast of "input" or "grad_output", of the size and dtype of ``matrix``, with its producer.

        "source" if the scale is known and one cast gives both directions, so the cast may compute the tensor; "amax"
        if the cast needs the tensor's amax first; else None.
        """
        backend = self.backends.of(matrix).one_cast[tensor]
        return None if backend is None else backend.supported_fusion(tensor)

    def accepts_split_input(self, matrix: torch.Tensor) -> bool:
        """Whether dy of the size and dtype of ``matrix`` may be a ``CastPrologue`` of several tensors in memory."""
        backend = self.backends.of(matrix).one_cast["grad_output"]
        return backend is not None and backend.accepts_split_input("grad_output")

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

        A native backend adds the bias before it rounds to bf16; others round twice, as Megatron-core's layers do.

        Args:
            x_TI: a computed prologue only if ``supported_fusion`` is "source"; a quantized one from ``quantize_input``,
                or codes of ``quantize_tokens``, which are saved.
            save_input: quantize x for wgrad from the same read, where one backend runs both GEMMs and fuses that.
            amax: fp32 [1] of this rank's part of x, if known.
            layer_input: [..., I], saved in place of x: before flattening or gathering.
            gather: if ``gathers`` is "input": x_TI has this rank's tokens; their codes are gathered and saved.
        """
        self.backends.resolve(w_OI)
        backends = self.backends.of(x_TI)
        backend, input_amax = backends.gemms["fprop"], None
        if isinstance(x_TI, QuantizedTensor):
            x = x_TI
        else:
            cast = backends.one_cast["input"] if save_input else None
            both = cast is not None and cast.fuses_directions("input", x_TI, rng_step)
            request = (BOTH if both else ROWWISE)[update_amax]
            request = request if gather is None else request._replace(codes=True)
            known = None if amax is None else KnownAmax(amax)
            alone = save_input and not both and gather is None and backends.gemms["wgrad"] is backend
            if alone and isinstance(x_TI, torch.Tensor):
                amaxes = backend.input_amaxes(x_TI, rng_step)
                if amaxes is not None:
                    known, input_amax = KnownAmax(amaxes[0], reduced=True), amaxes[1]
                    request = request._replace(beside=backend.saves_codes(x_TI))
            x, _ = backend.quantize("input", x_TI, rng_step, request, known)
        codes = None
        if gather is not None or (isinstance(x_TI, QuantizedTensor) and x.columnwise_data is None):
            codes, x = x, self._from_codes("input", x if gather is None else gather(x), columnwise=False)
        w, weight_amax = self._stored_weight("fprop", w_OI, backend, update_amax), None
        caches = update_amax and self.caches_copies
        cached = self.caches_copies and self.weight_cache.holds("fprop")
        if save_input and w is None and not cached:
            weight_amax = backend.weight_amax(w_OI)
        if w is None:
            both = caches and self._caches_both(backends, w_OI, rng_step)
            request = (BOTH if both else ROWWISE)[update_amax]
            known = None if weight_amax is None else KnownAmax(weight_amax, reduced=True)
            w, _ = backend.quantize("weight", w_OI, rng_step, request, known)
            if caches:
                self.weight_cache.put("fprop", backend.name, w)
        y = backend.gemm("fprop", x, w, x_TI.dtype, bias=bias_O)
        saved = SavedForBackward.of(w_OI, x_TI if layer_input is None else layer_input, x, weight_amax, input_amax)
        return y, saved if codes is None else saved.with_codes(codes)

    def saves_codes(self, x: torch.Tensor) -> bool:
        """Whether ``forward`` of x [..., I] saves operands of wgrad in place of x; behind ``backends.resolve``."""
        rows = x.reshape(-1, x.shape[-1])
        backends = self.backends.of(rows)
        cast, backend = backends.one_cast["input"], backends.gemms["fprop"]
        both = cast is not None and cast.fuses_directions("input", rows, NO_DRAWS)
        return both or (backends.gemms["wgrad"] is backend and backend.saves_codes(rows))

    def quantize_tokens(
        self, tensor: str, tokens: torch.Tensor, w_OI: torch.Tensor, rng_step: RngStep
    ) -> QuantizedTensor:
        """Rowwise codes and scales of "input" or "grad_output", for any layer with this recipe and a weight like this.

        Only if ``why_not_dispatched`` has no reason: a token's codes then depend only on the token. ``forward`` takes
        those of x, ``dispatched_grad_output`` those of dy.
        """
        self.backends.resolve(w_OI)
        backend = self.backends.of(tokens).gemms[SIDES[tensor][0]]
        return backend.quantize(tensor, tokens, rng_step, CastRequest(True, False, codes=True))[0]

    def dispatched_grad_output(self, codes: QuantizedTensor) -> GradOutput:
        """dy for ``dgrad``, which takes the codes of ``quantize_tokens``, and ``wgrad``, which dequantizes them."""
        return GradOutput(codes.dequantize(codes.dtype), self._from_codes("grad_output", codes, columnwise=False))

    def quantize_input(self, x_TI: CastPrologue, rng_step: RngStep) -> QuantizedTensor:
        """x for ``forward``, in both directions unless it is gathered; only if ``supported_fusion`` is "source"."""
        request = CastRequest(True, self.gathers != "input")
        return self.backends.resolved.gemms["fprop"].quantize("input", x_TI, rng_step, request)[0]

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
        backends = self.backends.of(dy_TO)
        backend = backends.gemms["dgrad"]
        if shard:
            request = CastRequest(True, False, sums=bias, codes=True)
            codes, db = backend.quantize("grad_output", dy_TO, rng_step, request)
            return GradOutput(dy_TO if isinstance(dy_TO, torch.Tensor) else dy_TO.like, codes, db)
        if not isinstance(dy_TO, torch.Tensor):
            gemms = SIDES["grad_output"]
        quantized = db = None
        cast = backends.one_cast["grad_output"] if len(gemms) == 2 else None
        both = cast is not None and cast.fuses_directions("grad_output", dy_TO, rng_step)
        rowwise, columnwise = both or ("dgrad" in gemms and backend.fuses_producer), both
        if not rowwise and "wgrad" in gemms and backends.gemms["wgrad"].fuses_producer:
            backend, columnwise = backends.gemms["wgrad"], True
        if rowwise or columnwise:
            request = CastRequest(rowwise, columnwise, update_amax, bias)
            known = None if amax is None else KnownAmax(amax)
            quantized, db = backend.quantize("grad_output", dy_TO, rng_step, request, known)
        if isinstance(dy_TO, torch.Tensor):
            matrix = dy_TO
        elif quantized is not None and quantized.rowwise_data is not None and quantized.columnwise_data is not None:
            matrix = dy_TO.like
        else:
            matrix = in_memory(dy_TO)
        if bias and db is None:
            db = backend.sum_tokens(matrix)
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
        backends, quantized = self.backends.of(dy.matrix), dy.quantized
        backend = backends.gemms["dgrad"]
        if quantized is None or quantized.rowwise_data is None:
            quantized, _ = backend.quantize("grad_output", dy.matrix, rng_step, ROWWISE[dy.update_amax])
        w = self._stored_weight("dgrad", w_OI, backend, dy.update_amax)
        if w is None:
            caches = dy.update_amax and self.caches_copies
            both = caches and self._caches_both(backends, w_OI, rng_step)
            request = (BOTH if both else COLUMNWISE)[dy.update_amax]
            known = None if weight_amax is None else KnownAmax(weight_amax, reduced=True)
            w, _ = backend.quantize("weight", w_OI, rng_step, request, known)
            if caches:
                self.weight_cache.put("dgrad", backend.name, w)
        return backend.gemm("dgrad", quantized, w, dy.matrix.dtype)

    def wgrad(
        self,
        dy: torch.Tensor | GradOutput,
        x: torch.Tensor | QuantizedTensor | CastPrologue,
        rng_step: RngStep,
        accumulate_into: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
        input_amax: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``dw_OI = dy_TO.T @ x_TI`` in the dtype of dy, or added in fp32 to ``accumulate_into``, which is returned.

        Args:
            x: x_TI, or the result of ``SavedForBackward.input``; a computed prologue only if ``supported_fusion`` is
                "source". Rowwise codes with scales along features are dequantized and quantized along tokens; those of
                ``QuantizedTensor.beside`` in one launch.
            amax: the same as in ``forward``.
            input_amax: of ``SavedForBackward``.
        """
        dy = dy if isinstance(dy, GradOutput) else GradOutput(dy)
        backend, quantized = self.backends.of(dy.matrix).gemms["wgrad"], dy.quantized
        if isinstance(x, QuantizedTensor) and x.rowwise_tensor_scale is not None:
            x = backend.requantize(x, rng_step)
        elif isinstance(x, QuantizedTensor) and not transposes(x):
            x = x.dequantize(x.dtype)
        if isinstance(x, QuantizedTensor):
            x = x if x.columnwise_data is not None else self._from_codes("input", x, columnwise=True)
        else:
            # fprop by the same spec has recorded the amax
            request = COLUMNWISE[dy.update_amax and not self.backends.one_spec["input"]]
            if input_amax is None:
                known = None if amax is None else KnownAmax(amax)
            else:
                known = KnownAmax(input_amax, reduced=True)
            x, _ = backend.quantize("input", x, rng_step, request, known)
        if quantized is None or quantized.columnwise_data is None:
            quantized, _ = backend.quantize("grad_output", dy.matrix, rng_step, COLUMNWISE[dy.update_amax])
        overwrite = accumulate_into is not None and self.main_grad_is_zero
        if overwrite:
            self.main_grad_is_zero = False
        return backend.gemm(
            "wgrad", quantized, x, dy.matrix.dtype, accumulate_into=accumulate_into, overwrite=overwrite
        )

    def _from_codes(
        self, tensor: str, codes: QuantizedTensor, *, columnwise: bool, into: QuantizedTensor | None = None
    ) -> QuantizedTensor:
        """Rowwise codes [T, K] as the operand of one GEMM of a tensor; added to ``into`` if given."""
        into = QuantizedTensor(codes.shape, codes.dtype, codes.spec) if into is None else into
        backend = self.backends.of(codes).gemms[SIDES[tensor][columnwise]]
        found = backend.from_codes(codes, columnwise=columnwise)
        if columnwise:
            into.columnwise_data, into.columnwise_scale = found
        else:
            into.rowwise_data, into.rowwise_scale = found
        into.folded = found[1] is None  # of both directions, which have one format
        return into

    def _stored_weight(
        self, gemm: str, w_OI: torch.Tensor, backend: GemmBackend, update_amax: bool
    ) -> QuantizedTensor | None:
        """Weight of fprop (rowwise) or dgrad (columnwise) from the cache or an FP8 primary weight; else None."""
        # the cache also serves passes without amax update, such as the first of an activation recomputation
        if isinstance(w_OI, GatheredWeight):
            return w_OI.operand(gemm, backend)
        cached = self.weight_cache.get(gemm, backend.name) if self.weight_cache.holds(gemm) else None
        if not isinstance(w_OI, Fp8Weight):
            return cached
        if update_amax and self.records and w_OI.spec.scaling == "delayed":
            history, slot = self.histories["weight"]
            history.update_amax(slot, w_OI.main_amax)
        if cached is not None and update_amax:
            return cached
        weight = backend.primary_weight(gemm, w_OI)
        if weight is not None and gemm in backend.caches_primary and update_amax:
            self.weight_cache.put(gemm, backend.name, weight)
        return weight

    def _caches_both(self, backends: Resolved, w_OI: torch.Tensor, rng_step: RngStep) -> bool:
        """Whether one cast quantizes the weight for fprop and dgrad, both cached."""
        cast = backends.one_cast["weight"]
        if cast is None or not all(map(self.weight_cache.holds, SIDES["weight"])):
            return False
        return cast.fuses_directions("weight", w_OI, rng_step)
