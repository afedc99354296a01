"""FP8 primary weights: FP8 codes and their scales, without a copy in the compute dtype.

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
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.dispatch import multi_tensor_cast_, partial_cast_, transpose_codes
from megatron_lowprec.kernels.format_dtypes import DTYPES
from megatron_lowprec.kernels.partial_cast.reference import Shard
from megatron_lowprec.kernels.quantize.reference import block_amax, fp32_encode_scale, scale_blocks
from megatron_lowprec.quantization.tensor import QuantizedTensor, as_numbers, block_sizes, quantized_direction
from megatron_lowprec.recipe.schema import QuantSpec

_ATEN = torch.ops.aten
_ALIASES = (_ATEN.detach.default, _ATEN.alias.default)
_RESHAPES = (_ATEN.expand.default, _ATEN.as_strided.default, _ATEN.view.default)
_NEW = (_ATEN.empty_like.default, _ATEN.zeros_like.default, _ATEN.new_empty.default, _ATEN.new_zeros.default)


def aliases(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an op gives its first argument, a weight, as it is."""
    if func in _RESHAPES:
        # autograd expands a gradient's like, FSDP2 a gathered weight, a DTensor views its local tensor
        weight, *layout = args
        return all(tuple(given) == own for given, own in zip(layout, (tuple(weight.shape), weight.stride())))
    return func in _ALIASES


