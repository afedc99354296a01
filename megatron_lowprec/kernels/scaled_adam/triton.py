"""The two passes of ``reference.py``, each in one launch for all tensors with equal hyperparameters.

Bytes an entry with FP8-LM's formats and fp32 gradients: the first pass reads 9, the second reads 9 and writes 7.
On fp32 state the second pass alone reads 16 and writes 14, with the model's bf16 weight; torch's clipping, fused AdamW
and copy move 42. Stochastic rounding adds three Philox
calls for eight entries to the second pass. The tensors' addresses are a table in device memory, cached by them since
most do not move: describing hundreds of tensors takes the host longer than the launch. The grid is (part, tensor), as
in ``multi_tensor_cast``.
"""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron_lowprec.formats import FORMATS, Format
from megatron_lowprec.kernels.amax.triton_ops import amax_along, larger
from megatron_lowprec.kernels.cast_fp8.rule import CodeConstants, code_constants
from megatron_lowprec.kernels.cast_fp8.triton_ops import from_fp8, round_to_bf16, to_fp8
from megatron_lowprec.kernels.format_dtypes import DTYPES
from megatron_lowprec.kernels.philox.reference import VALUES_PER_CALL
from megatron_lowprec.kernels.philox.triton import philox
from megatron_lowprec.kernels.quantize.triton_ops import STOCHASTIC, round_to_grid
from megatron_lowprec.kernels.scaled_adam.reference import FORMAT_OF, Hyperparameters, Slot, Stream

_BLOCK, _MOST_PARTS = 1024, 512
_ALIGNMENT = 16  # of addresses in bytes, and of entry counts, for vector loads and stores
_OPTIONS = {"BLOCK": _BLOCK, "num_warps": 4, "enable_fp_fusion": False}
# Columns of the table: addresses of gradient, weight, three parts of the state, scales; entries; ``Stream``.
_COLUMNS = tl.constexpr(16)
_STREAM = tl.constexpr(7)
# named values of KIND
_FP32, _BF16, _FP16, _E4M3, _E5M2, _NONE = (tl.constexpr(number) for number in range(6))
_BF16_FORMAT = Format("bf16", 8, 7, bias=127, max=torch.finfo(torch.bfloat16).max, specials="ieee", source="")
_KINDS = {
    torch.float32: _FP32.value,
    torch.bfloat16: _BF16.value,
    torch.float16: _FP16.value,
    DTYPES["e4m3"]: _E4M3.value,
    DTYPES["e5m2"]: _E5M2.value,
    None: _NONE.value,
}


class Numbers(NamedTuple):
    """The argument ``numbers`` of a kernel: Python floats, which become fp32 at the launch.

    Attributes:
        decay: factor of the main weight, 1 - lr * weight_decay.
        grow: coefficient of the gradient in the new first moment.
        keep_square, grow_square: coefficients of the old second moment and of the squared gradient in the new one.
        root_correction, eps, step_size: as in ``Hyperparameters``.
    """

    decay: float
    grow: float
    keep_square: float
    grow_square: float
    root_correction: float
    eps: float
    step_size: float

    @staticmethod
    def of(step: Hyperparameters) -> "Numbers":
        """Numbers of a step's hyperparameters."""
        decay, eps = 1 - step.lr * step.weight_decay, step.eps
        return Numbers(decay, 1 - step.beta1, step.beta2, 1 - step.beta2, step.root_correction, eps, step.step_size)


class SlotConstants(NamedTuple):
    """The constexpr ``SLOT`` of a kernel.

    Attributes:
        GRAD, WEIGHT, FIRST, SECOND, MAIN: KIND of each tensor's dtype.
        ALIGNED: whether all addresses and sizes are multiples of ``_ALIGNMENT``.
        STOCHASTIC: whether codes are rounded stochastically.
        SHIFTED: whether a slot begins within a group of eight entries, which share a Philox call.
        SCALED: whether the state has scales.
    """

    GRAD: int
    WEIGHT: int
    FIRST: int
    SECOND: int
    MAIN: int
    ALIGNED: bool
    STOCHASTIC: bool
    SHIFTED: bool
    SCALED: bool


class StateConstants(NamedTuple):
    """The constexpr ``STATE`` of a kernel: constants of the conversion to each format."""

    E4M3: CodeConstants
    E5M2: CodeConstants
    FP16: CodeConstants
    BF16: CodeConstants


