"""Weighted blends and their change at a share of the run: what is drawn, whatever restarts come between."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.data import batches, corpus_writer
from megatron_lowprec.training.data.blend import all_paths, check_paths, check_phase, continued_phase
from megatron_lowprec.training.data.tokenizer import tokenizer_of
from tests.refusal import refused
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses, rows

FILES = {"low.jsonl": 0, "middle.jsonl": 80, "high.jsonl": 160}


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three corpora of 40 samples of 32 tokens, told apart by their tokens."""
    monkeypatch.chdir(tmp_path)
    for name, first in FILES.items():
        text = " ".join(str(first + i % 80) for i in range(40 * 32 + 1))
        (tmp_path / name).write_text(json.dumps({"text": text}) + "\n")
    return tmp_path


def resolved(**changes: Any) -> Config:
    options = {"mock_data": None, "data_cache_path": "cache", "train_iters": 10, "eval_iters": 0, **changes}
    return resolve_run(resolve_model(parse(argv(**options))[0]), 1, gpus=False)


def drawn(config: Config, count: int) -> list[tuple[str, tuple[int, ...]]]:
    """(corpus, tokens) of the first ``count`` training samples."""
    split = batches.build(config, tokenizer_of(config), 0, 0)["train"]
    assert split is not None
    samples = [tuple(split.samples[i]["tokens"].tolist()) for i in range(count)]
    return [(next(name for name, first in FILES.items() if first <= min(s) < first + 80), s) for s in samples]


def shares(found: list[tuple[str, tuple[int, ...]]]) -> dict[str, int]:
    return {name: sum(corpus == name for corpus, _ in found) for name in FILES}


@pytest.mark.parametrize("mock", [False, True])
def test_every_seed_validates_on_the_same_samples_and_trains_in_its_own_order(texts: Path, mock: bool) -> None:
    paths = {f"{split}_data_path": ["low.jsonl", "high.jsonl"] for split in ("train", "valid", "test")}
    options = {"mock_data": True} if mock else paths
    first, second = (
        batches.build(config, tokenizer_of(config), 0, 0)
        for config in (resolved(**options, eval_iters=2, seed=seed) for seed in (1, 2))
    )

    def tokens(data: batches.Data, split: str) -> list[list[int]]:
        found = data[split]
        assert found is not None
        return [found.samples[i]["tokens"].tolist() for i in range(40)]

    assert tokens(first, "train") != tokens(second, "train")
    for split in ("valid", "test"):
        assert tokens(first, split) == tokens(second, split)


def test_weights_decide_what_is_drawn(texts: Path) -> None:
    config = resolved(train_data_path=["0.75", "low.jsonl", "0.25", "high.jsonl"])
    assert shares(drawn(config, 40)) == {"low.jsonl": 30, "middle.jsonl": 0, "high.jsonl": 10}
    config = resolved(train_data_path=["low.jsonl", "high.jsonl"])
    assert shares(drawn(config, 40)) == {"low.jsonl": 20, "middle.jsonl": 0, "high.jsonl": 20}


def test_the_second_blend_takes_over(texts: Path) -> None:
    common = {"data_phase_switch": 0.6, "data_phase_path": ["1", "middle.jsonl", "3", "high.jsonl"]}
    config = resolved(train_data_path=["low.jsonl"], **common)
    assert config.data_phase_switch_samples == 24  # of 10 iterations of 4 samples
    assert all_paths(config) == ["high.jsonl", "low.jsonl", "middle.jsonl"]
    found = drawn(config, 40)
    assert shares(found[:24]) == {"low.jsonl": 24, "middle.jsonl": 0, "high.jsonl": 0}
    assert shares(found[24:]) == {"low.jsonl": 0, "middle.jsonl": 4, "high.jsonl": 12}


def test_a_path_of_both_blends_goes_on(texts: Path) -> None:
    config = resolved(
        train_data_path=["low.jsonl"],
        data_phase_switch_samples=24,
        data_phase_path=["1", "low.jsonl", "1", "high.jsonl"],
    )
    low = [sample for corpus, sample in drawn(config, 40) if corpus == "low.jsonl"]
    alone = [sample for _, sample in drawn(resolved(train_data_path=["low.jsonl"]), len(low))]
    assert low == alone


def test_documents_held_out_are_held_out_of_both_blends(texts: Path) -> None:
    for name, first in FILES.items():
        lines = [json.dumps({"text": " ".join([str(first + i)] * 65)}) for i in range(10)]
        Path(name).write_text("\n".join(lines) + "\n")
    config = resolved(
        data_path=["low.jsonl"],
        split="80,20,0",
        eval_iters=1,
        data_phase_switch_samples=8,
        data_phase_path=["middle.jsonl"],
    )
    second = [sample for corpus, sample in drawn(config, 40) if corpus == "middle.jsonl"]
    assert {token for sample in second for token in sample} - {255} == set(range(80, 88))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_phase_switch": 0.5}, "need each other"),
        ({"data_phase_path": ["low.jsonl"]}, "need each other"),
        ({"data_phase_switch": 1.0, "data_phase_path": ["low.jsonl"]}, "between 0 and 1"),
        ({"data_phase_switch": 0.01, "data_phase_path": ["low.jsonl"]}, "at sample 0 of a run of 40"),
        ({"data_phase_switch_samples": 40, "data_phase_path": ["low.jsonl"]}, "at sample 40 of a run of 40"),
        ({"mock_data": True, "data_phase_switch": 0.5, "data_phase_path": ["x"]}, "--mock-data"),
        ({"data_phase_switch": 0.5, "data_phase_path": ["1", "a", "2", "a"]}, "a is named twice"),
        ({"train_data_path": ["a", "b", "./a"]}, "a is named twice"),
        ({"train_data_path": ["inf", "a", "1", "b"]}, "inf a 1 b: every weight must be a number above 0"),
        ({"train_data_path": ["1e308", "a", "1e308", "b"]}, "must be a number above 0"),
    ],
)
def test_blends_that_make_no_sense(texts: Path, changes: dict[str, Any], words: str) -> None:
    common: dict[str, Any] = {} if changes.get("mock_data") else {"train_data_path": ["low.jsonl"]}

    def check() -> None:
        config = resolved(**{**common, **changes})
        all_paths(config)
        check_phase(config, config.steps.samples)

    with pytest.raises(UserError, match=words):
        check()


