"""Checksums of a checkpoint: taken while it is written, compared once."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from megatron_lowprec.training.checkpoint import checksums, safe_load
from tests.training.conftest import Drive
from tests.training.helpers import argv


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
