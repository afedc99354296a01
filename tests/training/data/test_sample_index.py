"""The indices of samples that runs keep beside a corpus: of the documents asked for, and whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.data import batches
from megatron_lowprec.training.data.tokenizer import tokenizer_of
from tests.training.helpers import argv

DOCUMENTS = 20


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Documents of 33 tokens, each of its own."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": " ".join([str(n)] * 33)}) + "\n" for n in range(DOCUMENTS)))
    return file


def documents(split: str, **more: Any) -> set[int]:
    """Those that one epoch of the training data holds tokens of."""
    options = {"mock_data": None, "data_cache_path": "cache", "data_path": ["text.jsonl"], "split": split, **more}
    config = resolve_run(resolve_model(parse(argv(**options))[0]), 1, gpus=False)
    found = batches.build(config, tokenizer_of(config), 0, 0)["train"]
    assert found is not None
    return {t for i in range(found.epoch_samples) for t in found.samples[i]["tokens"].tolist() if t < DOCUMENTS}


def test_another_split_is_other_documents() -> None:
    assert documents("50,50,0") == set(range(10))
    assert documents("80,20,0") == set(range(16))
    assert documents("50,50,0") == set(range(10))


class Foreign:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("it_ran",)


INDICES = ("document", "sample", "shuffle")


@pytest.mark.parametrize("name", INDICES)
def test_no_code_of_an_index_runs(name: str) -> None:
    """Megatron-core reads the files by ``numpy.load(allow_pickle=True)``."""
    documents("80,20,0")
    (path,) = Path("cache").glob(f"*-train-{name}_index.npy")
    shape = np.load(path).shape
    np.save(path, np.full(shape, Foreign(), dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=rf"{name}_index\.npy is no index: .*; remove it, and it is written again"):
        documents("80,20,0")
    assert not Path("it_ran").exists()
    np.load(path, allow_pickle=True)
    assert Path("it_ran").exists(), "the danger is real"


def first(value: int) -> Callable[[np.ndarray], np.ndarray]:
    def damage(index: np.ndarray) -> np.ndarray:
        index = index.astype(np.int64)
        index.flat[0] = value
        return index

    return damage


DAMAGE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "negative": first(-1),
    "beyond": first(10**6),
    "shorter": lambda index: index[:-1],
    "longer": lambda index: np.concatenate([index, index[-1:]]),
    "one twice": lambda index: index[[1, 1, *range(2, len(index))]],
    "of bytes": lambda index: index.astype(np.uint8),
    "of floats": lambda index: index.astype(np.float32),
    "flat": lambda index: index.reshape(1, -1),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", INDICES)
def test_an_index_beyond_its_documents_is_refused(name: str, damage: str) -> None:
    documents("80,20,0")
    (path,) = Path("cache").glob(f"*-train-{name}_index.npy")
    np.save(path, DAMAGE[damage](np.load(path)))
    with pytest.raises(UserError, match=rf"{name}_index\.npy is no index.*; remove it"):
        documents("80,20,0")
    path.unlink()
    assert documents("80,20,0") == set(range(16))


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00v\x00{'descr'" + b" " * 200])
def test_a_file_that_is_no_array_is_one_line(content: bytes) -> None:
    documents("80,20,0")
    (path,) = Path("cache").glob("*-train-shuffle_index.npy")
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"shuffle_index\.npy is no index: "):
        documents("80,20,0")


def test_data_are_verified_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert documents("80,20,0", verify_data=True) == set(range(16))
    assert "20 documents, 680 tokens, ids below 256, the bytes that were written" in capsys.readouterr().out
    documents("80,20,0", verify_data=True)
    assert "the bytes that were written" not in capsys.readouterr().out, "once for the same files"
    (path,) = Path("cache").glob("*.bin")
    content = path.read_bytes()
    path.write_bytes(content[:-2] + b"\x01\x00")
    documents("80,20,0")
    with pytest.raises(UserError, match="checksums are"):
        documents("80,20,0", verify_data=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_id_ends_a_run_in_one_line(workers: int) -> None:
    """Also from a worker of the loader, around whose errors torch puts a traceback."""
    loader = torch.utils.data.DataLoader(Failing(), batch_size=None, num_workers=workers)
    with pytest.raises(UserError) as caught:
        batches._next(iter(loader))
    assert str(caught.value) == "corpus.bin holds id 7: copy it again"


class Failing(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        raise UserError("corpus.bin holds id 7: copy it again")


def test_a_start_that_was_killed_leaves_nothing_half(monkeypatch: pytest.MonkeyPatch) -> None:
    save, calls = np.save, 0

    def killed_in_the_third(file: str, array: np.ndarray, **options: bool) -> None:
        nonlocal calls
        calls += 1
        save(file, array, **options)
        if calls == 3:
            with open(file, "r+b") as written:
                written.truncate(Path(file).stat().st_size // 2)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", killed_in_the_third)
        with pytest.raises(KeyboardInterrupt):
            documents("80,20,0")
    assert calls == 3
    assert documents("80,20,0") == set(range(16))
