"""What a start finds in --save and makes of it: checkpoints of this run, damaged ones, of other releases, of none."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.checkpoint import checkpoint, safe_load, storage
from megatron_lowprec.training.model import torch_optimizers
from tests.training.checkpoint.conftest import COMMON, newest
from tests.training.checkpoint.forms import change, common_as_file, common_as_object
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses, rows


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0b11
    path.write_bytes(content)


def test_train_samples_hold_when_the_batch_changes(interrupted: Path, drive: Drive) -> None:
    """16 of 40 samples are behind at iteration 4: three batches of 8 are left."""
    options = {**COMMON, "train_iters": None, "train_samples": 40, "lr_decay_iters": None}
    drive(argv(**options, global_batch_size=8))
    assert [(row["iteration"], row["consumed samples"]) for row in rows(interrupted)][4:] == [(5, 24), (6, 32), (7, 40)]


# What happened to the folder, whether the run then goes back to iteration 2, and what it says about it.
ACCIDENTS: dict[str, tuple[Callable[[Path], Any], int, str]] = {
    "nothing": (lambda out: None, 4, "holds a checkpoint: continuing from it"),
    "corrupt latest": (lambda out: (out / storage.TRACKER).write_bytes(b"\x00\xff4"), 4, "missing or damaged"),
    "empty latest": (lambda out: (out / storage.TRACKER).write_text(""), 4, "missing or damaged"),
    "no latest": (lambda out: (out / storage.TRACKER).unlink(), 4, "missing or damaged"),
    "latest of another": (lambda out: (out / storage.TRACKER).write_text("900\n"), 4, "iter_0000900 cannot be loaded"),
    "truncated shard": (lambda out: truncate(newest(out) / "__0_0.distcp"), 2, "__0_0.distcp is cut short"),
    "missing shard": (lambda out: (newest(out) / "__0_0.distcp").unlink(), 2, "__0_0.distcp is missing"),
    "truncated metadata": (lambda out: truncate(newest(out) / ".metadata"), 2, ".metadata cannot be read"),
    "truncated common": (lambda out: truncate(common_as_file(newest(out))), 2, "common.pt cannot be read"),
    "no config": (lambda out: (newest(out) / "config.yaml").unlink(), 2, "config.yaml is missing"),
    "two flipped bits": (
        lambda out: flip(newest(out) / "__0_0.distcp", 5000),
        2,
        "__0_0.distcp: other bytes",
    ),
    "a flipped bit of config": (
        lambda out: flip(newest(out) / "config.yaml", -3),
        2,
        "iter_0000004 cannot be loaded: config",
    ),
    "no checksums": (lambda out: (newest(out) / "checksums.json").unlink(), 4, "saved without checksums"),
    "damaged checksums": (lambda out: truncate(newest(out) / "checksums.json"), 2, "checksums.json cannot be read"),
    "empty folder": (lambda out: (shutil.rmtree(newest(out)), newest(out).mkdir()), 2, "config.yaml is missing"),
    "being replaced": (lambda out: newest(out).rename(out / "iter_0000004.old"), 4, "continuing from it"),
}


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_a_start_goes_on_from_the_newest_whole_checkpoint(
    drive: Drive, interrupted: Path, whole: Path, capsys: pytest.CaptureFixture[str], accident: str
) -> None:
    happen, iteration, words = ACCIDENTS[accident]
    happen(interrupted)
    drive(argv(**COMMON))
    printed = capsys.readouterr().out
    assert printed.count(words) == 1
    assert f"at iteration {iteration}" in printed
    assert losses(interrupted) == losses(whole)
    assert storage.tracked(str(interrupted)) == 6
    assert not list(interrupted.glob("*.old"))


@pytest.mark.parametrize("form", [common_as_file, common_as_object])
def test_checkpoints_of_other_releases_resume(
    drive: Drive, interrupted: Path, whole: Path, form: Callable[[Path], Path]
) -> None:
    """Whether what all ranks share is a file, as before Megatron-core 0.19, or an object."""
    form(newest(interrupted))
    drive(argv(**COMMON))
    assert losses(interrupted) == losses(whole)


def test_without_a_complete_checkpoint_the_run_is_refused(drive: Drive, interrupted: Path) -> None:
    for folder in storage.whole(str(interrupted)).values():
        truncate(common_as_file(folder))
    with pytest.raises(UserError, match=r"no checkpoint there is whole: iter_0000004 .*; iter_0000002 "):
        drive(argv(**COMMON))


def test_an_older_checkpoint_can_be_chosen(drive: Drive, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = COMMON | {"save": "new", "load": str(whole)}
    drive(argv(**common, ckpt_step=2))
    assert "at iteration 2" in capsys.readouterr().out
    assert losses(Path("new")) == losses(whole)[2:]
    with pytest.raises(UserError, match=r"no checkpoint of iteration 3; there are 6, 4, 2"):
        drive(argv(**common, ckpt_step=3))
    with pytest.raises(UserError, match="--ckpt-step 2 does nothing without --load or --pretrained-checkpoint"):
        drive(argv(**common | {"load": None, "save": "newer"}, ckpt_step=2))


def test_an_older_checkpoint_is_chosen_for_the_first_start_alone(
    drive: Drive, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {"save": "new", "pretrained_checkpoint": str(whole), "ckpt_step": 4, "train_iters": 2}
    drive(argv(**common, exit_interval=1))
    assert "iter_0000004" in capsys.readouterr().out
    drive(argv(**common))
    assert "at iteration 1" in capsys.readouterr().out


def test_another_run_s_damaged_checkpoint_is_refused(drive: Drive, interrupted: Path) -> None:
    truncate(newest(interrupted) / "__0_0.distcp")
    with pytest.raises(UserError, match=r"iter_0000004 cannot be loaded: __0_0\.distcp is cut short"):
        drive(argv(**COMMON | {"save": "new", "load": "out"}))


@pytest.mark.parametrize("exists", [False, True], ids=["absent", "empty"])
def test_a_save_folder_without_a_checkpoint_starts_a_run(drive: Drive, tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "out").mkdir()
    drive(argv(save="out", train_iters=1))
    assert [row["iteration"] for row in rows(Path("out"))] == [1]


def test_no_save_leaves_checkpoints_and_their_metrics_alone(drive: Drive, interrupted: Path) -> None:
    before = rows(interrupted)
    with pytest.raises(UserError, match="name another folder with --save"):
        drive(argv(**COMMON | {"train_iters": 1, "no_save": True}))
    assert rows(interrupted) == before


def test_no_save_reads_no_checkpoints(drive: Drive) -> None:
    drive(argv(**COMMON | {"save": None, "train_iters": 2}))
    drive(argv(**COMMON | {"save": None, "train_iters": 1, "no_save": True}))
    assert [[row["iteration"] for row in rows(folder)] for folder in sorted(Path("runs").iterdir())] == [[1], [1, 2]]


def test_a_pretrained_checkpoint_is_where_a_run_begins_once(drive: Drive, whole: Path) -> None:
    common = {"save": "new", "pretrained_checkpoint": str(whole), "train_iters": 2}
    drive(argv(**common, exit_interval=1))
    drive(argv(**common))
    assert [row["iteration"] for row in rows(Path("new"))] == [1, 2]
    # Trained weights, and a schedule and counts of its own.
    assert rows(Path("new"))[0]["lm loss"] < rows(whole)[0]["lm loss"]
    assert rows(Path("new"))[0]["consumed samples"] == 4


def test_the_seed_is_the_checkpoint_s_unless_one_is_given(
    drive: Drive, interrupted: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = newest(interrupted) / "config.yaml"
    content = yaml.safe_load(path.read_text())
    assert content["options"]["seed"] == 1234
    drive(argv(**COMMON | {"save": "new", "load": "out", "seed": 7, "no_save": True}))
    assert "seed: 7, checkpoint 1234" in capsys.readouterr().out
    assert losses(Path("new"))[0] != losses(whole)[4]
    content["options"]["seed"] = 7
    change(newest(interrupted), "config.yaml", yaml.safe_dump(content).encode())
    drive(argv(**COMMON | {"save": "same", "load": "out", "no_save": True}))
    assert "seed: the checkpoint's 7" in capsys.readouterr().out
    assert losses(Path("same")) == losses(Path("new"))


def test_other_data_has_a_warning(drive: Drive, interrupted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(**COMMON | {"seq_length": 16, "max_position_embeddings": 32}))
    assert "data: --seq-length differ" in capsys.readouterr().out


def test_the_padding_of_the_vocabulary_is_the_checkpoint_s(drive: Drive, interrupted: Path, whole: Path) -> None:
    # As a larger tensor-parallel size would ask for.
    drive(argv(**COMMON | {"make_vocab_size_divisible_by": 512}))
    assert losses(interrupted) == losses(whole)


@pytest.mark.parametrize("distributed", [None, True])
def test_options_of_the_optimizer_win_over_the_checkpoint(
    drive: Drive, distributed: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {"lr_decay_style": "constant", "use_distributed_optimizer": distributed, "save_interval": 2}
    drive(argv(save="out", train_iters=2, lr=7e-4, **common))
    groups: list[dict[str, Any]] = []
    load = checkpoint.load

    def recorded(found: Any, trainer: Any, *args: Any) -> Any:
        result = load(found, trainer, *args)
        groups.extend(group for inner in torch_optimizers(trainer.optimizer) for group in inner.param_groups)
        return result

    monkeypatch.setattr(checkpoint, "load", recorded)
    drive(argv(save="changed", load="out", train_iters=3, lr=5e-4, adam_beta2=0.95, **common))
    drive(argv(save="kept", load="out", train_iters=3, lr=5e-4, use_checkpoint_opt_param_scheduler=True, **common))
    rates = [rows(Path(name))[0]["learning-rate"] for name in ("changed", "kept")]
    assert rates == [5e-4, 7e-4]
    assert {group["betas"] for group in groups[: len(groups) // 2]} == {(0.9, 0.95)}


def test_a_checkpoint_without_optimizer_state_holds_weights(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    options = COMMON | {"save_interval": None, "exit_interval": 2, "no_save_optim": True}
    drive(argv(**options))
    stored = safe_load.examine(Path("out/iter_0000002")).state_dict_metadata
    assert any("embedding" in key for key in stored)
    assert not [key for key in stored if "optimizer" in key]
    with pytest.raises(UserError, match=r"was saved with --no-save-optim: add --load out --no-load-optim to go"):
        drive(argv(**options))
    capsys.readouterr()
    drive(argv(**options, no_load_optim=True))
    assert "at iteration 2" in capsys.readouterr().out
    assert len(losses(Path("out"))) == 4
    assert not [row for row in rows(Path("out")) if row.get("skipped iterations")]


def test_a_flag_of_a_first_start_says_where_it_has_an_effect(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal that advises it names --load as well."""
    drive(argv(save="out", train_iters=2, save_interval=2))
    other = {"save": "out", "train_iters": 3, "bf16": True}
    with pytest.raises(UserError, match=r"; give the checkpoint's options, or --load out --no-load-optim to go"):
        drive(argv(**other, no_load_optim=True))
    drive(argv(**other, no_load_optim=True, load="out"))
    assert len(losses(Path("out"))) == 3
    capsys.readouterr()
    drive(argv(save="out", train_iters=4, bf16=True, no_load_rng=True))
    assert "continuing from it; without --load out it ignores --no-load-rng" in capsys.readouterr().out


def test_a_checkpoint_of_an_earlier_commit_goes_on(drive: Drive) -> None:
    """Its recipe has flat fields of scales, its layers have amax histories; the losses were recorded there."""
    with tarfile.open(Path(__file__).with_name("of_c962186.tar.xz")) as tar:
        tar.extractall(filter="data")
    sizes = {"hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 1, "vocab_size": 63, "bf16": True}
    drive(argv(**sizes, save="stored", train_iters=4, save_interval=2, lr_decay_iters=4, global_batch_size=2))
    found = [row["lm loss"] for row in rows(Path("stored")) if "lm loss" in row]
    assert found == pytest.approx([4.882648, 4.885889, 4.846995, 4.839111], rel=1e-5)
    stored = yaml.safe_load(Path("stored/config.yaml").read_text())["recipe"]
    assert (stored["dgrad"]["grad_output"]["scale"]["rule"], stored["keep_bf16"]["last_layers"]) == ("floor", 1)
