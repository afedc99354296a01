"""Compares a quantizer's results with those of a group, bit for bit but for stated exceptions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megatron_lowprec.conformance.vectors import Case, Group, Tensors
from megatron_lowprec.errors import UserError
from megatron_lowprec.files import parse_json
from megatron_lowprec.formats import E8M0_NAN, FORMATS, Format
from megatron_lowprec.kernels.quantize.elements import decode, unpacked

Adapter = Callable[[str, str, torch.Tensor | None, Tensors, dict[str, str]], Mapping[str, torch.Tensor] | None]
"""(case, group, x, given, metadata) -> results by their keys, or None for a quantizer that the project lacks."""
_CODES = re.compile(r"codes(_t)?$")


@dataclass(frozen=True)
class Outcome:
    """Of one group.

    Attributes:
        entries: compared.
        differences: one line for each result that differs or has another shape.
        differ: entries that differ.
        left_out: results that the adapter did not return; all of them where it declined the group.
    """

    entries: int = 0
    differences: tuple[str, ...] = ()
    differ: int = 0
    left_out: tuple[str, ...] = ()

    def __add__(self, other: Outcome) -> Outcome:
        """Of both."""
        return Outcome(
            self.entries + other.entries,
            self.differences + other.differences,
            self.differ + other.differ,
            self.left_out + other.left_out,
        )


def compare(case: Case, group: Group, adapter: Adapter) -> Outcome:
    """What an adapter gives for a group.

    Raises:
        UserError: the adapter returns something other than tensors by name, or None.
    """
    found = adapter(case.name, group.name, group.x, dict(group.given), dict(case.meta))
    found = {} if found is None else found
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise UserError(
            f"the adapter returned no dict of tensors for {case.name}, {group.name}; return None to decline"
        )
    entries, differ, lines, left_out = 0, 0, list[str](), list[str]()
    for key, expected in group.results.items():
        place = f"{case.name} {group.name}.{key}" if group.name else f"{case.name} {key}"
        if key not in found:
            left_out.append(place)
            continue
        got = found[key].detach().cpu()
        if got.is_floating_point() and got.element_size() == 1:
            got = got.view(torch.uint8)  # codes in a dtype of torch
        if got.shape != expected.shape:
            lines.append(f"{place}: expected shape {tuple(expected.shape)}, got {tuple(got.shape)}")
            differ += expected.numel()
            continue
        wrong = _differing(case, group, key, expected, got)
        entries += expected.numel()
        if wrong.any():
            count = int(wrong.sum())
            at = tuple(wrong.nonzero()[0].tolist())
            packed = _is_packed(group, key, expected)
            fmt = _format(case, key, packed)
            want, have = (_shown(each[at], fmt, packed) for each in (expected, got))
            lines.append(f"{place}: {count} of {expected.numel()} differ; at {list(at)} expected {want}, got {have}")
            differ += count
    return Outcome(entries, tuple(lines), differ, tuple(left_out))


def _differing(case: Case, group: Group, key: str, expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Where two results differ, in the shape of the result."""
    packed = _is_packed(group, key, expected)
    fmt, want, have = _format(case, key, packed), expected, got
    if packed:
        want, have = unpacked(want), unpacked(have)
    if fmt is not None:
        wrong, want, have = want != have, decode(want, fmt), decode(have, fmt)
    else:
        wrong = want != have
        wrong |= (want == 0) & (want.signbit() != have.signbit())
    wrong &= ~(want.isnan() & have.isnan())
    if case.meta.get("zero_sign") == "ignored":
        wrong &= ~((want == 0) & (have == 0))
    if (tolerance := _tolerances(case).get(key)) is not None:
        wrong &= ~((have.double() - want.double()).abs() <= tolerance * want.double().abs())
    wrong &= ~_excused(group, key, wrong.shape)
    return wrong.view(*expected.shape, 2).any(-1) if packed else wrong


def _tolerances(case: Case) -> dict[str, float]:
    """Largest relative differences, by result."""
    text = case.meta.get("tolerance", "{}")
    try:
        return {key: float(value) for key, value in parse_json(text).items()}
    except (TypeError, ValueError) as error:
        raise UserError(f"{case.name}: tolerance {text[:100]!r} is no JSON object of numbers ({error})") from None


def _excused(group: Group, key: str, shape: torch.Size) -> torch.Tensor:
    """Entries that are not compared: marked ones, and codes in blocks whose E8M0 scale is NaN."""
    of = key.rpartition(".")[0]
    marks = [mark != 0 for name, mark in group.marks.items() if name.rpartition(".")[0] == of]
    if "scale" not in key:
        scale = group.results.get(f"{of}.scale_e8m0" if of else "scale_e8m0")
        marks += [] if scale is None else [scale == E8M0_NAN]
    found = torch.zeros(shape, dtype=torch.bool)
    for mark in marks:
        if mark.dim() == len(shape) and all(size >= marked for size, marked in zip(shape, mark.shape, strict=True)):
            found |= _spread(mark, shape)
    return found


def _spread(marks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Marks of blocks as marks of entries; a block has a power of two of entries along each dimension."""
    for dim, size in enumerate(shape):
        block = 1
        while -(-size // block) > marks.shape[dim]:
            block *= 2
        marks = marks.repeat_interleave(block, dim).narrow(dim, 0, size)
    return marks


def _format(case: Case, key: str, packed: bool) -> Format | None:
    """Format of codes and of coded scales; None for numbers and other bytes."""
    if _CODES.search(key):
        named = re.search(r"e\dm\d", case.name)
        return FORMATS.get(case.meta.get("format") or (named[0] if named else "e2m1" if packed else "e4m3"))
    scale = re.search(r"scale_(\w+)$", key)
    return FORMATS.get(scale[1]) if scale else None


def _is_packed(group: Group, key: str, codes: torch.Tensor) -> bool:
    """Whether each byte holds two codes, the first in the low bits: codes half as wide as the input."""
    wide = group.x is not None and codes.shape[-1] * 2 == group.x.shape[0 if key.endswith("_t") else -1]
    return bool(_CODES.search(key)) and wide


def _shown(value: torch.Tensor, fmt: Format | None, packed: bool) -> str:
    """A number; a code in hexadecimal, with its value."""
    if fmt is None:
        return f"{value.item():.9g}" if value.is_floating_point() else str(value.item())
    codes = unpacked(value.view(1)) if packed else value
    values = decode(codes.view(-1), fmt).tolist()
    return f"{int(value):#04x} ({', '.join(f'{each:g}' for each in values)})"
