"""A checkpoint's own description of its tensors: whole, or damage."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_lowprec.training.checkpoint import safe_load, tensor_chunks
from tests.training.checkpoint import foreign

WEIGHT = "decoder.layers.mlp.linear_fc1.weight"


def with_chunks(change: Callable[[list[ChunkStorageMetadata]], Any], key: str = WEIGHT) -> Callable[[Metadata], None]:
    def apply(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        change(entry.chunks)

    return apply


def without_place(metadata: Metadata) -> None:
    index = next(index for index in metadata.storage_data if index.fqn == WEIGHT)
    del metadata.storage_data[index]


def short_place(metadata: Metadata) -> None:
    index = next(index for index in metadata.storage_data if index.fqn == WEIGHT)
    metadata.storage_data[index] = replace(metadata.storage_data[index], length=100)


def negative_place(metadata: Metadata) -> None:
    index = next(index for index in metadata.storage_data if index.fqn == WEIGHT)
    metadata.storage_data[index] = replace(metadata.storage_data[index], offset=-1)


def larger(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata[WEIGHT]
    assert isinstance(entry, TensorStorageMetadata)
    entry.size = torch.Size([entry.size[0] + 1, *entry.size[1:]])


def shifted(chunks: list[ChunkStorageMetadata]) -> None:
    """The first chunk in the place of the second: their volumes are that of the tensor, and it has a gap."""
    chunks[0] = replace(chunks[0], offsets=chunks[1].offsets)


def moved_out(chunks: list[ChunkStorageMetadata]) -> None:
    chunks[0] = replace(chunks[0], offsets=torch.Size([-1, *chunks[0].offsets[1:]]))


def of_another_kind(metadata: Metadata) -> None:
    metadata.state_dict_metadata[WEIGHT] = torch.Size([3])  # type: ignore[assignment]


def sized_by_text(metadata: Metadata) -> None:
    metadata.state_dict_metadata[WEIGHT].size = ("a", "b")  # type: ignore[union-attr,assignment]


def no_objects(metadata: Metadata) -> None:
    for index in [index for index in metadata.storage_data if "random_state" in index.fqn]:
        del metadata.storage_data[index]


INCOMPLETE: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "no chunks": (with_chunks(list.clear), "its 0 chunks do not cover it: 0 of "),
    "a chunk less": (with_chunks(list.pop), "its 1 chunks do not cover it: "),
    "a chunk twice": (with_chunks(lambda chunks: chunks.append(chunks[0])), "its 3 chunks do not cover it: "),
    "a gap": (with_chunks(shifted), "its 2 chunks do not cover it: "),
    "a chunk outside": (with_chunks(moved_out), "is outside of a tensor of"),
    "a larger tensor": (larger, "its 2 chunks do not cover it: "),
    "no file": (without_place, "is in no file"),
    "too few bytes": (short_place, "has 100 bytes in __0_"),
    "bytes before the file": (negative_place, "names bytes before the beginning"),
    "another kind": (of_another_kind, "it is neither a tensor nor an object"),
    "a size of text": (sized_by_text, "a size is no list of whole numbers"),
    "objects in no file": (no_objects, "it is in no file"),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_a_tensor_that_is_not_described_whole_is_damage(folder: Path, case: str) -> None:
    """torch fills a tensor from the chunks that there are; the rest keeps what was in memory."""
    change, said = INCOMPLETE[case]
    metadata = safe_load.examine(folder)
    change(metadata)
    foreign.change(folder, ".metadata", pickle.dumps(metadata))
    with pytest.raises(safe_load.Damaged, match=r"\.metadata .*") as found:
        safe_load.examine(folder)
    assert said in str(found.value)
    if case != "objects in no file":
        with pytest.raises(safe_load.Damaged):
            safe_load.RestrictedReader(folder, which=lambda key: key == WEIGHT)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_chunks_cover_a_tensor_or_do_not(dimensions: int) -> None:
    """Against a map of every value, for grids with one box shifted by one or left alone."""
    generator = random.Random(dimensions)
    for _ in range(200):
        size = [generator.randint(1, 5) for _ in range(dimensions)]
        cuts = [sorted({0, n, *(generator.randint(0, n) for _ in range(2))}) for n in size]
        boxes = [
            (tuple(low for low, _ in sides), tuple(high - low for low, high in sides))
            for sides in itertools.product(*(itertools.pairwise(cut) for cut in cuts))
        ]
        at, along = generator.randrange(len(boxes)), generator.randrange(dimensions)
        offsets, extent = boxes[at]
        moved = [o + generator.randint(-1, 1) * (d == along) for d, o in enumerate(offsets)]
        boxes[at] = tuple(moved), extent
        generator.shuffle(boxes)
        inside = all(o >= 0 and o + n <= end for o, n, end in zip(moved, extent, size, strict=True))
        counts = torch.zeros(size, dtype=torch.int64)
        for begin, lengths in boxes if inside else ():
            counts[tuple(slice(b, b + n) for b, n in zip(begin, lengths, strict=True))] += 1
        described = TensorStorageMetadata(
            TensorProperties(torch.float32),
            torch.Size(size),
            [ChunkStorageMetadata(torch.Size(begin), torch.Size(lengths)) for begin, lengths in boxes],
        )
        place = _StorageInfo("__0_0.distcp", 0, 10**6)
        places = {MetadataIndex("w", torch.Size(begin)): place for begin, _ in boxes}
        found = tensor_chunks.fault(Metadata({"w": described}, storage_data=places))
        assert (found is None) == (inside and bool((counts == 1).all())), (size, boxes, found)


def test_keys_that_steer_a_terminal_are_damage(folder: Path) -> None:
    metadata = safe_load.examine(folder)
    metadata.state_dict_metadata["\x1b[2J"] = metadata.state_dict_metadata[WEIGHT]
    foreign.change(folder, ".metadata", pickle.dumps(metadata))
    with pytest.raises(safe_load.Damaged, match="a control character"):
        safe_load.examine(folder)
