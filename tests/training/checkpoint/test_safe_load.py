"""Nothing in a checkpoint folder runs code, and what is damaged is named."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import random
import shutil
import sys
import types
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.checkpoint import checksums, safe_load, tensor_chunks
from tests.refusal import refused
from tests.training.checkpoint import foreign
from tests.training.checkpoint.foreign import MARKER, Foreign
from tests.training.checkpoint.forms import KEY, common_as_file, common_as_object
from tests.training.conftest import Drive
from tests.training.helpers import argv


@pytest.fixture
def folder(checkpoints: Path, tmp_path: Path) -> Path:
    found = Path(shutil.copytree(checkpoints / "iter_0000004", tmp_path / "out" / "iter_0000004"))
    common_as_file(found)
    return found


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


def test_a_whole_checkpoint_passes(folder: Path) -> None:
    metadata = safe_load.examine(folder)
    objects = [key for key in metadata.state_dict_metadata if "random_state" in key]
    safe_load.check_objects(folder, metadata, objects)
    assert len(objects) == 1


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda content: None,
    "empty": lambda content: b"",
    "cut short": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "zeros": lambda content: bytes(len(content)),
}


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


def test_a_checkpoint_that_was_not_read_back_has_its_checksums(folder: Path) -> None:
    """Sums were taken while the files were written; here they are taken again."""
    written = json.loads((folder / "checksums.json").read_text())["crc32"]
    assert set(written) == {path.name for path in folder.iterdir()} - {"checksums.json"}
    for name, (size, crc) in written.items():
        content = (folder / name).read_bytes()
        assert (len(content), f"{zlib.crc32(content):08x}") == (size, crc)
    assert checksums.fault(folder) is None


@pytest.mark.parametrize("in_background", [None, True])
def test_a_save_reads_no_tensor_back(drive: Drive, monkeypatch: pytest.MonkeyPatch, in_background: bool | None) -> None:
    """It would take as long as the save."""
    read: list[str] = []
    summed = checksums.crc32_of
    monkeypatch.setattr(checksums, "crc32_of", lambda path: (read.append(path.name), summed(path))[1])
    drive(argv(save="out", train_iters=1, async_save=in_background))
    saved = {path.name for path in Path("out/iter_0000001").iterdir()} - {checksums.NAME}
    # before Megatron-core 0.19 common.pt is among these
    assert sorted(read) == sorted(name for name in saved if not name.endswith(".distcp"))
    assert {".metadata", "config.yaml", "metadata.json"} <= set(read) < saved
    assert checksums.fault(Path("out/iter_0000001")) is None


def test_a_checkpoint_is_read_once_for_its_checksums(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    summed = checksums.crc32_of
    monkeypatch.setattr(checksums, "crc32_of", lambda path: (read.append(path.name), summed(path))[1])
    assert [checksums.fault(folder) for _ in range(3)] == [None] * 3
    assert len(read) == len(set(read)) > 4
    (folder / "common.pt").write_bytes((folder / "common.pt").read_bytes())
    assert checksums.fault(folder) is None
    assert len(read) == 2 * len(set(read)), "it was written again"


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"crc32": 3}', '{"crc32": {"../x": [1, "2"]}}', '{"crc32": {"x": 1}}', '{"crc32": {"x": ["a", 1]}}'],
)
def test_damaged_checksums_are_damage(folder: Path, content: str) -> None:
    (folder / "checksums.json").write_text(content)
    with pytest.raises(safe_load.Damaged, match=r"checksums\.json cannot be read"):
        safe_load.check_bytes(folder)


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


# ---- extra states of TransformerEngine: bytes in the checkpoint, a pickle for TransformerEngine


RECIPES = "transformer_engine.common.recipe"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An object that pickles as one of TransformerEngine's recipes, with an enumeration and a callable in it."""

    class Format(Enum):
        HYBRID = (448, 57344)

    class DelayedScaling:
        pass

    module = types.ModuleType(RECIPES)
    for one in (Format, DelayedScaling):
        one.__module__, one.__qualname__ = RECIPES, one.__name__
        setattr(module, one.__name__, one)
    monkeypatch.setitem(sys.modules, RECIPES, module)
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    made = DelayedScaling()
    made.__dict__ |= {"margin": 0, "fp8_format": Format.HYBRID, "amax_compute_algo": "max"}
    return made


