"""The three GEMMs of a linear layer under a recipe, and a drop-in for ``torch.nn.Linear``. No Megatron, no
collectives.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from megatron_lowprec.kernels.contract.reference import Operand, contract
from megatron_lowprec.kernels.philox.reference import Span
from megatron_lowprec.kernels.quantize.reference import tile_amax
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.device_moment import capturing
from megatron_lowprec.quantization.quantizer import (
    Reduce,
    Transform,
    delayed_encode_scale,
    quantize_both_ways,
    quantize_for_gemm,
)
from megatron_lowprec.quantization.random_stream import Moment, RandomStream, stream_key
from megatron_lowprec.quantization.tensor import tile_sizes
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.recipe.resolve import LinearSite, check_sizes
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, GemmSpec, HistoryRule, KeepBf16, QuantSpec, Recipe

# dimensions of each GEMM's operands, contracted one last: T tokens, I input features, O output features
_DIMS = {
    ("fprop", "input"): "TI",
    ("fprop", "weight"): "OI",
    ("dgrad", "grad_output"): "TO",
    ("dgrad", "weight"): "IO",
    ("wgrad", "grad_output"): "OT",
    ("wgrad", "input"): "IT",
}


@dataclass(frozen=True)
class LinearPlace:
    """Where a linear layer, or a rank's shard of one, stands: what its random streams are keyed by.

    ``spans`` says where the shard lies in the unsharded layer, for dimensions "I" and "O"; ``split`` names the
    dimension that ranks share, if any.
    """

    layer: int
    name: str
    expert: int = -1
    data_parallel_rank: int = 0
    spans: Mapping[str, Span] = field(default_factory=dict)
    split: str = ""


class LinearNumerics:
    """fprop, dgrad and wgrad of one linear layer under a recipe.

    Its state are slots in amax histories; what else it keeps (signs of a moment, quantized weights of a step) only
    saves work. A call is a pure function of its arguments, the moment and the histories.

    Args:
        recipe: what to do.
        place: which layer this is.
        seed: the run's seed.
        history_of: (length, rule) -> the history that tensors of that kind share; asked once per delayed operand.
        reduce_amax: maximum over the ranks that share ``place.split``; None without such ranks.
        cache_weights: keep a quantized weight, where it is the same for all microbatches of a step, until
            ``forget_weights``; costs a copy of the weight for each such GEMM.
        stores_histories_of: where this layer is left in bf16 under another recipe, that one. Its histories are kept,
            empty: a checkpoint stacks the layers of a model, which must therefore store alike.
    """

    def __init__(
        self,
        recipe: Recipe,
        place: LinearPlace,
        seed: int,
        history_of: Callable[[int, HistoryRule], AmaxHistory],
        reduce_amax: Reduce | None = None,
        cache_weights: bool = False,
        stores_histories_of: Recipe | None = None,
    ) -> None:
        self.recipe, self.place = recipe, place
        self._cache_weights = cache_weights
        self._weights: dict[str, Operand] = {}
        self._transforms: dict[str, tuple[Moment, Transform]] = {}
        self._reduce_amax = reduce_amax
        self.histories: dict[str, tuple[AmaxHistory, int]] = {}
        for operand, (length, rule) in (stores_histories_of or recipe).delayed_operands().items():
            history = history_of(length, rule)
            self.histories[operand] = (history, history.add_tensor())

        def key(purpose: str, gemm: str, operand: str = "") -> tuple[int, int]:
            return stream_key(
                seed,
                purpose,  # type: ignore[arg-type]
                layer=place.layer,
                linear=place.name,
                gemm=gemm,
                operand=operand,
                expert=place.expert,
                data_parallel_rank=place.data_parallel_rank,
            )

        self._rounding = {
            (gemm, operand): RandomStream(
                key("rounding", gemm, operand),
                row_span=place.spans.get(dims[0], Span()),
                column_span=place.spans.get(dims[1], Span()),
            )
            for (gemm, operand), dims in _DIMS.items()
        }
        self._sign = {gemm: RandomStream(key("sign", gemm)) for gemm in GEMM_OPERANDS}

    def fprop(self, x_TI: torch.Tensor, w_OI: torch.Tensor, moment: Moment, observe: bool = True) -> torch.Tensor:
        """``y_TO = x_TI @ w_OI.T`` in the dtype of x; ``observe=False`` keeps an evaluation out of amax histories."""
        return self._gemm("fprop", x_TI, w_OI, moment, observe)

    def grad_output(self, dy_TO: torch.Tensor, moment: Moment) -> "GradOutput":
        """dy for ``dgrad`` and ``wgrad``, quantized for both from one read where their specs and a kernel allow it."""
        dgrad, wgrad = self.recipe.dgrad, self.recipe.wgrad
        spec = dgrad.grad_output
        operands: dict[str, Operand] = {}
        if spec is not None and spec == wgrad.grad_output:
            both = quantize_both_ways(
                dy_TO,
                spec,
                (self._stream("dgrad", "grad_output", moment), self._stream("wgrad", "grad_output", moment)),
                (self._transform("dgrad", moment), self._transform("wgrad", moment)),
            )
            if both is not None:
                operands = {"dgrad": Operand(both[0]), "wgrad": Operand(both[1])}
        return GradOutput(dy_TO, operands)

    def dgrad(self, dy: "torch.Tensor | GradOutput", w_OI: torch.Tensor, moment: Moment) -> torch.Tensor:
        """``dx_TI = dy_TO @ w_OI`` in the dtype of dy."""
        dy = dy if isinstance(dy, GradOutput) else GradOutput(dy, {})
        return self._gemm("dgrad", dy.matrix, w_OI.t(), moment, first=dy.operands.get("dgrad"))

    def wgrad(
        self,
        dy: "torch.Tensor | GradOutput",
        x_TI: torch.Tensor,
        moment: Moment,
        accumulate_into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``dw_OI = dy_TO.T @ x_TI`` in the dtype of dy, or added in fp32 to ``accumulate_into``, which is returned."""
        dy = dy if isinstance(dy, GradOutput) else GradOutput(dy, {})
        first = dy.operands.get("wgrad")
        return self._gemm("wgrad", dy.matrix.t(), x_TI.t(), moment, first=first, accumulate_into=accumulate_into)

    def load_histories(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Take ``{prefix}amax.<operand>`` out of a state dict, where they are, into the amax histories."""
        for operand, (history, slot) in self.histories.items():
            state = state_dict.pop(f"{prefix}amax.{operand}", None)
            if state is not None:
                history.load_state(slot, state)

    def forget_weights(self) -> None:
        """Drop quantized weights that were kept: the weight has changed."""
        self._weights.clear()

    def _gemm(
        self,
        name: str,
        a: torch.Tensor,
        b: torch.Tensor,
        moment: Moment,
        observe: bool = True,
        first: Operand | None = None,
        accumulate_into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        gemm: GemmSpec = getattr(self.recipe, name)
        names = GEMM_OPERANDS[name]
        specs: list[QuantSpec | None] = [getattr(gemm, operand) for operand in names]
        return contract(
            first or self._operand(name, names[0], a, specs[0], moment, observe),
            self._operand(name, names[1], b, specs[1], moment, observe),
            alpha=1.0 / math.prod(spec.headroom for spec in specs if spec is not None),
            out_dtype=a.dtype,
            accumulate_into=accumulate_into,
        )

    def _operand(
        self, gemm: str, operand: str, matrix: torch.Tensor, spec: QuantSpec | None, moment: Moment, observe: bool
    ) -> Operand:
        if operand == "weight" and observe and self._keeps_weight(gemm, spec):
            if gemm not in self._weights:
                self._weights[gemm] = self._quantized(gemm, operand, matrix, spec, moment, observe)
            return self._weights[gemm]
        return self._quantized(gemm, operand, matrix, spec, moment, observe)

    def _quantized(
        self, gemm: str, operand: str, matrix: torch.Tensor, spec: QuantSpec | None, moment: Moment, observe: bool
    ) -> Operand:
        transform = self._transform(gemm, moment)
        if spec is None or matrix.numel() == 0:  # an expert may get no tokens
            return Operand(matrix if transform is None else transform.apply(matrix).to(matrix.dtype))
        encode_scale = None
        if spec.scaling == "delayed":
            history, slot = self.histories[operand]
            if observe:
                history.observe(slot, tile_amax(matrix, tile_sizes(spec, matrix)))
            encode_scale = delayed_encode_scale(history.in_effect[slot], spec)
        elements, scale = quantize_for_gemm(
            matrix,
            spec,
            random=self._stream(gemm, operand, moment),
            transform=transform,
            encode_scale=encode_scale,
            reduce_amax=self._reduce_amax if self._shares_scale(gemm, operand, spec) else None,
        )
        return Operand(elements, scale, tile_sizes(spec, matrix))

    def _stream(self, gemm: str, operand: str, moment: Moment) -> RandomStream:
        return self._rounding[gemm, operand].at(moment)

    def _transform(self, gemm: str, moment: Moment) -> Transform | None:
        """The GEMM's transform, one object for both operands of a moment."""
        hadamard = getattr(self.recipe, gemm).hadamard
        if hadamard is None:
            return None
        last = self._transforms.get(gemm)
        if last is None or last[0] != moment or capturing():
            stream = self._sign[gemm].at(moment) if hadamard.signs == "random" else None
            last = (moment, Transform(hadamard.block, stream))
            if not capturing():  # signs of a graph change with its replays
                self._transforms[gemm] = last
        return last[1]

    def _keeps_weight(self, gemm: str, spec: QuantSpec | None) -> bool:
        """Whether a step's microbatches all multiply with the same quantized weight, and it is to be kept for them."""
        hadamard = getattr(self.recipe, gemm).hadamard
        drawn = hadamard is not None and hadamard.signs == "random"
        if not self._cache_weights or capturing():
            return False
        return spec is not None and spec.rounding != "stochastic" and not drawn

    def _shares_scale(self, gemm: str, operand: str, spec: QuantSpec) -> bool:
        """Whether a tile of this operand reaches over the ranks that share ``place.split``."""
        dims = _DIMS[gemm, operand]
        reach = {"tensor": dims, "row": dims[1]}.get(spec.tile, "")
        return bool(self.place.split) and self.place.split in reach


@dataclass(frozen=True)
class GradOutput:
    """dy_TO of a layer, and the operands that were made of it already, by GEMM."""

    matrix: torch.Tensor
    operands: Mapping[str, Operand]


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, numerics: LinearNumerics, moment: Moment, observe: bool):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.numerics, ctx.moment = numerics, moment
        return numerics.fprop(x, weight, moment, observe)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        dy = ctx.numerics.grad_output(dy, ctx.moment)
        dx = ctx.numerics.dgrad(dy, weight, ctx.moment) if ctx.needs_input_grad[0] else None
        dw = ctx.numerics.wgrad(dy, x, ctx.moment) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None, None


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
        y = _LinearFunction.apply(flat, self.weight, self.numerics, self.moment, training)
        if training:
            self.moment = self.moment._replace(microbatch=self.moment.microbatch + 1)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def end_step(self) -> None:
        """What follows an optimizer step for this layer."""
        self.moment = Moment(self.moment.step + 1, 0)
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
