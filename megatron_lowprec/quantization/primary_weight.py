"""FP8 primary weights: FP8 codes and one scale, without a copy in the compute dtype.

The codes are quantized from the optimizer's fp32 main weight. The usual path rounds the main weight to bf16 first;
codes differ where that rounding crosses the midpoint between two of them.

The weight is a tensor subclass that reports bf16, as TransformerEngine's does, not a float8 parameter: autograd gives
a parameter a gradient of its dtype, and Megatron-core's optimizers group parameters by dtype and support no FP8.
``mcore.optim.fp8_param_gather`` implements Megatron-core's interface of such tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.dispatch import multi_tensor_cast_
from megatron_lowprec.kernels.multi_tensor_cast.reference import DTYPES, fp8_codes
from megatron_lowprec.kernels.quantize.reference import fp32_encode_scale
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.schema import QuantSpec

_ATEN = torch.ops.aten
_NEW = (_ATEN.empty_like.default, _ATEN.zeros_like.default, _ATEN.new_empty.default, _ATEN.new_zeros.default)


class Fp8Weight(torch.Tensor):
    """Weight [O, I] with value ``codes * decode_scale``; to autograd a tensor of the compute dtype.

    Ops that read it get its value in that dtype. ``copy_`` is the only op that writes. It stores the values on the
    host until ``set_codes`` writes the codes of the main weights that the optimizer initialized from them.

    Attributes:
        codes: uint8 [O, I].
        decode_scale: fp32 [1], multiplies a decoded element.
        main_amax: fp32 [1], amax of the quantized values over all ranks that share the scale.
        spec: quantization of the weight in fprop and dgrad; granularity "tensor".
        source: the values given to ``copy_``, in the compute dtype on the host, or None.
    """

    codes: torch.Tensor
    decode_scale: torch.Tensor
    main_amax: torch.Tensor
    spec: QuantSpec
    source: torch.Tensor | None

    # only __torch_dispatch__, below autograd, handles this class
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        codes: torch.Tensor,
        decode_scale: torch.Tensor,
        main_amax: torch.Tensor,
        spec: QuantSpec,
        dtype: torch.dtype,
        source: torch.Tensor | None = None,
    ) -> Fp8Weight:
        self: Fp8Weight = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        self.codes, self.decode_scale, self.main_amax, self.spec, self.source = (
            codes,
            decode_scale,
            main_amax,
            spec,
            source,
        )
        return self

    @classmethod
    def of(cls, values: torch.Tensor, spec: QuantSpec) -> Fp8Weight:
        """A weight from values in the compute dtype, by the rules of ``copy_``."""
        one = torch.ones(1, dtype=torch.float32, device=values.device)
        weight = cls(torch.empty_like(values, dtype=torch.uint8), one, one.clone(), spec, values.dtype)
        return weight.take(values)

    def take(self, values: torch.Tensor) -> Fp8Weight:
        """Quantize ``values`` [O, I] by their own amax, without a history, and store them in ``source``."""
        self.source = values.detach().to("cpu", self.dtype, copy=True)
        fp32 = values.detach().to(self.codes.device, torch.float32)
        self.main_amax.copy_(fp32.abs().amax().view(1))
        encode_scale = weight_encode_scale(self.main_amax, self.spec)
        self.decode_scale.copy_(torch.ones_like(encode_scale) / encode_scale)
        self.codes.copy_(fp8_codes(fp32, encode_scale, FORMATS[self.spec.format]))
        return self

    def elements(self) -> torch.Tensor:
        """Codes as numbers of torch's FP8 dtype, [O, I]."""
        return self.codes.view(DTYPES[self.spec.format])

    def value(self) -> torch.Tensor:
        """The value as a plain tensor: ``source`` if present, else codes times decode scale."""
        if self.source is not None:
            return self.source.to(self.codes.device)
        return (self.elements().float() * self.decode_scale).to(self.dtype)

    def quantized(self, *, columnwise: bool, codes: bool) -> QuantizedTensor:
        """The weight for a GEMM that contracts its rows or its columns.

        Args:
            columnwise: [I, O] for dgrad, a copy if of codes; else [O, I].
            codes: FP8 codes for a native GEMM; else the same values in the compute dtype for an emulated one.
        """
        scale = self.decode_scale.view(1, 1)
        quantized = QuantizedTensor(self.shape, self.dtype, self.spec)
        if not columnwise:
            quantized.rowwise_data, quantized.rowwise_scale = (
                self.elements() if codes else self.elements().to(self.dtype),
                scale,
            )
        elif codes:
            quantized.columnwise_data = self.codes.t().contiguous().view(DTYPES[self.spec.format])
            quantized.columnwise_scale = scale
        else:
            quantized.columnwise_data, quantized.columnwise_scale = self.elements().to(self.dtype).t(), scale
        return quantized

    # Megatron-core's names for ``source``, from which its optimizer initializes main weights
    def get_high_precision_init_val(self) -> torch.Tensor:
        """The value in the compute dtype; ``source``, on the host, if present."""
        return self.value() if self.source is None else self.source

    def clear_high_precision_init_val(self) -> None:
        """No-op: ``set_codes`` drops ``source``."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Fp8Weight({tuple(self.shape)}, {self.spec.format}, decode scale {self.decode_scale.item():.4g})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Fp8Weight):
            if func in (_ATEN.detach.default, _ATEN.alias.default) or (
                # autograd expands a gradient's like, FSDP2 a gathered weight
                func in (_ATEN.expand.default, _ATEN.as_strided.default) and tuple(args[1]) == tuple(first.shape)
            ):
                return cls(first.codes, first.decode_scale, first.main_amax, first.spec, first.dtype, first.source)
            if func is _ATEN.copy_.default:
                return first.take(args[1].value() if isinstance(args[1], Fp8Weight) else args[1])
            if func in _NEW:
                return func(first.codes, *args[1:], **{**kwargs, "dtype": kwargs.get("dtype") or first.dtype})
            if func._schema.is_mutable and func._schema.arguments[0].alias_info is not None:
                raise NotImplementedError(f"an FP8 primary weight takes values by copy_ alone, not by {func}")
        args, kwargs = tree_map_only(Fp8Weight, Fp8Weight.value, (args, kwargs))
        return func(*args, **kwargs)


def weight_encode_scale(amax: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """fp32 encode scales, which multiply weights before rounding, from amaxes of the same shape.

    An amax of 0 (a history before its first step, or a weight of zeros) gives 1.
    """
    margin = spec.margin if spec.scaling == "delayed" else 0
    return fp32_encode_scale(amax, FORMATS[spec.format], spec.scale_rule, spec.amax_floor, margin)


def set_codes(
    shards: Sequence[tuple[Fp8Weight, torch.Tensor | None, int]], encode_scales: Sequence[torch.Tensor]
) -> None:
    """Write codes of shards of many weights, one launch for each format, and drop each weight's ``source``.

    Args:
        shards: of each, (weight, fp32 values of the shard or None, row-major index of its first entry).
        encode_scales: of each, fp32 [1].
    """
    by_format: dict[str, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
    for (weight, values, start), scale in zip(shards, encode_scales, strict=True):
        weight.source = None
        if values is not None:
            codes = weight.codes.view(-1)[start : start + values.numel()]
            by_format.setdefault(weight.spec.format, []).append((values, scale, codes))
    for name, parts in by_format.items():
        many, scales, into = zip(*parts, strict=True)
        multi_tensor_cast_(many, torch.cat(scales), FORMATS[name], into)
