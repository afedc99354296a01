"""Checkpoints with pickles that run code: what is done to one's folder."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron_lowprec.training.checkpoint import safe_load
from tests.training.checkpoint.forms import KEY, change, common_as_file, common_as_object

MARKER = Path("it_ran")


class Foreign:
    """Makes a folder when it is unpickled without restrictions."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(MARKER),)


def saved(value: Any) -> bytes:
    """As torch.save writes it."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def metadata(folder: Path) -> None:
    change(folder, ".metadata", pickle.dumps(Foreign()))


def inside_metadata(folder: Path) -> None:
    found = safe_load.read_metadata(folder)
    found.planner_data = Foreign()
    change(folder, ".metadata", pickle.dumps(found))


def common(folder: Path) -> None:
    change(folder, common_as_file(folder).name, saved({"args": Foreign()}))


def common_object(folder: Path) -> None:
    common_as_object(folder)
    replace_objects(folder, saved([{"args": Foreign()}]), lambda key: key == KEY)


def objects(folder: Path) -> None:
    """Every stored object, which torch unpickles with weights_only=False."""
    replace_objects(folder, saved([Foreign()]), lambda key: True)


def replace_objects(folder: Path, content: bytes, which: Callable[[str], bool]) -> None:
    """Other bytes for the stored objects whose keys are meant."""
    found = safe_load.read_metadata(folder)
    (folder / "__9_0.distcp").write_bytes(content)
    for index, place in found.storage_data.items():
        if isinstance(found.state_dict_metadata[index.fqn], BytesStorageMetadata) and which(index.fqn):
            there = {"relative_path": "__9_0.distcp", "offset": 0, "length": len(content)}
            found.storage_data[index] = replace(place, **there)
    change(folder, ".metadata", pickle.dumps(found))


CRAFTS = (metadata, inside_metadata, common, objects)
