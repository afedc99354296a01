"""Nothing in a checkpoint folder runs code."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.metadata import Metadata

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.checkpoint import safe_load
from tests.refusal import refused
from tests.training.checkpoint import foreign
from tests.training.checkpoint.foreign import MARKER
from tests.training.conftest import Drive
from tests.training.helpers import argv


def outside(folder: Path) -> None:
    metadata = safe_load.read_metadata(folder)
    index, place = next(iter(metadata.storage_data.items()))
    metadata.storage_data[index] = replace(place, relative_path="../../secret")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def outside_by_a_method(folder: Path) -> None:
    """An OrderedDict can have attributes, and so a method ``values`` that tells of no files."""
    outside(folder)
    metadata = safe_load.read_metadata(folder)
    metadata.storage_data = OrderedDict(metadata.storage_data)
    metadata.storage_data.values = OrderedDict  # type: ignore[method-assign,assignment]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def compressed(folder: Path) -> None:
    """What is checked would not be what is read."""
    metadata = safe_load.read_metadata(folder)
    index, place = next(iter(metadata.storage_data.items()))
    metadata.storage_data[index] = replace(place, transform_descriptors=["stream.zstd"])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def other_format(folder: Path) -> None:
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "common_backend": "torch"}))


def yaml_that_builds_objects(folder: Path) -> None:
    (folder / "config.yaml").write_text("options: !!python/object/apply:os.mkdir ['it_ran']\n")


REFUSED: dict[Callable[[Path], None], str] = {
    foreign.common: r"common\.pt asks for posix\.mkdir",
    foreign.common_object: r"__9_0\.distcp asks for posix\.mkdir",
    foreign.metadata: r"\.metadata asks for posix\.mkdir",
    foreign.inside_metadata: r"\.metadata asks for posix\.mkdir",
    foreign.objects: r"__9_0\.distcp asks for posix\.mkdir",
    outside: r"'\.\./\.\./secret' outside of its folder",
    outside_by_a_method: r"\.metadata does not describe a checkpoint",
    compressed: r"\.metadata names '.*' as compressed",
    other_format: "format 'zarr'",
    yaml_that_builds_objects: r"config\.yaml is missing or not this driver's",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_a_run_refuses_a_foreign_pickle_by_name(drive: Drive, folder: Path, change: Callable[[Path], None]) -> None:
    change(folder)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("4\n")
    with refused(match=REFUSED[change]):
        drive(argv(save="new", load="out", train_iters=5, recipe="fp8_delayed"))
    assert not MARKER.exists()


def test_a_checked_file_is_not_read_twice(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch's own load asks its reader for the metadata, which torch would unpickle freely."""
    monkeypatch.chdir(tmp_path)
    name = "embedding.word_embeddings.weight"
    reader = safe_load.RestrictedReader(folder)
    weight = torch.empty(reader.read_metadata().state_dict_metadata[name].size)
    foreign.inside_metadata(folder)
    load({name: weight}, storage_reader=reader, no_dist=True)
    assert weight.std() > 0
    assert not MARKER.exists()


def test_metadata_changes_no_class(folder: Path) -> None:
    """BUILD with a state of two parts sets attributes of what is on the stack, and that may be a class."""
    setting = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}Vrelative_path\nV__0_0.distcp\nstb."
    (folder / ".metadata").write_bytes(setting)
    with pytest.raises(safe_load.Damaged, match="it sets attributes of Metadata"):
        safe_load.read_metadata(folder)
    assert not hasattr(Metadata, "relative_path")


def test_a_reader_stays_in_its_folder(folder: Path) -> None:
    outside(folder)
    with pytest.raises(UserError, match=r"secret' outside of its folder"):
        safe_load.RestrictedReader(folder)
