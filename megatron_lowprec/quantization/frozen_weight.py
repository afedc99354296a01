"""Frozen weights: codes and scales of the operands that GEMMs take, without a copy in the compute dtype."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.nn.functional import pad

from megatron_lowprec.errors import UserError
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.quantize.elements import encode, packed
from megatron_lowprec.kernels.quantize.reference import block_amax
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.quantizer import quantize_by_reference
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.token_rows import stored_codes
from megatron_lowprec.recipe.schema import GemmSpec, LinearRecipe, QuantSpec

_ATEN = torch.ops.aten


class StoredSpecs(NamedTuple):
    """What a frozen weight stores for fprop and dgrad.

    Attributes:
        rowwise: spec of the codes [O, I].
        columnwise: spec of codes [I, O] of their own; None if there are none.
        quantizes: the GEMMs that quantize the weight in each pass: from the dequantized codes.
    """

    rowwise: QuantSpec
    columnwise: QuantSpec | None = None
    quantizes: frozenset[str] = frozenset()


def stored_specs(recipe: LinearRecipe) -> StoredSpecs:
    """What a frozen weight stores so that fprop and dgrad take the bits that they would quantize.

    dgrad reads the transpose of fprop's codes if both GEMMs have one spec whose scales the transpose shares. It
    quantizes dequantized codes if its spec has ``source="fprop"``. Otherwise it has codes of its own.

    Raises:
        UserError: a GEMM needs the unquantized weight: it takes the weight in the compute dtype, behind a Hadamard
            transform, or rounded by draws.
    """
    rowwise, columnwise = recipe.fprop.weight, recipe.dgrad.weight
    for name, gemm in (("fprop", recipe.fprop), ("dgrad", recipe.dgrad)):
        if name == "dgrad" and columnwise is not None and columnwise.source == "fprop":
            continue
        reason = _why_not_stored(gemm)
        if reason is not None:
            raise UserError(f"{name} takes the weight {reason}")
    assert rowwise is not None
    assert columnwise is not None
    if columnwise.source == "fprop":
        return StoredSpecs(rowwise, quantizes=frozenset({"dgrad"}))
    return StoredSpecs(rowwise, None if rowwise == columnwise and rowwise.shares_directions else columnwise)


def _why_not_stored(gemm: GemmSpec) -> str | None:
    if gemm.weight is None:
        return "in the compute dtype"
    if gemm.hadamard is not None:
        return "behind a Hadamard transform"
    return "rounded by draws" if gemm.weight.random else None


class Codes(NamedTuple):
    """Codes and scales of a matrix [R, K], contracted dimension last.

    Attributes:
        data: uint8 [R, K] (int16 of formats of more than 8 bits), or two 4-bit codes a byte, [R, ceil(K / 2)].
        scale: decode scales of blocks, fp32 or uint8 codes.
        tensor_scale: fp32 decode scale above them, [1, 1] or one for each outer block; None if the spec has none.
    """

    data: torch.Tensor
    scale: torch.Tensor
    tensor_scale: torch.Tensor | None

    @staticmethod
    def of(matrix: torch.Tensor, spec: QuantSpec) -> Codes:
        """Quantize [R, K], any strides. Delayed scaling takes the matrix's own amax, with its margin."""
        amax = amax_of(matrix) if spec.scaling == "delayed" else None
        elements, scale, of_tensor = quantize_by_reference(matrix, spec, tensor_amax=amax)
        codes = encode(elements, FORMATS[spec.format])
        if FORMATS[spec.format].bits == 4:
            codes = packed(pad(codes, (0, codes.shape[1] % 2)))
        return Codes(codes.contiguous(), scale.contiguous(), of_tensor)

    def rowwise(self, spec: QuantSpec, shape: torch.Size, dtype: torch.dtype) -> QuantizedTensor:
        """Rowwise data [R, K] of values of the format's grid: FP8 codes in torch's dtype, others in ``dtype``."""
        data = stored_codes(self.data, spec, dtype)[:, : shape[1]]
        return QuantizedTensor(shape, dtype, spec, data, self.scale, rowwise_tensor_scale=self.tensor_scale)


def _codes_of(spec: QuantSpec, stored: Iterator[torch.Tensor]) -> Codes:
    return Codes(next(stored), next(stored), None if spec.tensor_scale is None else next(stored))


def amax_of(matrix: torch.Tensor) -> torch.Tensor:
    """fp32 [1], the largest magnitude."""
    return block_amax(matrix, (max(1, matrix.shape[0]), max(1, matrix.shape[1]))).view(1)


