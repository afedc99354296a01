"""A job that was requeued repeats its command: the run goes on from its newest checkpoint, however it began."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.checkpoint import storage
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses, rows
from tests.weekly import also_weekly

# Dropout is on, and the learning rate decays.
COMMON: dict[str, Any] = {"save": "out", "train_iters": 8, "recipe": "fp8_delayed", "lr_decay_iters": 10}

# How a run begins, and after which iteration of another run's checkpoints (of iterations 2 and 4) it counts on.
STARTS: dict[str, tuple[dict[str, Any], int]] = {
    "fresh": ({}, 0),
    "load": ({"load": "base"}, 4),
    "load, ckpt-step": ({"load": "base", "ckpt_step": 2}, 2),
    "load, no-load-optim, no-load-rng": ({"load": "base", "no_load_optim": True, "no_load_rng": True}, 4),
    "finetune": ({"load": "base", "finetune": True}, 0),
    "finetune, ckpt-step": ({"load": "base", "finetune": True, "ckpt_step": 2}, 0),
    "pretrained": ({"pretrained_checkpoint": "base"}, 0),
    "pretrained, ckpt-step": ({"pretrained_checkpoint": "base", "ckpt_step": 2}, 0),
    "load of save, ckpt-step": ({"load": "out", "ckpt_step": 2}, 2),
    "load of save, no-load-optim": ({"load": "out", "no_load_optim": True}, 4),
    "finetune of save": ({"load": "out", "finetune": True}, 0),
}

EACH_TIME = ("fresh", "load, ckpt-step", "finetune", "load of save, no-load-optim", "pretrained")


@pytest.mark.parametrize("name", also_weekly(STARTS, EACH_TIME))
def test_every_start_goes_on_from_save(drive: Drive, checkpoints: Path, name: str) -> None:
    """Three starts of one iteration each are one of three, bit for bit."""
    start, begun = STARTS[name]
    folders = ["base", *(["out", "out of one"] if start.get("load") == "out" else [])]
    for folder in folders:
        shutil.copytree(checkpoints, folder)
    at_once = {key: "out of one" if value == "out" else value for key, value in (COMMON | start).items()}
    drive(argv(**at_once, exit_interval=begun + 3))
    for iteration in range(begun + 1, begun + 4):
        drive(argv(**COMMON, **start, exit_interval=1))
        assert storage.tracked("out") == iteration
    three, one = (rows(Path(folder)) for folder in ("out", "out of one"))
    assert [row["iteration"] for row in three][-3:] == [begun + 1, begun + 2, begun + 3]
    assert losses(Path("out")) == losses(Path("out of one"))
    assert len(three) == len(one)


def test_the_default_folder_is_save_as_well(drive: Drive) -> None:
    drive(argv(train_iters=4, save_interval=2))
    save = "runs/gpt-bf16/checkpoints"
    for iteration in (3, 4, 5):
        drive(argv(load=save, ckpt_step=2, train_iters=8, exit_interval=1))
        assert storage.tracked(save) == iteration
    assert [row["iteration"] for row in rows(Path("runs/gpt-bf16"))] == [1, 2, 3, 4, 5]


def test_another_run_s_checkpoints_in_save_are_no_reason(drive: Drive, checkpoints: Path) -> None:
    """They began elsewhere, by other flags, or with other options of an earlier version."""
    for folder in ("base", "other"):
        shutil.copytree(checkpoints, folder)
    command = COMMON | {"exit_interval": 1, "load": "base"}
    drive(argv(**command | {"load": "other"}))
    drive(argv(**command | {"finetune": True}))
    assert storage.tracked("out") == 1
    drive(argv(**command))
    assert storage.tracked("out") == 5
    drive(argv(**command | {"ckpt_step": 2}))
    assert storage.tracked("out") == 3


def test_the_folder_counts_and_not_how_it_is_written(drive: Drive, checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoints, "base")
    for load in ("base", "./base/", str(tmp_path / "base")):
        drive(argv(**COMMON, load=load, exit_interval=1))
    assert storage.tracked("out") == 7


def test_a_checkpoint_of_an_earlier_version_has_the_start_of_its_options(drive: Drive, checkpoints: Path) -> None:
    shutil.copytree(checkpoints, "base")
    command = COMMON | {"exit_interval": 1, "load": "base", "finetune": True}
    drive(argv(**command))
    path = Path("out/iter_0000001/config.yaml")
    content = yaml.safe_load(path.read_text())
    assert content.pop("started_from") == {"load": "base", "finetune": True}
    path.write_text(yaml.safe_dump(content))
    path.with_name("checksums.json").unlink()  # it wrote none
    drive(argv(**command))
    assert storage.tracked("out") == 2


@pytest.mark.parametrize("damaged", ["base", {"finetune": True}, ["base"], 7])
def test_a_damaged_start_is_damage(drive: Drive, checkpoints: Path, damaged: Any) -> None:
    shutil.copytree(checkpoints, "base")
    path = Path("base/iter_0000004/config.yaml")
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "started_from": damaged}))
    with pytest.raises(UserError, match=r"config\.yaml is missing or not this driver's"):
        drive(argv(**COMMON, load="base"))


def test_initial_weights_are_recorded_for_the_whole_run(drive: Drive, checkpoints: Path) -> None:
    """The report groups by them: the options of a start that goes on no longer name them."""
    shutil.copytree(checkpoints, "base")
    for _ in range(2):
        drive(argv(**COMMON, load="base", finetune=True, exit_interval=1))
    content = yaml.safe_load(Path("out/config.yaml").read_text())
    assert content["initial_weights"] == "base/iter_0000004"
    assert not content["options"]["finetune"]
