"""Nothing in a checkpoint folder runs code, and what is damaged is named."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_lowprec.errors import UserError
from megatron_lowprec.training import untrusted
from tests.training.conftest import Drive
from tests.training.helpers import argv


class Foreign:
    """Makes a folder when it is unpickled without restrictions."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, ("it_ran",)


@pytest.fixture
def folder(checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints / "iter_0000004", tmp_path / "out" / "iter_0000004"))


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def foreign_common(folder: Path) -> None:
    (folder / "common.pt").write_bytes(saved({"optimizer": Foreign()}))


def foreign_metadata(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Foreign()))


def foreign_inside_metadata(folder: Path) -> None:
    metadata = untrusted.read_metadata(folder)
    metadata.planner_data = Foreign()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def foreign_object(folder: Path) -> None:
    """In place of a rank's random state, which torch unpickles with weights_only=False."""
    metadata = untrusted.read_metadata(folder)
    (key,) = (key for key in metadata.state_dict_metadata if key.startswith("random_state"))
    content = saved([Foreign()])
    (folder / "__9_0.distcp").write_bytes(content)
    place = metadata.storage_data[MetadataIndex(key)]
    metadata.storage_data[MetadataIndex(key)] = replace(
        place, relative_path="__9_0.distcp", offset=0, length=len(content)
    )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def outside(folder: Path) -> None:
    metadata = untrusted.read_metadata(folder)
    index, place = next(iter(metadata.storage_data.items()))
    metadata.storage_data[index] = replace(place, relative_path="../../secret")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def other_format(folder: Path) -> None:
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "common_backend": "torch"}))


def yaml_that_builds_objects(folder: Path) -> None:
    (folder / "config.yaml").write_text("options: !!python/object/apply:os.mkdir ['it_ran']\n")


REFUSED: dict[Callable[[Path], None], str] = {
    foreign_common: r"common\.pt asks for posix\.mkdir",
    foreign_metadata: r"\.metadata asks for posix\.mkdir",
    foreign_inside_metadata: r"\.metadata asks for posix\.mkdir",
    foreign_object: r"__9_0\.distcp asks for posix\.mkdir",
    outside: r"'\.\./\.\./secret' outside of its folder",
    other_format: "format 'zarr'",
    yaml_that_builds_objects: r"config\.yaml is missing or not this driver's",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_a_run_refuses_a_foreign_pickle_by_name(drive: Drive, folder: Path, change: Callable[[Path], None]) -> None:
    change(folder)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("4\n")
    with pytest.raises(UserError, match=REFUSED[change]) as error:
        drive(argv(save="new", load="out", train_iters=5, recipe="fp8_delayed"))
    assert "\n" not in str(error.value)
    assert not Path("it_ran").exists()


def test_the_foreign_pickles_would_run_code(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is guarded against is real: torch's own reader runs it."""
    from torch.distributed.checkpoint import FileSystemReader

    monkeypatch.chdir(tmp_path)
    foreign_inside_metadata(folder)
    FileSystemReader(folder).read_metadata()
    assert Path("it_ran").exists()


def test_a_whole_checkpoint_passes(folder: Path) -> None:
    metadata = untrusted.examine(folder)
    objects = [key for key in metadata.state_dict_metadata if "random_state" in key]
    untrusted.check_objects(folder, metadata, objects)
    assert len(objects) == 1


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda content: None,
    "empty": lambda content: b"",
    "cut short": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "zeros": lambda content: bytes(len(content)),
}


FILES = (".metadata", "common.pt", "metadata.json", "__0_0.distcp", "__0_1.distcp")
# A shard of zeros has the right size: that is found when it is loaded.
DAMAGED = [
    (name, damage) for name in FILES for damage in DAMAGES if not (name.endswith("distcp") and damage == "zeros")
]


@pytest.mark.parametrize(("name", "damage"), DAMAGED)
def test_damage_is_found_without_reading_tensors(folder: Path, name: str, damage: str) -> None:
    content = DAMAGES[damage]((folder / name).read_bytes())
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(untrusted.Damaged, match=name.replace(".", r"\.")):
        untrusted.examine(folder)


def test_an_object_that_is_not_there_is_damage(folder: Path) -> None:
    with pytest.raises(untrusted.Damaged, match="knows no random_state/shard_7_8"):
        untrusted.check_objects(folder, untrusted.examine(folder), ["random_state/shard_7_8"])