@triton.jit
def _pointer(address, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    if KIND == _FP32:
        pointer = address.to(tl.pointer_type(tl.float32))
    elif KIND == _BF16:
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif KIND == _FP16:
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _decode(stored, KIND: tl.constexpr):
    """fp32 values of stored entries."""
    if KIND == _FP32 or KIND == _BF16 or KIND == _FP16:  # noqa: SIM109 - Triton has no `in`
        value = stored.to(tl.float32)
    elif KIND == _E4M3:
        value = from_fp8(stored, 3, -6)
    else:
        value = from_fp8(stored, 2, -14)
    return value


@triton.jit
def _encode(value, KIND: tl.constexpr, STATE: tl.constexpr):
    """fp32 entries in their stored dtype, rounded to nearest even."""
    E4M3: tl.constexpr = STATE.E4M3  # Triton 3.6 cannot pass a field of an argument to a function
    E5M2: tl.constexpr = STATE.E5M2
    NATIVE: tl.constexpr = E4M3.NATIVE
    if KIND == _E4M3:
        stored = to_fp8(value, E4M3)
    elif KIND == _E5M2:
        stored = to_fp8(value, E5M2)
    elif KIND == _FP16:
        stored = value.to(tl.float16)
    elif KIND == _BF16:
        stored = round_to_bf16(value, NATIVE).to(tl.bfloat16)
    else:
        stored = value
    return stored


@triton.jit
def _not_zero(value, KIND: tl.constexpr, STATE: tl.constexpr):
    """Positive entries raised to at least the smallest number of their stored format, if it has a scale."""
    if KIND != _FP32 and KIND != _BF16:
        CODES: tl.constexpr = STATE.E4M3 if KIND == _E4M3 else STATE.E5M2 if KIND == _E5M2 else STATE.FP16
        value = tl.where(value > 0.0, tl.maximum(value, 2.0 ** (CODES.MIN_EXPONENT - CODES.MANTISSA)), value)
    return value


@triton.jit
def _on_grid(value, row, group, step, PART: tl.constexpr, KIND: tl.constexpr, STATE: tl.constexpr):
    """fp32 entries rounded stochastically to the grid of their stored format; unchanged for fp32.

    Args:
        row, group, step, PART: arguments of ``_draw``.
    """
    if KIND != _FP32:
        WIDE: tl.constexpr = STATE.FP16 if KIND == _FP16 else STATE.BF16
        CODES: tl.constexpr = STATE.E4M3 if KIND == _E4M3 else STATE.E5M2 if KIND == _E5M2 else WIDE
        SHIFT: tl.constexpr = 23 - CODES.MANTISSA
        BITS: tl.constexpr = 16 if SHIFT > 16 else SHIFT
        draws = _draw(row, group, step, PART, value.shape[0])
        rounded = round_to_grid(
            value, draws, 1 << (SHIFT - BITS), CODES.MANTISSA, CODES.MIN_EXPONENT, CODES.MAX, STOCHASTIC, BITS, True
        )
        value = tl.where(value == value, rounded, value)
    return value


@triton.jit
def _draw(row, first, step, PART: tl.constexpr, BLOCK: tl.constexpr):
    """``Stream.draw`` of BLOCK entries: uint32 [BLOCK]; ``first``, a multiple of 8, is an index in the rank's shard."""
    entry = first + 8 * tl.arange(0, BLOCK // 8)
    stream = row + _STREAM
    columns = tl.load(stream + 3)
    line = entry // columns
    column = entry - line * columns
    whole_line = line + tl.load(stream + 6) + tl.where(line >= tl.load(stream + 7), tl.load(stream + 8), 0)
    call = ((whole_line * tl.load(stream + 4) + tl.load(stream + 5) + column) // 8).to(tl.uint32)
    zero = tl.zeros(call.shape, tl.uint32)
    key0, key1 = tl.load(stream).to(tl.uint32), tl.load(stream + 1).to(tl.uint32)
    w0, w1, w2, w3 = philox(call, zero, zero + step.to(tl.uint32), zero + PART, key0, key1)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), [BLOCK])


@triton.jit
def _load(address, at, inside, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    return _decode(tl.load(_pointer(address, KIND, ALIGNED) + at, mask=inside, other=0), KIND)


@triton.jit
def _tensor(table_ptr, SLOT: tl.constexpr):
    """Table row and number of entries of a program's tensor."""
    row = table_ptr + _COLUMNS * tl.program_id(1)
    count = tl.load(row + 6)
    if SLOT.ALIGNED:
        count = tl.multiple_of(count, 16)
    return row, count


@triton.jit
def _updated(row, at, inside, numbers, factor, SLOT: tl.constexpr):
    """New state in fp32, as ``reference._updated``; ``row`` of the table, ``numbers`` of ``Numbers``."""
    grad = _load(tl.load(row), at, inside, SLOT.GRAD, SLOT.ALIGNED) * factor
    exp_avg = _load(tl.load(row + 2), at, inside, SLOT.FIRST, SLOT.ALIGNED)
    exp_avg_sq = _load(tl.load(row + 3), at, inside, SLOT.SECOND, SLOT.ALIGNED)
    master = _load(tl.load(row + 4), at, inside, SLOT.MAIN, SLOT.ALIGNED)
    if SLOT.SCALED:
        scales = tl.load(row + 5).to(tl.pointer_type(tl.float32))
        exp_avg *= tl.load(scales)
        exp_avg_sq *= tl.load(scales + 1)
        master *= tl.load(scales + 2)
    master = master * numbers.decay
    exp_avg = exp_avg + (grad - exp_avg) * numbers.grow
    exp_avg_sq = exp_avg_sq * numbers.keep_square + grad * grad * numbers.grow_square
    root = tl.sqrt_rn(exp_avg_sq) * numbers.root_correction
    master = master - numbers.step_size * tl.div_rn(exp_avg, root + numbers.eps)
    return exp_avg, exp_avg_sq, master


@triton.jit
def _adam_amax_kernel(table_ptr, amax_ptr, factor_ptr, numbers, SLOT: tl.constexpr, BLOCK: tl.constexpr):
    row, count = _tensor(table_ptr, SLOT)
    factor = tl.load(factor_ptr)
    first, second, main = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for block in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = block + tl.arange(0, BLOCK)
        # Entries outside are zeros in all of the state, before and after the update.
        exp_avg, exp_avg_sq, master = _updated(row, at, at < count, numbers, factor, SLOT)
        first, second, main = larger(first, tl.abs(exp_avg)), larger(second, exp_avg_sq), larger(main, tl.abs(master))
    cells = (amax_ptr + 3 * tl.program_id(1)).to(tl.pointer_type(tl.int32), bitcast=True) + tl.arange(0, 1)
    tl.atomic_max(cells, amax_along(first, 0).to(tl.int32, bitcast=True), sem="relaxed")
    tl.atomic_max(cells + 1, amax_along(second, 0).to(tl.int32, bitcast=True), sem="relaxed")
    tl.atomic_max(cells + 2, amax_along(main, 0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=["step"])
def _adam_update_kernel(
    table_ptr,
    scale_ptr,
    factor_ptr,
    numbers,
    step,
    SLOT: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, count = _tensor(table_ptr, SLOT)
    factor = tl.load(factor_ptr)
    count = tl.where(factor == factor, count, 0)
    if SLOT.ALIGNED:
        count = tl.multiple_of(count, 16)
    first, second, main = 1.0, 1.0, 1.0
    if SLOT.SCALED:
        scales = scale_ptr + 3 * tl.program_id(1)
        first, second, main = tl.load(scales), tl.load(scales + 1), tl.load(scales + 2)
    begin, shift = tl.load(row + _STREAM + 2), 0
    if SLOT.SHIFTED:  # aligns blocks to groups
        shift = (begin % 8).to(tl.int32)
    for block in range(tl.program_id(0).to(tl.int64) * BLOCK, count + shift, tl.num_programs(0) * BLOCK):
        at = block + tl.arange(0, BLOCK)
        inside = at < count
        if SLOT.SHIFTED:
            at -= shift
            inside = (at >= 0) & (at < count)
        exp_avg, exp_avg_sq, master = _updated(row, at, inside, numbers, factor, SLOT)
        mean, square, kept = exp_avg * first, _not_zero(exp_avg_sq * second, SLOT.SECOND, STATE), master * main
        if SLOT.STOCHASTIC:
            group = block + (begin - shift)
            mean = _on_grid(mean, row, group, step, 0, SLOT.FIRST, STATE)
            square = _on_grid(square, row, group, step, 1, SLOT.SECOND, STATE)
            kept = _on_grid(kept, row, group, step, 2, SLOT.MAIN, STATE)
        mean, square = _encode(mean, SLOT.FIRST, STATE), _encode(square, SLOT.SECOND, STATE)
        kept = _encode(kept, SLOT.MAIN, STATE)
        tl.store(_pointer(tl.load(row + 2), SLOT.FIRST, SLOT.ALIGNED) + at, mean, mask=inside)
        tl.store(_pointer(tl.load(row + 3), SLOT.SECOND, SLOT.ALIGNED) + at, square, mask=inside)
        tl.store(_pointer(tl.load(row + 4), SLOT.MAIN, SLOT.ALIGNED) + at, kept, mask=inside)
        if SLOT.WEIGHT != _NONE:
            weight = _decode(kept, SLOT.MAIN)
            if SLOT.SCALED:
                weight *= tl.div_rn(1.0, main)
            weight = _encode(weight, SLOT.WEIGHT, STATE)
            tl.store(_pointer(tl.load(row + 1), SLOT.WEIGHT, SLOT.ALIGNED) + at, weight, mask=inside)


class _Slots(NamedTuple):
    """Launch arguments derived from slots."""

    table: torch.Tensor  # int64 [slots, _COLUMNS]
    constants: SlotConstants
    grid: tuple[int, int]


_described: dict[Hashable, _Slots] = {}
_MOST_DESCRIBED = 64


def _describe(slots: Sequence[Slot], scaled: bool) -> _Slots:
    """Table, constants and grid of slots; cached by their addresses, sizes, dtypes and streams."""
    device, places = slots[0].grad.device, []
    for grad, weight, exp_avg, exp_avg_sq, master, decode_scale, stream in slots:
        addresses = (
            grad.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            exp_avg.data_ptr(),
            exp_avg_sq.data_ptr(),
            master.data_ptr(),
            decode_scale.data_ptr() if scaled else 0,
        )
        places.append((*addresses, grad.numel(), stream))
    key = (device, scaled, _kinds(slots[0]), tuple(places))  # all slots have the same dtypes
    known = _described.get(key)
    if known is None:
        if len(_described) >= _MOST_DESCRIBED:
            _described.clear()
        rows = [(*place[:-1], *_stream_numbers(slot.stream)) for place, slot in zip(places, slots, strict=True)]
        table = torch.tensor(rows, dtype=torch.int64, device=device)
        known = _described[key] = _Slots(table, _constants(slots, rows, scaled), _grid(slots))
    return known


@lru_cache(maxsize=8)
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)


def _kinds(slot: Slot) -> tuple[torch.dtype | None, ...]:
    return tuple(None if each is None else each.dtype for each in (slot.grad, slot.weight, *slot.state))


def _stream_numbers(stream: Stream | None) -> tuple[int, ...]:
    """Columns of a table row from ``_STREAM`` on."""
    if stream is None:
        return (0,) * (_COLUMNS.value - _STREAM.value)
    key, columns, first, whole_columns, first_column, rows = stream
    return (*key, first, columns, whole_columns, first_column, *rows)


def _constants(slots: Sequence[Slot], rows: Sequence[tuple[int, ...]], scaled: bool) -> SlotConstants:
    for slot in slots:  # the kernel gets only addresses
        tensors = (slot.grad, slot.weight, *slot.state)
        assert all(t is None or (t.is_contiguous() and t.numel() == slot.grad.numel()) for t in tensors)
        assert not scaled or (slot.decode_scale.is_contiguous() and slot.decode_scale.dtype == torch.float32)
    (kinds,) = {_kinds(slot) for slot in slots}
    (stochastic,) = {slot.stream is not None for slot in slots}
    shifted = any(slot.stream.first % VALUES_PER_CALL for slot in slots if slot.stream is not None)
    grad, weight, first, second, main = (_KINDS[kind] for kind in kinds)
    aligned = not shifted and all(number % _ALIGNMENT == 0 for row in rows for number in (*row[:5], row[6]))
    return SlotConstants(grad, weight, first, second, main, aligned, stochastic, shifted, scaled)


def _grid(slots: Sequence[Slot]) -> tuple[int, int]:
    return min(_MOST_PARTS, triton.cdiv(max(slot.grad.numel() for slot in slots), _BLOCK)), len(slots)


def update_amax(slots: Sequence[Slot], step: Hyperparameters, grad_factor: torch.Tensor | None = None) -> torch.Tensor:
    """As ``reference.update_amax``, bit for bit; all slots have the same dtypes and rounding."""
    amax = torch.zeros(len(slots), 3, device=slots[0].grad.device)
    found, factor = _describe(slots, scaled=True), _one(amax.device) if grad_factor is None else grad_factor
    _adam_amax_kernel[found.grid](found.table, amax, factor, Numbers.of(step), SLOT=found.constants, **_OPTIONS)
    return amax


def update_(
    slots: Sequence[Slot],
    step: Hyperparameters,
    encode_scales: torch.Tensor | None,
    grad_factor: torch.Tensor | None = None,
) -> None:
    """As ``reference.update_``, bit for bit; all slots have the same dtypes and rounding."""
    device = slots[0].grad.device
    found = _describe(slots, scaled=encode_scales is not None)
    formats = (FORMATS["e4m3"], FORMATS["e5m2"], FORMAT_OF[torch.float16], _BF16_FORMAT)
    state = StateConstants(*(code_constants(fmt, device) for fmt in formats))
    factor = _one(device) if grad_factor is None else grad_factor
    scales = factor if encode_scales is None else encode_scales.contiguous()
    _adam_update_kernel[found.grid](
        found.table, scales, factor, Numbers.of(step), step.step, SLOT=found.constants, STATE=state, **_OPTIONS
    )
    if encode_scales is not None:
        decode_scales = [slot.decode_scale for slot in slots]
        new = 1 / encode_scales
        if grad_factor is not None:
            new = torch.where(grad_factor.isnan(), torch.stack(decode_scales), new)
        torch._foreach_copy_(decode_scales, list(new.unbind()))
