"""Safe reading of untrusted checkpoint folders: no code in them is executed, and damage is detected early.

Checkpoints contain many pickles. torch reads tensors with its restricted unpickler, but ``.metadata`` with the plain
one and stored objects with ``weights_only=False``; TransformerEngine and Megatron-core unpickle the bytes of extra
states. This module reads all of these first, with unpicklers restricted to the classes such files need; Megatron-core,
torch and TransformerEngine read them afterwards. No other module unpickles a file (tests/tools/test_no_code_runs.py).
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_lowprec.errors import UserError, printable, type_of
from megatron_lowprec.files import check_text, read_json
from megatron_lowprec.training.checkpoint import checksums, tensor_chunks

_METADATA, _COMMON, _FORMAT = ".metadata", "common.pt", "metadata.json"
_COMMON_KEY = "common_state/shard_0_1"
# Every class that torch 2.11 to 2.13 and Megatron-core 0.15 to 0.19 put into .metadata; none has side effects.
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
    "megatron.core.dist_checkpointing.strategies.torch": frozenset(("MCoreMetadata", "MCoreSavePlan")),  # in 0.15
    "pathlib": frozenset(("Path", "PosixPath", "PurePosixPath")),
    "collections": frozenset(("OrderedDict",)),
}
# Every class that TransformerEngine 2 puts into an extra state: recipe, amax histories, scales, and plain values.
_RECIPES = frozenset(
    (
        "DelayedScaling",
        "Float8CurrentScaling",
        "Float8BlockScaling",
        "MXFP8BlockScaling",
        "NVFP4BlockScaling",
        "Format",
        "_FormatHelper",
        "MMParams",
        "QParams",
    )
)
_IN_EXTRA_STATES: dict[str, frozenset[str]] = {
    "transformer_engine.common.recipe": _RECIPES,
    "megatron.core.extensions.transformer_engine": frozenset(("TEDelayedScaling",)),
    "torch._utils": frozenset(("_rebuild_tensor_v2",)),
    "collections": frozenset(("OrderedDict",)),
}


class Damaged(Exception):  # noqa: N818 - a finding about a folder, for callers that can choose another
    """A checkpoint that is not intact; the message names the file and the problem, in a printable line."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class ForeignError(UserError):
    """A pickle that refers to a name which no checkpoint file needs."""

    def __init__(self, place: Path | str, name: str) -> None:
        self.place, self.name = place, name
        super().__init__(
            f"{place} asks for {name} when it is unpickled, which no checkpoint of this driver does: not loaded. "
            "Load only checkpoints whose origin you know"
        )


class _ForeignName(pickle.UnpicklingError):
    """Carries the name until the file is known and a ``ForeignError`` can be raised."""


class _MetadataUnpickler(pickle.Unpickler):
    """Builds objects of allowed classes; undoes and rejects attributes that a pickle sets on a class."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._classes: dict[type, dict[str, Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise _ForeignName(f"{module}.{name}")
        found = super().find_class(module, name)
        if isinstance(found, type):
            self._classes.setdefault(found, dict(vars(found)))
        return found

    def load(self) -> Any:
        """The unpickled object."""
        try:
            return super().load()
        finally:
            changed = [cls for cls, before in self._classes.items() if _restore(cls, before)]
            if changed:
                raise pickle.UnpicklingError(f"it sets attributes of {changed[0].__qualname__}")


def _restore(cls: type, before: Mapping[str, Any]) -> bool:
    """Restore a class's attributes; returns whether any had changed."""
    now = dict(vars(cls))
    for name in now.keys() - before.keys():
        delattr(cls, name)
    others = [name for name, value in before.items() if now.get(name) is not value]
    for name in others:
        setattr(cls, name, before[name])
    return bool(others or now.keys() - before.keys())


class _Sealed(type):
    """A class with read-only attributes: a pickle could set them (BUILD) to change what is unpickled later."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"{name} is set on a class")


class _Inert(metaclass=_Sealed):
    """Placeholder for every object of an extra state during the check: accepts any arguments, has no effect."""

    def __new__(cls, *_: object) -> Any:
        return super().__new__(cls)

    def __init__(self, *_: object) -> None:
        pass


_STORAGES = {
    ("torch.storage", "_load_from_bytes"),
    ("megatron.core.safe_globals", "safe_load_from_bytes"),  # Megatron-core 0.17 puts it in the place of torch's
}


class _InertStorage(_Inert):
    """Placeholder for a tensor's storage, which pickles as the bytes of another pickle."""

    def __new__(cls, content: bytes) -> Any:
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return super().__new__(cls)