class FrozenWeight(Fp8Weight):
    """An ``Fp8Weight`` of any format, which no op writes; [O, I], or its transpose as GPT-2's layers store it.

    Ops that read it get its value in the compute dtype. GEMMs get the operands that a cast of the original weight
    would give, or cast the value where ``specs.quantizes`` names them.

    Attributes:
        specs: what is stored.
        stored: tensors of both ``Codes``; of other memory than this wrapper's, so autograd counts their versions.
        by_row: codes of the weight [O, I].
        by_column: codes of [I, O], or None.
        transposed: whether the shape is [I, O].
    """

    specs: StoredSpecs
    stored: tuple[torch.Tensor, ...]
    by_row: Codes
    by_column: Codes | None
    transposed: bool

    @staticmethod
    def __new__(
        cls,
        specs: StoredSpecs,
        stored: Sequence[torch.Tensor],
        shape_OI: tuple[int, ...],
        dtype: torch.dtype,
        amax: torch.Tensor | None = None,
        transposed: bool = False,
    ) -> FrozenWeight:
        size = shape_OI[::-1] if transposed else shape_OI
        self: FrozenWeight = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=stored[0].device)
        self.specs, self.stored, self.transposed = specs, tuple(stored), transposed
        given = iter(stored)
        self.by_row = _codes_of(specs.rowwise, given)
        self.by_column = None if specs.columnwise is None else _codes_of(specs.columnwise, given)
        self.spec, self.source = specs.rowwise, None
        self.codes, self.decode_scale = self.by_row.data, self.by_row.scale
        if amax is not None:
            self.main_amax = amax
        return self

    def holds(self, stored: Sequence[torch.Tensor]) -> bool:
        """Whether these are its tensors, where they were when it was made."""
        return all(map(operator.is_, self.stored, stored)) and self.device == stored[0].device

    @property
    def shape_OI(self) -> torch.Size:  # noqa: N802 - a shape suffix
        """Output and input features."""
        return torch.Size(reversed(self.shape)) if self.transposed else self.shape

    def dequantized(self) -> torch.Tensor:
        """fp32 values [O, I] of the codes."""
        return self.by_row.rowwise(self.spec, self.shape_OI, torch.float32).dequantize()

    def value(self) -> torch.Tensor:
        """The value as a plain tensor of the weight's shape, in the compute dtype."""
        value = self.dequantized().to(self.dtype)
        return value.t() if self.transposed else value

    def quantized(  # type: ignore[override]
        self, *, columnwise: bool, codes: bool, on_grid: bool = False
    ) -> QuantizedTensor | None:
        """As ``Fp8Weight``; None for a GEMM that quantizes the value."""
        assert not self.transposed, "GEMMs take [O, I]"
        if ("dgrad" if columnwise else "fprop") in self.specs.quantizes:
            return None
        found = super().quantized(columnwise=columnwise, codes=codes, on_grid=on_grid)
        if found.columnwise_data is not None:
            found.columnwise_data = found.columnwise_data.contiguous()  # as a cast gives them
        return found

    def _stored(self, columnwise: bool) -> tuple[QuantizedTensor, bool]:
        if columnwise and self.by_column is not None:
            assert self.specs.columnwise is not None
            return self.by_column.rowwise(self.specs.columnwise, torch.Size(reversed(self.shape)), self.dtype), False
        return self.by_row.rowwise(self.spec, self.shape, self.dtype), columnwise

    @property
    def requires_grad(self) -> bool:
        """False; setting True raises UserError."""
        return False

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        if requires_grad:
            raise UserError(_NO_GRADIENT)

    def requires_grad_(self, requires_grad: bool = True) -> FrozenWeight:
        """As the property."""
        self.requires_grad = requires_grad
        return self

    @property
    def data(self) -> torch.Tensor:
        """The weight, detached; assigning raises UserError."""
        return self.detach()

    @data.setter
    def data(self, _: torch.Tensor) -> None:
        raise UserError(_READ_ONLY)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FrozenWeight({tuple(self.shape)}, {self.spec.format} by {self.spec.granularity})"

    def alias(self, transpose: bool = False) -> FrozenWeight:
        """Another tensor of the same codes, or its transpose."""
        amax, transposed = getattr(self, "main_amax", None), self.transposed != transpose
        return FrozenWeight(self.specs, self.stored, self.shape_OI, self.dtype, amax, transposed)

    def write(self, func: Any, args: tuple[Any, ...]) -> NoReturn:
        """UserError."""
        raise UserError(_READ_ONLY)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        transposes = func is _ATEN.t.default or (func is _ATEN.transpose.int and {d % 2 for d in args[1:]} == {0, 1})
        if transposes and isinstance(args[0], FrozenWeight):
            return args[0].alias(transpose=True)
        return super().__torch_dispatch__(func, types, args, kwargs)


_READ_ONLY = (
    "a frozen weight is held as codes, which nothing can be added to or written into, such as merged adapters: call "
    "megatron_lowprec.finetuning.dequantize_frozen_weights(model) first"
)

_NO_GRADIENT = (
    "a frozen weight was asked for a gradient, but is held as codes, which do not train: call "
    "megatron_lowprec.finetuning.dequantize_frozen_weights(model) first"
)
