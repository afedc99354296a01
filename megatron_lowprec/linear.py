"""The three GEMMs of a linear layer under a recipe, and a drop-in for ``torch.nn.Linear``. No Megatron, no
collectives.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.functional import pad

from megatron_lowprec.kernels.contract.reference import Operand, contract
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.quantize.reference import tile_amax
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.quantizer import Reduce, delayed_encode_scale, quantize_for_gemm
from megatron_lowprec.quantization.random_stream import Moment, RandomStream, stream_key
from megatron_lowprec.quantization.tensor import tile_sizes
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.recipe.resolve import LinearSite, check_sizes
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, GemmSpec, HistoryRule, QuantSpec, Recipe

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

    ``offsets`` says where the shard begins in the unsharded layer, for dimensions "I" and "O"; ``split`` names the
    dimension that ranks share, if any.
    """

    layer: int
    name: str
    expert: int = -1
    data_parallel_rank: int = 0
    offsets: Mapping[str, int] = field(default_factory=dict)
    split: str = ""


class LinearNumerics:
    """fprop, dgrad and wgrad of one linear layer under a recipe.

    Holds no tensors but its slots in amax histories; every call is a pure function of its arguments, the moment and
    these.

    Args:
        recipe: what to do.
        place: which layer this is.
        seed: the run's seed.
        history_of: (length, rule) -> the history that tensors of that kind share; asked once per delayed operand.
        reduce_amax: maximum over the ranks that share ``place.split``; None without such ranks.
    """

    def __init__(
        self,
        recipe: Recipe,
        place: LinearPlace,
        seed: int,
        history_of: Callable[[int, HistoryRule], AmaxHistory],
        reduce_amax: Reduce | None = None,
    ) -> None:
        self.recipe, self.place = recipe, place
        self._reduce_amax = reduce_amax
        self.histories: dict[str, tuple[AmaxHistory, int]] = {}
        for operand, (length, rule) in recipe.delayed_operands().items():
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
                row_offset=place.offsets.get(dims[0], 0),
                column_offset=place.offsets.get(dims[1], 0),
            )
            for (gemm, operand), dims in _DIMS.items()
        }
        self._sign = {gemm: RandomStream(key("sign", gemm)) for gemm in GEMM_OPERANDS}

    def fprop(self, x_TI: torch.Tensor, w_OI: torch.Tensor, moment: Moment, observe: bool = True) -> torch.Tensor:
        """``y_TO = x_TI @ w_OI.T`` in the dtype of x; ``observe=False`` keeps an evaluation out of amax histories."""
        return self._gemm("fprop", x_TI, w_OI, moment, observe)

    def dgrad(self, dy_TO: torch.Tensor, w_OI: torch.Tensor, moment: Moment) -> torch.Tensor:
        """``dx_TI = dy_TO @ w_OI`` in the dtype of dy."""
        return self._gemm("dgrad", dy_TO, w_OI.t(), moment)

    def wgrad(
        self, dy_TO: torch.Tensor, x_TI: torch.Tensor, moment: Moment, accumulate_into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``dw_OI = dy_TO.T @ x_TI`` in the dtype of dy, or added in fp32 to ``accumulate_into``, which is returned."""
        return self._gemm("wgrad", dy_TO.t(), x_TI.t(), moment, accumulate_into=accumulate_into)

    def _gemm(
        self,
        name: str,
        a: torch.Tensor,
        b: torch.Tensor,
        moment: Moment,
        observe: bool = True,
        accumulate_into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        gemm: GemmSpec = getattr(self.recipe, name)
        signs, dtype = None, a.dtype
        if gemm.hadamard is not None:
            block = gemm.hadamard.block
            signs = torch.ones(block, device=a.device)
            if gemm.hadamard.signs == "random":
                signs = self._sign[name].at(moment).signs(block, a.device)
            if (
                a.shape[1] % block
            ):  # tokens alone: sizes of features were checked; zeros change neither amax nor product
                a, b = (pad(operand, (0, -operand.shape[1] % block)) for operand in (a, b))
        first, second = GEMM_OPERANDS[name]
        specs: tuple[QuantSpec | None, QuantSpec | None] = (getattr(gemm, first), getattr(gemm, second))
        alpha = 1.0 / math.prod(spec.headroom for spec in specs if spec is not None)
        return contract(
            self._operand(name, first, a, specs[0], moment, signs, observe),
            self._operand(name, second, b, specs[1], moment, signs, observe),
            alpha=alpha,
            out_dtype=dtype,
            accumulate_into=accumulate_into,
        )

    def _operand(
        self,
        gemm: str,
        operand: str,
        matrix: torch.Tensor,
        spec: QuantSpec | None,
        moment: Moment,
        signs: torch.Tensor | None,
        observe: bool,
    ) -> Operand:
        if spec is None or matrix.numel() == 0:  # an expert may get no tokens
            return Operand(matrix if signs is None else hadamard_transform(matrix, signs).to(matrix.dtype))
        encode_scale = None
        if spec.scaling == "delayed":
            history, slot = self.histories[operand]
            if observe:
                history.observe(slot, tile_amax(matrix, tile_sizes(spec, matrix)))
            encode_scale = delayed_encode_scale(history.in_effect[slot], spec)
        elements, scale = quantize_for_gemm(
            matrix,
            spec,
            random=self._rounding[gemm, operand].at(moment),
            signs=signs,
            encode_scale=encode_scale,
            reduce_amax=self._reduce_amax if self._shares_scale(gemm, operand, spec) else None,
        )
        return Operand(elements, scale, tile_sizes(spec, matrix))

    def _shares_scale(self, gemm: str, operand: str, spec: QuantSpec) -> bool:
        """Whether a tile of this operand reaches over the ranks that share ``place.split``."""
        dims = _DIMS[gemm, operand]
        reach = {"tensor": dims, "row": dims[1]}.get(spec.tile, "")
        return bool(self.place.split) and self.place.split in reach


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, numerics: LinearNumerics, moment: Moment, observe: bool):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.numerics, ctx.moment = numerics, moment
        return numerics.fprop(x, weight, moment, observe)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        dx = ctx.numerics.dgrad(dy, weight, ctx.moment) if ctx.needs_input_grad[0] else None
        dw = ctx.numerics.wgrad(dy, x, ctx.moment) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None, None


class LowPrecLinear(nn.Linear):
    """``torch.nn.Linear`` whose three GEMMs follow a recipe, for use outside Megatron.

    Call ``end_step(model)`` after each optimizer step: it moves the random streams on and updates delayed scales.

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
        check_sizes(self.recipe, [LinearSite(layer, name, in_features, out_features, "column")], layer, 1)
        self._histories: dict[tuple[int, HistoryRule], AmaxHistory] = {}
        self.numerics = LinearNumerics(self.recipe, LinearPlace(layer, name), seed, self._history)
        self.moment = Moment(0, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias``; x [..., in_features] in the dtype of the weight."""
        training = torch.is_grad_enabled() and self.weight.requires_grad
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

    def _history(self, length: int, rule: HistoryRule) -> AmaxHistory:
        return self._histories.setdefault((length, rule), AmaxHistory(length, rule, self.weight.device))


def end_step(model: nn.Module) -> None:
    """``end_step`` of every ``LowPrecLinear`` in ``model``; call it after each optimizer step."""
    for module in model.modules():
        if isinstance(module, LowPrecLinear):
            module.end_step()
