"""The indices of samples that runs keep beside a corpus: of the documents asked for, and whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

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


def documents(split: str) -> set[int]:
    """Those that one epoch of the training data holds tokens of."""
    options = {"mock_data": None, "data_cache_path": "cache", "data_path": ["text.jsonl"], "split": split}
    config = resolve_run(resolve_model(parse(argv(**options))[0]), 1, gpus=False)
    found = batches.build(config, tokenizer_of(config), 0, 0)["train"]
    assert found is not None
    return {t for i in range(found.epoch_samples) for t in found.samples[i]["tokens"].tolist() if t < DOCUMENTS}


def test_another_split_is_other_documents() -> None:
    assert documents("50,50,0") == set(range(10))
    assert documents("80,20,0") == set(range(16))
    assert documents("50,50,0") == set(range(10))


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
