"""Protocols of a backend, for one linear layer and for all experts of a layer, and the values that they exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue
from megatron_lowprec.kernels.cast_fp8.rule import Fp8Rule
from megatron_lowprec.linear.layer_tensors import CastFusion
from megatron_lowprec.linear.linear_id import SIDES, LayerAmax
from megatron_lowprec.quantization.error_stats import error_stats
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.random_stream import RandomStream, RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.transform import Transforms
from megatron_lowprec.recipe.schema import LinearRecipe

FIELDS = tuple(f"{way}_{part}" for way in ("rowwise", "columnwise") for part in ("data", "scale", "tensor_scale"))
"""Tensors of a ``QuantizedTensor``, in the order of ``GemmBackend.cast``."""

COMPUTE_DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes of the input, weight and output of a quantized layer."""


class LayerContext(NamedTuple):
    """What a layer's backends share.

    Attributes:
        recipe: specs of the three GEMMs.
        rounding: streams of stochastic rounding, by GEMM and tensor.
        transforms: Hadamard transforms of the GEMMs.
        layer_amax: amax histories, and the ranks that share scales.
        emulate_accumulator: emulated GEMMs with fast accumulation sum as Hopper's tensor cores do;
            ``check_accumulator`` must pass.
    """

    recipe: LinearRecipe
    rounding: Mapping[tuple[str, str], RandomStream]
    transforms: Transforms
    layer_amax: LayerAmax
    emulate_accumulator: bool = False


class CastRequest(NamedTuple):
    """What ``quantize`` returns and records.

    Attributes:
        rowwise, columnwise: directions to quantize. Both only with one spec, where ``fuses_directions``.
        update_amax: record the amax of a tensor with delayed scaling.
        sums: also sum over rows, [columns], if the same read gives it.
        codes: return codes and scales, rowwise only, for ``from_codes`` of any backend; granularity "tensor", "row" or
            blocks of one row. Formats without an FP8 dtype of torch are values in the matrix's dtype.
        beside: also return ``QuantizedTensor.beside``, of x where ``saves_codes``.
    """

    rowwise: bool
    columnwise: bool
    update_amax: bool = True
    sums: bool = False
    codes: bool = False
    beside: bool = False


ROWWISE, COLUMNWISE, BOTH = (
    (CastRequest(rowwise, columnwise, update_amax=False), CastRequest(rowwise, columnwise, update_amax=True))
    for rowwise, columnwise in ((True, False), (False, True), (True, True))
)
"""Requests by direction, indexed by ``update_amax``: a layer makes six in a step."""


class KnownAmax(NamedTuple):
    """An amax for a current scale that ``quantize`` need not find.

    Attributes:
        value: fp32 [1].
        reduced: it is over all ranks that share the scale, not only over this rank's part.
    """

    value: torch.Tensor
    reduced: bool = False