class _ExtraStateUnpickler(pickle.Unpickler):
    """Runs a pickle with inert objects; reads nested pickles with torch's restricted unpickler."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STORAGES:
            return _InertStorage
        if name not in _IN_EXTRA_STATES.get(module, ()):
            raise _ForeignName(f"{module}.{name}")
        return _Inert


def examine(folder: Path) -> Metadata:
    """Check a checkpoint in Megatron-core's torch_dist format, without reading its tensors.

    Raises:
        UserError: a pickle in it refers to a name that no checkpoint needs, or to a file outside of the folder.
        Damaged: a file is missing, truncated or not in the expected format.
    """
    try:
        described = read_json(folder / _FORMAT, "")
        backends = described["sharded_backend"], described.get("common_backend", "torch")
    except (FileNotFoundError, UserError, KeyError) as error:
        raise Damaged(f"{_FORMAT} cannot be read: {_in_a_line(error)}") from None
    if backends != ("torch_dist", "torch"):
        raise UserError(
            f"{folder}/{_FORMAT}: checkpoints of format {backends[0]!r} are not loaded, torch_dist ones are; convert it"
        )
    metadata = read_metadata(folder)
    _check_places(folder, metadata)
    common_state(folder, metadata)
    return metadata


def common_state(folder: Path, metadata: Metadata, trust: bool = False) -> Any:
    """What all ranks share, beside the tensors: common.pt, or from Megatron-core 0.19 on a stored object.

    ``trust`` lifts the restrictions of the unpickler.

    Raises:
        UserError, Damaged: as ``examine``.
    """
    path = folder / _COMMON
    if MetadataIndex(_COMMON_KEY) in metadata.storage_data and not path.exists():
        _check_places(folder, metadata, lambda key: key == _COMMON_KEY)
        path, content = _stored(folder, metadata, _COMMON_KEY)
        found = unpickle(path, io.BytesIO(content), trust)
        if not isinstance(found, list) or len(found) != 1:
            raise Damaged(f"{_COMMON_KEY} in {path.name} is not one state")
        return found[0]
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{_COMMON} cannot be read: {_in_a_line(error)}") from None
    return unpickle(path, io.BytesIO(content), trust)


def read_metadata(folder: Path, trust: bool = False) -> Metadata:
    """``.metadata``, by an unpickler restricted to the classes that torch writes into it; raises as ``examine``.

    ``trust`` lifts the restriction.
    """
    path = folder / _METADATA
    try:
        with path.open("rb") as file:
            metadata = (pickle.Unpickler if trust else _MetadataUnpickler)(file).load()
        describes = _describes_checkpoint(metadata)
    except _ForeignName as error:
        raise ForeignError(path, str(error)) from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle can raise anything
        raise Damaged(f"{_METADATA} cannot be read: {_in_a_line(error)}") from None
    if not describes:
        raise Damaged(f"{_METADATA} does not describe a checkpoint")
    found: Metadata = metadata
    return found


def _describes_checkpoint(metadata: Any) -> bool:
    """Whether all metadata are exactly of the expected classes: others, such as OrderedDict, can carry methods."""
    if type(metadata).__name__ not in ("Metadata", "MCoreMetadata"):
        return False
    if {type(metadata.state_dict_metadata), type(metadata.storage_data)} != {dict}:
        return False
    check_text(list(metadata.state_dict_metadata))  # messages and logs show keys
    if any(type(key) is not str for key in metadata.state_dict_metadata):
        return False
    return all(
        [type(index), type(index.fqn), type(place)] == [MetadataIndex, str, _StorageInfo]
        and [type(value) for value in (place.relative_path, place.offset, place.length)] == [str, int, int]
        for index, place in metadata.storage_data.items()
    )


class RestrictedReader(FileSystemReader):
    """torch's checkpoint reader with ``.metadata`` by ``read_metadata``: torch's own unpickles without restrictions.

    Args:
        which: keys that will be read; other entries need not be whole.

    Raises:
        UserError, Damaged: as ``examine`` and ``check_bytes``.
    """

    def __init__(self, folder: Path, trust: bool = False, which: Callable[[str], bool] = lambda key: True) -> None:
        super().__init__(folder)
        self._metadata = read_metadata(folder, trust)
        _check_places(folder, self._metadata, which)
        check_bytes(folder)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The checked metadata."""
        return self._metadata


