"""A damaged file of a checkpoint is named, without reading tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lowprec.training.checkpoint import safe_load
from tests.training.checkpoint import foreign
from tests.training.checkpoint.damages import DAMAGES
from tests.training.checkpoint.forms import KEY, common_as_object


def test_a_whole_checkpoint_passes(folder: Path) -> None:
    metadata = safe_load.examine(folder)
    objects = [key for key in metadata.state_dict_metadata if "random_state" in key]
    safe_load.check_objects(folder, metadata, objects)
    assert len(objects) == 1


FILES = (".metadata", "common.pt", "metadata.json", "__0_0.distcp")  # Megatron-core writes one or two shards a rank
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
    with pytest.raises(safe_load.Damaged, match=name.replace(".", r"\.")):
        safe_load.examine(folder)


def test_a_common_state_among_the_tensors_is_one_state(folder: Path) -> None:
    """As Megatron-core writes it from 0.19 on."""
    metadata = safe_load.read_metadata(folder)
    expected = safe_load.common_state(folder, metadata)
    path = common_as_object(folder)
    assert str(safe_load.common_state(folder, safe_load.examine(folder))) == str(expected)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(safe_load.Damaged, match=r"__8_0\.distcp is cut short"):
        safe_load.examine(folder)
    foreign.replace_objects(folder, foreign.saved([1, 2]), lambda key: key == KEY)
    with pytest.raises(safe_load.Damaged, match=r"common_state/shard_0_1 in __9_0\.distcp is not one state"):
        safe_load.examine(folder)


def test_a_missing_object_is_damage(folder: Path) -> None:
    with pytest.raises(safe_load.Damaged, match="knows no random_state/shard_7_8"):
        safe_load.check_objects(folder, safe_load.examine(folder), ["random_state/shard_7_8"])