class GemmBackend(ABC):
    """Quantizes the tensors of one layer and multiplies them.

    The methods that are not abstract are for backends whose casts fuse with other work, or that have copies to cache.

    Args:
        context: of the layer.

    Attributes:
        name: of the backend's row in ``BACKENDS``; ``LayerBackends.built`` sets it.
        fuses_producer: casts compute or read a ``CastPrologue``, take a known amax, and sum over rows. dy is then
            quantized before both GEMMs; else for each GEMM, so that only one direction is in memory.
        one_cast: tensors that one cast may quantize for both GEMMs that use them; these share its spec.
        one_weight_amax: whether fprop and dgrad share one current scale of w, by its amax.
        caches_primary: GEMMs whose operand ``primary_weight`` copies, so that it is cached for a step.
    """

    name: str
    fuses_producer = one_weight_amax = False
    one_cast: frozenset[str] = frozenset()
    caches_primary: frozenset[str] = frozenset()

    @abstractmethod
    def __init__(self, context: LayerContext) -> None: ...

    @abstractmethod
    def quantize(
        self,
        tensor: str,
        matrix: torch.Tensor | CastPrologue,
        rng_step: RngStep,
        request: CastRequest,
        amax: KnownAmax | None = None,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """Quantize x [T, I], w [O, I] or dy [T, O]; returns the quantized tensor and the sums or None.

        Args:
            tensor: "input", "weight" or "grad_output". ``SIDES`` lists the GEMMs that contract its rows and columns.
            amax: for a current scale, if known; of ``input_amaxes`` for a transformed operand.
        """

    def cast(
        self,
        tensor: str,
        matrix: torch.Tensor,
        rng_step: RngStep,
        request: CastRequest,
        amax: KnownAmax | None = None,
    ) -> Sequence[torch.Tensor | None]:
        """``FIELDS`` of ``quantize`` in their order, then its sums; some of those that are None may be left out.

        Each has memory of its own, as outputs of an operator must.
        """
        made, sums = self.quantize(tensor, matrix, rng_step, request, amax)
        found = [each for name in FIELDS if (each := getattr(made, name)) is not None]
        if request.rowwise and request.columnwise:
            memory = [each.untyped_storage().data_ptr() for each in found]
            found = [each.clone() if memory[i] in memory[:i] else each for i, each in enumerate(found)]
        return [*found, sums]

    def empty(self, tensor: str, matrix: torch.Tensor, request: CastRequest) -> QuantizedTensor | None:
        """What ``quantize`` returns for a matrix of this size, dtype and device, with data and scales not filled.

        A compiler computes sizes by it; tokens may be symbolic. None for views of the matrix. The backend of a layer
        under torch.compile must have it.
        """
        raise NotImplementedError(f"backend {self.name} has no sizes for torch.compile")

    @abstractmethod
    def from_codes(self, quantized: QuantizedTensor, *, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Data and scale of this backend's operand, with the bits of ``quantize``.

        Args:
            quantized: rowwise codes [T, K] of ``quantize``.
            columnwise: of the transpose, for the GEMM that contracts tokens; granularity "tensor" only.
        """

    @abstractmethod
    def primary_weight(self, gemm: str, weight: Fp8Weight) -> QuantizedTensor | None:
        """Operand of fprop (rowwise) or dgrad (columnwise) from an FP8 primary weight [O, I], or a frozen one.

        None if a frozen weight has no codes for the GEMM, and ``quantize`` takes it.
        """

    @abstractmethod
    def gemm(
        self,
        name: str,
        a: QuantizedTensor,
        b: QuantizedTensor,
        out_dtype: torch.dtype,
        *,
        accumulate_into: torch.Tensor | None = None,
        overwrite: bool = False,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """fprop ``x @ w.T``, dgrad ``dy @ w`` or wgrad ``dy.T @ x`` of quantized tensors.

        Args:
            accumulate_into: fp32; add the product to it and return it.
            overwrite: write the product to ``accumulate_into`` instead of adding.
            bias: [O], added to the product of fprop.
        """

    def planned_rule(self, tensor: str, request: CastRequest) -> Fp8Rule | None:
        """The rule of a cast of ``quantize`` whose launches a compiler may make by their ``plan``; None without one."""
        return None

    def traces_gemm(self, name: str) -> bool:
        """Whether torch.compile traces a GEMM, one product of torch; else it becomes an operator."""
        return False

    def fuses_directions(self, tensor: str, matrix: torch.Tensor | CastPrologue, rng_step: RngStep) -> bool:
        """Whether one cast quantizes this matrix of ``one_cast`` for both GEMMs."""
        return True

    def supported_fusion(self, tensor: str) -> CastFusion:
        """Fusion of the cast for both GEMMs, which share a spec, with the producer of "input" or "grad_output"."""
        return None

    def accepts_split_input(self, tensor: str) -> bool:
        """Whether the cast for both GEMMs, which share a spec, reads a ``CastPrologue`` of several tensors."""
        return False

    def sum_tokens(self, dy_TO: torch.Tensor) -> torch.Tensor:
        """Gradient of a bias [O], where no cast sums."""
        return dy_TO.sum(dim=0)

    def weight_amax(self, w_OI: torch.Tensor) -> torch.Tensor | None:
        """fp32 [1] over the ranks that hold parts, if fprop and dgrad share one current scale of w; else None."""
        return None

    def input_amaxes(self, x_TI: torch.Tensor, rng_step: RngStep) -> tuple[torch.Tensor, torch.Tensor] | None:
        """fp32 [1] for ``quantize`` of x rowwise, and for that columnwise, over all ranks, found in one read.

        None where that saves no read.
        """
        return None

    def saves_codes(self, x_TI: torch.Tensor) -> bool:
        """Whether wgrad quantizes fprop's values of x from codes that the cast for fprop writes beside its operand."""
        return False

    def requantize(self, x: QuantizedTensor, rng_step: RngStep) -> QuantizedTensor:
        """x for wgrad from ``QuantizedTensor.beside``, with the bits of ``quantize``."""
        raise NotImplementedError(f"backend {self.name} saves no codes")

    def error_stats(self, name: str, tensor: str, matrix: torch.Tensor, rng_step: RngStep) -> torch.Tensor:
        """``operand_stats`` of a tensor [M, N] in a GEMM, by one more quantization; changes no history and no draw.

        The error is that of the tensor itself, also where fprop's operand is quantized again (``source: fprop``).
        All ranks that share the operand's scale must call it. The tensor is not empty, and the recipe quantizes it.
        """
        columnwise = name == SIDES[tensor][1]
        request = CastRequest(not columnwise, columnwise, update_amax=False)
        return error_stats(matrix, self.quantize(tensor, matrix, rng_step, request)[0], columnwise=columnwise)


def gemm_operands(
    name: str, a: QuantizedTensor, b: QuantizedTensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Data and scale of a, then of b, contracted dimension last."""
    first = (a.columnwise_data, a.columnwise_scale) if name == "wgrad" else (a.rowwise_data, a.rowwise_scale)
    second = (b.rowwise_data, b.rowwise_scale) if name == "fprop" else (b.columnwise_data, b.columnwise_scale)
    return *first, *second  # type: ignore[return-value]


def check_dtype(recipe: LinearRecipe, dtype: torch.dtype, layer: str) -> None:
    """Raise UserError if a quantized layer was given a weight in fp16, whose range overflows, or one by autocast.

    fp64 passes: with it layouts are compared without the order of sums.
    """
    if recipe.quantized and dtype == torch.float16:
        raise UserError(
            f"{layer} under recipe {recipe.name} has a weight of {dtype}, by its own dtype or by autocast, but recipes "
            f"compute in bfloat16 or float32: use one of them"
        )
