"""Whether .metadata describes every tensor whole: torch fills a tensor from its chunks, and leaves the rest alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

_Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def fault(metadata: Metadata, which: Callable[[str], bool] = lambda key: True) -> str | None:
    """The first entry of ``which`` keys that is not whole, in words; None if there is none.

    An object is in a file. A tensor's chunks lie inside of it, are in files, do not overlap, and have its volume
    together, so that they cover it.
    """
    for key, entry in metadata.state_dict_metadata.items():
        if which(key) and (found := _fault(key, entry, metadata.storage_data)) is not None:
            return f"{key}: {found}"
    return None


def _fault(key: str, entry: object, places: Mapping[MetadataIndex, Any]) -> str | None:
    if type(entry) is BytesStorageMetadata:
        return None if MetadataIndex(key) in places else "it is in no file"
    if type(entry) is not TensorStorageMetadata or type(entry.properties.dtype) is not torch.dtype:
        return "it is neither a tensor nor an object"
    size = _whole_numbers(entry.size)
    boxes = [(_whole_numbers(chunk.offsets), _whole_numbers(chunk.sizes)) for chunk in entry.chunks]
    for offsets, sizes in boxes:
        inside = len(offsets) == len(sizes) == len(size)
        if not inside or any(at < 0 or n < 0 or at + n > end for at, n, end in zip(offsets, sizes, size, strict=True)):
            return f"a chunk of {list(sizes)} at {list(offsets)} is outside of a tensor of {list(size)}"
        place = places.get(MetadataIndex(key, torch.Size(offsets)))
        if place is None:
            return f"its chunk at {list(offsets)} is in no file"
        if place.length < math.prod(sizes) * entry.properties.dtype.itemsize:
            return f"its chunk at {list(offsets)} has {place.length} bytes in {place.relative_path}, too few"
    volume = sum(math.prod(sizes) for _, sizes in boxes)
    if volume != math.prod(size) or _overlap(boxes):  # so no two chunks of a scalar get there
        return f"its {len(boxes)} chunks do not cover it: {volume} of {math.prod(size)} values"
    return None


def _whole_numbers(values: object) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or any(type(value) is not int for value in values):
        raise ValueError("a size is no list of whole numbers")
    return tuple(values)


def _overlap(boxes: Sequence[_Box]) -> bool:
    """Whether two boxes have a value in common."""
    filled = [box for box in boxes if math.prod(box[1])]
    if len(filled) < 2:
        return False
    # Sorted along the dimension that is cut most, a box can meet only those that begin before its end.
    along = max(range(len(filled[0][0])), key=lambda dimension: len({offsets[dimension] for offsets, _ in filled}))
    filled.sort(key=lambda box: box[0][along])
    for number, (offsets, sizes) in enumerate(filled):
        for other, extent in filled[number + 1 :]:
            if other[along] >= offsets[along] + sizes[along]:
                break
            if all(a < b + n and b < a + m for a, m, b, n in zip(offsets, sizes, other, extent, strict=True)):
                return True
    return False