def of_bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def extra_state(recipe: Any, **more: Any) -> torch.Tensor:
    """Bytes as TransformerEngine 2 makes them."""
    state = {
        "recipe": recipe,
        "scale_fwd": torch.ones(3),
        "amax_history_fwd": torch.arange(6.0).view(2, 3),
        "extra_fp8_variables": {"num_gemms": 1, "fp8_checkpoint": True, "fp8_max_fwd": 448.0},
    }
    return of_bytes(pickle.dumps(state | more))


def test_an_extra_state_of_transformer_engine_passes_as_it_is(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = extra_state(recipe)
    monkeypatch.delitem(sys.modules, RECIPES)  # nothing of TransformerEngine's is called
    checked = safe_load.checked_extra_state("layer", state)
    assert checked is not None
    assert torch.equal(checked, state)
    for empty in (torch.empty(0), torch.empty(0, dtype=torch.uint8)):
        assert safe_load.checked_extra_state("layer", empty).numel() == 0  # type: ignore[union-attr]
    assert safe_load.checked_extra_state("layer", None) is None


class NestedForeign:
    """A tensor's storage as it pickles: bytes that are unpickled once more."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return torch.storage._load_from_bytes, (foreign.saved(Foreign()),)


def test_an_extra_state_that_would_run_code_is_refused(
    recipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    dotted = b"\x80\x04\x8c" + bytes([len(RECIPES)]) + RECIPES.encode() + b"\x8c\x09os.system\x93."
    for content, name in (
        (pickle.dumps(Foreign()), r"posix\.mkdir"),
        (extra_state(recipe, scale_bwd=Foreign()).numpy().tobytes(), r"posix\.mkdir"),
        (extra_state(recipe, scale_bwd=NestedForeign()).numpy().tobytes(), r"posix\.mkdir"),
        (dotted, r"transformer_engine\.common\.recipe\.os\.system"),
    ):
        with pytest.raises(UserError, match=f"layer asks for {name} when it is unpickled"):
            safe_load.checked_extra_state("layer", of_bytes(content))
    assert not MARKER.exists()
    torch.load(io.BytesIO(foreign.saved(Foreign())), weights_only=False)  # torch's _load_from_bytes
    assert MARKER.exists(), "what is guarded against is real"


def test_an_extra_state_cannot_change_the_classes_that_it_is_checked_by() -> None:
    """BUILD with a state of two parts sets attributes of what is on the stack, and that may be a class."""
    setting = (
        f"c{RECIPES}\nFormat\n".encode(),  # the class
        b"(N}",  # a state without a dict, and attributes:
        b"V__setstate__\nctorch.storage\n_load_from_bytes\n",
        b"stb.",  # {name: value}, (None, attributes), BUILD
    )
    with pytest.raises(safe_load.Damaged, match="__setstate__ is set on a class"):
        safe_load.checked_extra_state("layer", of_bytes(b"".join(setting)))


@pytest.mark.parametrize("damage", ["cut short", "zeros"])
def test_a_damaged_extra_state_is_named(recipe: Any, damage: str) -> None:
    content = DAMAGES[damage](extra_state(recipe).numpy().tobytes())
    assert content is not None
    with pytest.raises(safe_load.Damaged, match="layer cannot be read"):
        safe_load.checked_extra_state("layer", of_bytes(content))


def test_an_extra_state_of_transformer_engine_1_is_refused() -> None:
    with pytest.raises(UserError, match="layer is a BytesIO, as TransformerEngine 1 wrote it: not loaded"):
        safe_load.checked_extra_state("layer", io.BytesIO(foreign.saved({"scale_fwd": torch.ones(3)})))