def test_a_split_without_training_data_is_refused(texts: Path, drive: Drive) -> None:
    with pytest.raises(UserError, match="--split 0,0,1 has no part to train on"):
        drive(argv(mock_data=None, data_path=["low.jsonl"], split="0,0,1", no_save=True))


def test_a_missing_second_blend_is_refused_before_the_start(texts: Path, drive: Drive) -> None:
    options = {"mock_data": None, "train_data_path": ["low.jsonl"], "data_phase_switch": 0.5}
    with pytest.raises(UserError, match="nowhere"):
        drive(argv(**options, data_phase_path=["nowhere.jsonl"]))


@pytest.mark.parametrize("stop", [2, 3, 4], ids=["before", "at", "after"])
def test_a_resumed_run_sees_the_same_data(drive: Drive, texts: Path, stop: int) -> None:
    common: dict[str, Any] = {
        "mock_data": None,
        "train_data_path": ["low.jsonl"],
        "data_cache_path": "cache",
        "data_phase_switch": 0.5,
        "data_phase_path": ["0.5", "low.jsonl", "0.5", "high.jsonl"],
        "train_iters": 6,
        "save_interval": 1,
    }
    drive(argv(save="whole", **common))
    shutil.copytree(f"whole/iter_000000{stop}", f"part/iter_000000{stop}")
    Path("part/latest_checkpointed_iteration.txt").write_text(f"{stop}\n")
    drive(argv(save="rest", load="part", **common))
    assert losses(Path("rest")) == losses(Path("whole"))[stop:]
    other = {**common, "data_phase_switch": None, "data_phase_path": None}
    drive(argv(save="other", **other))
    assert losses(Path("other"))[:3] == losses(Path("whole"))[:3]
    assert losses(Path("other"))[3:] != losses(Path("whole"))[3:]


def test_a_longer_run_changes_where_the_shorter_one_did(drive: Drive, texts: Path, capsys: Any) -> None:
    common: dict[str, Any] = {
        "mock_data": None,
        "train_data_path": ["low.jsonl"],
        "data_cache_path": "cache",
        "data_phase_path": ["high.jsonl"],
        "lr_decay_iters": 20,
    }
    drive(argv(save="long", train_iters=8, data_phase_switch_samples=8, no_save=True, **common))
    drive(argv(save="out", train_iters=4, data_phase_switch=0.5, **common))
    capsys.readouterr()
    drive(argv(save="out", load="out", train_iters=8, data_phase_switch=0.5, **common))
    printed = capsys.readouterr().out
    assert "begins at sample 8, as the checkpoint's run had it, not at 16" in printed
    assert "from sample 8 on the second blend" in printed
    assert losses(Path("out")) == losses(Path("long"))


def test_a_resume_of_a_smaller_batch_goes_on_behind_the_change(
    drive: Drive, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common: dict[str, Any] = {
        "mock_data": None,
        "train_data_path": ["low.jsonl"],
        "data_cache_path": "cache",
        "data_phase_path": ["high.jsonl"],
        "data_phase_switch_samples": 8,
        "train_iters": 4,
    }
    drive(argv(save="out", exit_interval=3, **common))
    assert " epochs" not in capsys.readouterr().out, "two blends have epochs of their own"
    drive(argv(save="out", micro_batch_size=1, global_batch_size=1, **common))  # 4 samples, if all were of this batch
    assert rows(Path("out"))[-1]["consumed samples"] == 13


def test_a_sample_that_is_given_moves_the_change() -> None:
    config = Config(data_phase_switch_samples=16)
    before = {"data_phase_switch_samples": 8}
    assert continued_phase(config, before, {"data_phase_switch_samples"}, 8) == (config, [])
    assert continued_phase(config, {}, set(), 16) == (config, [])
    assert continued_phase(config, before, set(), 99)[0].data_phase_switch_samples == 8
    with pytest.raises(UserError, match="changed its data at sample 8 and consumed 12; give 8"):
        continued_phase(config, before, {"data_phase_switch_samples"}, 12)
    with pytest.raises(UserError, match=r"at sample 16, but 20 were .* --data-phase-switch-samples 20 or more"):
        continued_phase(config, {}, set(), 20)


def test_a_path_of_both_blends_goes_on_under_another_spelling(texts: Path) -> None:
    common: dict[str, Any] = {"train_data_path": ["low.jsonl"], "data_phase_switch_samples": 24}
    again, alike = (resolved(**common, data_phase_path=[path]) for path in (str(texts / "low.jsonl"), "low.jsonl"))
    assert drawn(again, 40) == drawn(alike, 40)


def test_flags_that_look_for_ends_of_documents_need_some(texts: Path) -> None:
    config = resolved(train_data_path=["bare"], reset_position_ids=True)
    tokenizer = tokenizer_of(config)
    for append_eod in (False, True):
        corpus_writer.write(["low.jsonl"], {"text": "bare"}, tokenizer, append_eod=append_eod)
        with nullcontext() if append_eod else refused("--reset-position-ids", "bare was written without", "--append"):
            check_paths(config, tokenizer)
