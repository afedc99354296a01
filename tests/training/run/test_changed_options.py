"""What a resumed run takes from its checkpoint's options and recipe, and what is noted of a change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.training.checkpoint.foreign import change
from tests.training.conftest import Drive
from tests.training.helpers import argv, rows


def test_options_that_change_where_a_run_resumes_are_recorded(drive: Drive) -> None:
    def earlier(folder: str) -> Any:
        return yaml.safe_load(Path(folder, "config.yaml").read_text()).get("earlier_options")

    drive(argv(save="out", train_iters=1))
    lr = yaml.safe_load(Path("out/config.yaml").read_text())["options"]["lr"]
    drive(argv(save="out", train_iters=2))
    assert earlier("out") is None
    drive(argv(save="out", train_iters=3, lr=lr / 2, clip_grad=0.5))
    assert earlier("out") == [{"until_iteration": 2, "clip_grad": 1.0, "max_lr": lr}]
    drive(argv(save="out", train_iters=4, lr=lr / 2))
    assert earlier("out")[1:] == [{"until_iteration": 3, "clip_grad": 0.5}]
    drive(argv(save="new", load="out", finetune=True, train_iters=1))
    assert earlier("new") is None


def test_resuming_under_another_recipe_has_a_note(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(save="out", train_iters=1, recipe="bf16"))
    drive(argv(save="out", load="out", train_iters=2, recipe="mxfp8"))
    assert "trained with bf16" in capsys.readouterr().out
    assert yaml.safe_load(Path("out/config.yaml").read_text())["earlier_recipes"] == ["bf16"]
    drive(argv(save="out", load="out", train_iters=3))
    assert yaml.safe_load(Path("out/config.yaml").read_text())["earlier_recipes"] == ["bf16"]
    drive(argv(save="out", load="out", train_iters=4, recipe="bf16"))
    assert yaml.safe_load(Path("out/config.yaml").read_text())["earlier_recipes"] == ["bf16", "mxfp8"]
    drive(argv(save="new", load="out", train_iters=1, finetune=True))
    assert "earlier_recipes" not in yaml.safe_load(Path("new/config.yaml").read_text())


@pytest.mark.parametrize("load", [{"load": "out"}, {}])
def test_a_run_continues_under_the_checkpoint_s_recipe(
    drive: Drive, capsys: pytest.CaptureFixture[str], load: dict[str, str]
) -> None:
    override = ["dgrad.grad_output.format=e5m2"]
    drive(argv(save="out", train_iters=1, recipe="mxfp8", recipe_override=override))
    capsys.readouterr()
    drive(argv(save="out", train_iters=2, **load))
    printed = capsys.readouterr().out
    assert "recipe: the checkpoint's mxfp8+dgrad.grad_output.format=e5m2" in printed
    assert "recipe:      mxfp8+dgrad.grad_output.format=e5m2" in printed
    assert "where the checkpoint was trained with" not in printed
    assert [row["iteration"] for row in rows(Path("out"))] == [1, 2]


def test_a_command_with_overrides_continues_when_repeated(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    command = {"save": "out", "recipe_override": ["keep_bf16.last_layers=1"]}
    drive(argv(**command, train_iters=1))
    capsys.readouterr()
    drive(argv(**command, train_iters=2))
    printed = capsys.readouterr().out
    assert "recipe: the checkpoint's bf16+keep_bf16.last_layers=1\n" in printed
    assert "recipe:      bf16+keep_bf16.last_layers=1\n" in printed
    assert "where the checkpoint was trained with" not in printed


def test_overrides_of_the_command_are_not_called_the_checkpoint_s(
    drive: Drive, capsys: pytest.CaptureFixture[str]
) -> None:
    drive(argv(save="out", train_iters=1, recipe="mxfp8"))
    capsys.readouterr()
    drive(argv(save="out", train_iters=2, recipe_override=["dgrad.grad_output.format=e5m2"]))
    printed = capsys.readouterr().out
    assert "recipe: the checkpoint's mxfp8 with --recipe-override\n" in printed
    assert "recipe: mxfp8+dgrad.grad_output.format=e5m2, where the checkpoint was trained with mxfp8" in printed


def test_an_older_checkpoint_s_recipe_is_no_other_one(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    """Its summary may have other words, and it lacks fields that came later."""
    drive(argv(save="out", train_iters=1, recipe="mxfp8"))
    path = Path("out/iter_0000001/config.yaml")
    content = yaml.safe_load(path.read_text())
    del content["recipe"]["activations"]
    content |= {"recipe": content["recipe"] | {"summary": "as it was called then"}}
    change(path.parent, path.name, yaml.safe_dump(content).encode())
    capsys.readouterr()
    drive(argv(save="out", train_iters=2, recipe="mxfp8"))
    assert "where the checkpoint was trained with" not in capsys.readouterr().out
    assert "earlier_recipes" not in yaml.safe_load(Path("out/config.yaml").read_text())


def test_weights_alone_bring_no_recipe(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(save="out", train_iters=1, recipe="mxfp8"))
    drive(argv(save="new", load="out", finetune=True, train_iters=1))
    assert "recipe:      bf16" in capsys.readouterr().out
    drive(argv(save="newer", pretrained_checkpoint="out", train_iters=1))
    assert "recipe:      bf16" in capsys.readouterr().out