def check_objects(folder: Path, metadata: Metadata, keys: Iterable[str]) -> None:
    """Check the stored objects of these keys, before torch unpickles them without restrictions.

    Raises:
        UserError, Damaged: as ``examine``.
    """
    for key in keys:
        path, content = _stored(folder, metadata, key)
        unpickle(path, io.BytesIO(content))


def _stored(folder: Path, metadata: Metadata, key: str) -> tuple[Path, bytes]:
    """File and pickle of a stored object."""
    place = metadata.storage_data.get(MetadataIndex(key))
    if place is None:
        raise Damaged(f"{_METADATA} knows no {key}")
    path = folder / place.relative_path
    try:
        with path.open("rb") as file:
            file.seek(place.offset)
            return path, file.read(place.length)
    except OSError as error:
        raise Damaged(f"{place.relative_path} cannot be read: {_in_a_line(error)}") from None


def checked_extra_state(place: str, state: Any) -> torch.Tensor | None:
    """An extra state's bytes (uint8) if TransformerEngine and Megatron-core can unpickle them without running code.

    Args:
        place: location for messages.
        state: the state in the checkpoint, its outer pickle checked by ``check_objects``.

    Raises:
        UserError, Damaged: as ``examine``.
    """
    if state is None:
        return None
    if type(state) is not torch.Tensor:
        raise UserError(f"{place} is {type_of(state)}, as TransformerEngine 1 wrote it: not loaded")
    content = state.detach().cpu().numpy().tobytes()
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    try:
        _ExtraStateUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # noqa: BLE001 - a damaged pickle can raise anything
        raise _finding(place, place, error) from None
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def unpickle(path: Path, stream: BinaryIO, trust: bool = False) -> Any:
    """Read a file of ``torch.save`` with torch's restricted unpickler; ``trust`` lifts the restriction.

    Importing megatron.core extends the unpickler's allow-list: classes of Megatron-LM's args, and plain ones.

    Raises:
        UserError, Damaged: as ``examine``, naming ``path``.
    """
    try:
        return torch.load(stream, map_location="cpu", weights_only=not trust)
    except Exception as error:  # noqa: BLE001 - a damaged file can make torch raise anything
        raise _finding(path, path.name, error) from None


def check_bytes(folder: Path, sizes_only: bool = False) -> None:
    """Compare the files, or their sizes, with their checksums, if the checkpoint has any; Damaged if one differs."""
    found = checksums.fault(folder, sizes_only)
    if found is not None:
        raise Damaged(found)


def _check_places(folder: Path, metadata: Metadata, which: Callable[[str], bool] = lambda key: True) -> None:
    """Check that the files are long enough for the entries, and that these are whole."""
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        name = place.relative_path
        if place.transform_descriptors:
            raise UserError(f"{folder}/{_METADATA} names {name!r} as compressed, which is not read: not loaded")
        if name != os.path.basename(name):
            raise UserError(f"{folder}/{_METADATA} names the file {name!r} outside of its folder: not loaded")
        if place.offset < 0 or place.length < 0:
            raise Damaged(f"{_METADATA} names bytes before the beginning of {name}")
        ends[name] = max(ends.get(name, 0), place.offset + place.length)
    for name, end in ends.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise Damaged(f"{name} is missing") from None
        if size < end:
            raise Damaged(f"{name} is cut short: {size} bytes of {end}")
    try:
        found = tensor_chunks.fault(metadata, which)
    except (AttributeError, TypeError, ValueError) as error:
        found = f"an entry is of another kind: {_in_a_line(error)}"
    if found is not None:
        raise Damaged(f"{_METADATA} does not describe all of it: {found}")


def _finding(place: Path | str, name: str, error: Exception) -> ForeignError | Damaged:
    """An unpickler's error as an error about a file."""
    if isinstance(error, _ForeignName):
        return ForeignError(place, str(error))
    named = re.search(r"GLOBAL ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
    return (
        ForeignError(place, named[1]) if named is not None else Damaged(f"{name} cannot be read: {_in_a_line(error)}")
    )


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
