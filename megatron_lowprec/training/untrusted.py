"""A checkpoint folder may come from anywhere: nothing in it may run code, and damage is noticed before it is used.

Checkpoints are full of pickles. torch reads tensors by its restricted unpickler, but ``.metadata`` by the plain one and
stored objects with ``weights_only=False``. So both are read here first, by unpicklers that know only what such files
are made of; Megatron-core and torch get to see them afterwards. What this does not reach are the amax histories of
TransformerEngine's layers: bytes for us, which it unpickles itself (``mcore.te.trust_extra_states``).
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_lowprec.errors import UserError

_METADATA, _COMMON, _FORMAT = ".metadata", "common.pt", "metadata.json"
# Everything that torch 2.11 to 2.13 and Megatron-core 0.16 put into .metadata; none of it does anything when called.
_ALLOWED: dict[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    "torch.distributed.checkpoint.filesystem": frozenset(("_StorageInfo", "_StoragePrefix")),
    "torch.distributed.checkpoint.planner": frozenset(("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    "torch.serialization": frozenset(("_get_layout",)),
    "torch": frozenset(("Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)))),
    "pathlib": frozenset(("Path", "PosixPath", "PurePosixPath")),
    "collections": frozenset(("OrderedDict",)),
}


class Damaged(Exception):  # noqa: N818 - a finding about a folder, for callers that can choose another
    """A checkpoint that is not whole; the message says what is wrong with which file."""


class _Foreign(pickle.UnpicklingError):
    """A pickle that asks for something which no such file needs."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise _Foreign(f"{module}.{name}")
        return super().find_class(module, name)


def examine(folder: Path) -> Metadata:
    """Check a checkpoint in Megatron-core's torch_dist format as far as that needs no reading of tensors.

    Raises:
        UserError: a pickle in it asks for what no checkpoint needs, or a file outside of the folder.
        Damaged: a file is missing, cut short or not what it should be.
    """
    try:
        described = json.loads((folder / _FORMAT).read_text(encoding="utf-8"))
        backends = described["sharded_backend"], described.get("common_backend", "torch")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{_FORMAT} cannot be read: {_in_a_line(error)}") from None
    if backends != ("torch_dist", "torch"):
        raise UserError(
            f"{folder}/{_FORMAT}: checkpoints of format {backends[0]!r} are not loaded, torch_dist ones are; convert it"
        )
    metadata = read_metadata(folder)
    _check_sizes(folder, metadata)
    try:
        content = (folder / _COMMON).read_bytes()
    except OSError as error:
        raise Damaged(f"{_COMMON} cannot be read: {_in_a_line(error)}") from None
    _check_pickle(folder / _COMMON, content)
    return metadata


def read_metadata(folder: Path) -> Metadata:
    """``.metadata``, by an unpickler that knows no more than torch writes into it; raises as ``examine``."""
    path = folder / _METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except _Foreign as error:
        raise _refusal(path, str(error)) from None
    except Exception as error:  # noqa: BLE001 - whatever a damaged pickle makes an unpickler raise
        raise Damaged(f"{_METADATA} cannot be read: {_in_a_line(error)}") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise Damaged(f"{_METADATA} does not describe a checkpoint")
    return metadata


def check_objects(folder: Path, metadata: Metadata, keys: Iterable[str]) -> None:
    """Check the stored objects of these keys, which torch is about to unpickle without restrictions.

    Raises:
        UserError, Damaged: as ``examine``.
    """
    for key in keys:
        place = metadata.storage_data.get(MetadataIndex(key)) if metadata.storage_data else None
        if place is None:
            raise Damaged(f"{_METADATA} knows no {key}")
        path = folder / place.relative_path
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                content = file.read(place.length)
        except OSError as error:
            raise Damaged(f"{place.relative_path} cannot be read: {_in_a_line(error)}") from None
        _check_pickle(path, content)


def _check_sizes(folder: Path, metadata: Metadata) -> None:
    ends: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        name = str(place.relative_path)
        if name != os.path.basename(name):
            raise UserError(f"{folder}/{_METADATA} names the file {name!r} outside of its folder: not loaded")
        ends[name] = max(ends.get(name, 0), place.offset + place.length)
    for name, end in ends.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise Damaged(f"{name} is missing") from None
        if size < end:
            raise Damaged(f"{name} is cut short: {size} bytes of {end}")


def _check_pickle(path: Path, content: bytes) -> None:
    try:
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        if named is None:
            raise Damaged(f"{path.name} cannot be read: {_in_a_line(error)}") from None
        raise _refusal(path, named[1]) from None
    except Exception as error:  # noqa: BLE001 - whatever a damaged file makes torch raise
        raise Damaged(f"{path.name} cannot be read: {_in_a_line(error)}") from None


def _refusal(path: Path, name: str) -> UserError:
    return UserError(
        f"{path} asks for {name} when it is unpickled, which no checkpoint of this driver does: not loaded. "
        "Load only checkpoints whose origin you know"
    )


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