class Fp8Weight(torch.Tensor):
    """Weight [O, I] with value ``codes * decode_scale`` of the block; to autograd a tensor of the compute dtype.

    Ops that read it get its value in that dtype. ``copy_`` is the only op that writes. It stores the values on the
    host until ``set_codes`` writes the codes of the main weights that the optimizer initialized from them.

    Attributes:
        codes: uint8 [O, I].
        decode_scale: fp32 [1], multiplies a decoded element; [ceil(O / rows), ceil(I / columns)] of blocks.
        main_amax: fp32, as decode_scale: amax of the quantized values over all ranks that share the scale.
        spec: quantization of the weight in fprop and dgrad; granularity "tensor", or square blocks, which both share.
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
        self.codes, self.decode_scale, self.main_amax = codes, decode_scale, main_amax
        self.spec, self.source = spec, source
        return self

    @classmethod
    def of(cls, values: torch.Tensor, spec: QuantSpec) -> Fp8Weight:
        """A weight from values in the compute dtype, by the rules of ``copy_``."""
        rows, columns = block_sizes(spec, values)
        blocks = (1,) if spec.block is None else (-(-values.shape[0] // rows), -(-values.shape[1] // columns))
        one = torch.ones(blocks, dtype=torch.float32, device=values.device)
        weight = cls(torch.empty_like(values, dtype=torch.uint8), one, one.clone(), spec, values.dtype)
        return weight.take(values)

    def take(self, values: torch.Tensor) -> Fp8Weight:
        """Quantize ``values`` [O, I] by their own amaxes, without a history, and store them in ``source``."""
        fp32 = values.detach().to(self.codes.device, torch.float32)
        self.main_amax.copy_(block_amax(fp32, block_sizes(self.spec, fp32)).view_as(self.main_amax))
        encode_scale = weight_encode_scale(self.main_amax, self.spec)
        self.decode_scale.copy_(torch.ones_like(encode_scale) / encode_scale)
        set_codes([(self, fp32.contiguous().view(-1), 0)], [encode_scale])
        self.source = values.detach().to("cpu", self.dtype, copy=True)
        return self

    def shard(self, values: torch.Tensor | None, start: int) -> Shard:
        """fp32 ``values`` [entries] of the weight from its entry ``start`` on; None for no entries."""
        held = self.decode_scale.new_empty(0) if values is None else values
        return Shard(held, start, (self.shape[0], self.shape[1]))

    def alias(self) -> Fp8Weight:
        """Another tensor of the same codes."""
        return Fp8Weight(self.codes, self.decode_scale, self.main_amax, self.spec, self.dtype, self.source)

    def write(self, func: Any, args: tuple[Any, ...]) -> Fp8Weight:
        """Run an op that writes the weight; NotImplementedError for any but ``copy_``."""
        if func is not _ATEN.copy_.default:
            raise NotImplementedError(f"an FP8 primary weight takes values only by copy_, not by {func}")
        return self.take(args[1].value() if isinstance(args[1], Fp8Weight) else args[1])

    def elements(self) -> torch.Tensor:
        """Codes as numbers of torch's FP8 dtype, [O, I]."""
        return self.codes.view(DTYPES[self.spec.format])

    def value(self) -> torch.Tensor:
        """The value as a plain tensor: ``source`` if present, else codes times decode scale."""
        if self.source is not None:
            return self.source.to(self.codes.device)
        elements, scale = self.elements(), torch.atleast_2d(self.decode_scale)
        return scale_blocks(elements.float(), scale, block_sizes(self.spec, elements)).to(self.dtype)

    def quantized(self, *, columnwise: bool, codes: bool, on_grid: bool = False) -> QuantizedTensor:
        """The weight for a GEMM that contracts its rows or its columns.

        Args:
            columnwise: [I, O] for dgrad, a copy if of codes; else [O, I].
            codes: FP8 codes for a native GEMM; else the same values in the compute dtype for an emulated one.
            on_grid: for an emulated GEMM keep scales apart from the values, powers of two as well.
        """
        stored, flips = self._stored(columnwise)
        (elements, scale), above, spec = stored.rowwise(), stored.rowwise_tensor_scale, stored.spec
        assert scale is not None
        assert spec is not None
        # as EmulatedGemms: scales that fold exactly are multiplied into the data
        folded = not codes and spec.folds_scale and not on_grid
        if folded:
            elements = scale_blocks(elements.float(), as_numbers(scale, spec.scale_format), block_sizes(spec, elements))
        elements = elements if codes else elements.to(self.dtype)
        if flips:
            elements, scale = transpose_codes(elements) if codes else elements.t(), scale.t()
            above = None if above is None else above.t()
        kept = None if folded else native_scale(scale, spec) if codes else scale
        return quantized_direction(self, spec, not columnwise, elements, scale=kept, tensor_scale=above)

    def _stored(self, columnwise: bool) -> tuple[QuantizedTensor, bool]:
        """Rowwise codes for a GEMM, and whether it takes their transpose."""
        scale = torch.atleast_2d(self.decode_scale)
        return QuantizedTensor(self.shape, self.dtype, self.spec, self.elements(), scale), columnwise

    # Megatron-core's names for ``source``, from which its optimizer initializes main weights
    def get_high_precision_init_val(self) -> torch.Tensor:
        """The value in the compute dtype; ``source``, on the host, if present."""
        return self.value() if self.source is None else self.source

    def clear_high_precision_init_val(self) -> None:
        """No-op: ``set_codes`` drops ``source``."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        scale = f"decode scale {self.decode_scale.item():.4g}" if self.decode_scale.numel() == 1 else "block scales"
        return f"Fp8Weight({tuple(self.shape)}, {self.spec.format}, {scale})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Fp8Weight):
            if aliases(func, args):
                return first.alias()
            if func in _NEW:
                like = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device="meta")
                return func(like, *args[1:], **{"device": first.device, **kwargs})
            if func._schema.is_mutable and func._schema.arguments[0].alias_info is not None:
                return first.write(func, args)
        args, kwargs = tree_map_only(Fp8Weight, lambda weight: weight.value(), (args, kwargs))
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
    """Write codes of shards of many weights, one launch for each spec, and drop each weight's ``source``.

    Args:
        shards: of each, (weight, fp32 values of the shard or None, row-major index of its first entry).
        encode_scales: of each, fp32, as many entries as the weight has scales, in row-major order.
    """
    by_spec: dict[QuantSpec, list[tuple[Shard, torch.Tensor, torch.Tensor]]] = {}
    for (weight, values, start), scale in zip(shards, encode_scales, strict=True):
        weight.source = None
        if values is not None:
            codes = weight.codes.view(-1)[start : start + values.numel()]
            by_spec.setdefault(weight.spec, []).append((weight.shard(values, start), scale.view(-1), codes))
    for spec, parts in by_spec.items():
        many, scales, into = zip(*parts, strict=True)
        if spec.block is None:
            multi_tensor_cast_([shard.values for shard in many], torch.cat(scales), FORMATS[spec.format], into)
        else:
            partial_cast_(many, torch.cat(scales), FORMATS[spec.format], spec.block, into)


def native_scale(scale: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Scales for a native GEMM: those of square blocks row-major, with columns zero-padded to multiples of 4."""
    missing = -scale.shape[1] % 4 if spec.granularity == "128x128" else 0
    return pad(scale, (0, missing)) if missing else scale.contiguous()
