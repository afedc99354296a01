"""Checkpoints as other releases of Megatron-core write them: what all ranks share is a file, or an object."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megatron_lowprec.training.checkpoint import checksums, safe_load

KEY = "common_state/shard_0_1"


def change(folder: Path, name: str, content: bytes) -> None:
    """Another content of a file, with checksums that agree: they are no signature."""
    (folder / name).write_bytes(content)
    if checksums.exist(folder):
        checksums.write(folder)


def common_as_file(folder: Path) -> Path:
    """common.pt, as before 0.19; returns it."""
    metadata, path = safe_load.read_metadata(folder), folder / "common.pt"
    if not path.exists():
        torch.save(safe_load.common_state(folder, metadata), path)
        del metadata.state_dict_metadata[KEY], metadata.storage_data[MetadataIndex(KEY)]
        change(folder, ".metadata", pickle.dumps(metadata))
    return path


def common_as_object(folder: Path) -> Path:
    """An object among the tensors, as from 0.19 on; returns its file."""
    metadata, path = safe_load.read_metadata(folder), folder / "__8_0.distcp"
    torch.save([safe_load.common_state(folder, metadata)], path)
    metadata.state_dict_metadata[KEY] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex(KEY)] = _StorageInfo(path.name, 0, path.stat().st_size)
    (folder / "common.pt").unlink(missing_ok=True)
    change(folder, ".metadata", pickle.dumps(metadata))
    return path
