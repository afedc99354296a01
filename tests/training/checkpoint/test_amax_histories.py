"""Amax histories of delayed scaling at a start: filled by calibration, or the checkpoint's for another batch."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.training import loop
from megatron_lowprec.training.checkpoint import checkpoint, storage
from tests.training.checkpoint.conftest import COMMON
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses, rows


def test_delayed_scaling_is_calibrated_for_a_checkpoint_without_histories(
    drive: Drive, capsys: pytest.CaptureFixture[str]
) -> None:
    # A mean over 1,024 tokens: at scale 1 E5M2 rounds most of its gradients to zero, and the norm is 8% off.
    sizes = {"hidden_size": 128, "seq_length": 512, "bf16": True, "hidden_dropout": 0, "attention_dropout": 0}
    common = COMMON | sizes | {"train_iters": 5, "save_interval": None}
    drive(argv(**common | {"save": "plain", "train_iters": 4}))
    drive(argv(**common | {"save": "exact", "load": "plain"}))
    capsys.readouterr()
    drive(argv(**common | {"save": "new", "load": "plain", "recipe": "fp8_delayed"}))
    printed = capsys.readouterr().out
    assert "24 amax histories are not in it as this recipe keeps them; they begin anew" in printed
    assert "histories filled by 3 passes over the next batch" in printed
    exact, new = (rows(Path(name))[0] for name in ("exact", "new"))
    assert new["lm loss"] == pytest.approx(exact["lm loss"], rel=1e-3)
    assert new["grad-norm"] == pytest.approx(exact["grad-norm"], rel=0.03)
    # Histories that begin anew follow no earlier batch.
    drive(argv(**common | {"save": "larger", "load": "plain", "recipe": "fp8_delayed", "global_batch_size": 8}))
    assert "amax histories of gradients times" not in capsys.readouterr().out
    # The other way round the histories have no use, and this is said.
    drive(argv(**common | {"save": "back", "load": "new", "train_iters": 6, "recipe": "bf16"}))
    assert "amax histories of grad_output, input, weight are dropped" in capsys.readouterr().out


def test_histories_of_gradients_follow_the_batch_of_a_rank(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A gradient is a mean over its rank's tokens: four times as many make each a quarter as large.
    common = {"recipe": "fp8_delayed", "lr_decay_iters": 100}
    drive(argv(save="out", train_iters=4, global_batch_size=4, **common))
    load, runtimes, loaded = checkpoint.load, [], []

    def recorded(found: Any, trainer: Any, *args: Any) -> Any:
        result = load(found, trainer, *args)
        runtimes.append(trainer.runtime)
        loaded.append(in_effect(trainer.runtime))
        return result

    def in_effect(runtime: Any) -> dict[str, list[float]]:
        states = [(name, h.state(slot)) for layer in runtime.layers for name, (h, slot) in layer.histories.items()]
        return {wanted: [state[0].item() for name, state in states if name == wanted] for wanted, _ in states}

    monkeypatch.setattr(checkpoint, "load", recorded)
    for batch in (4, 16):
        drive(argv(save=f"on {batch}", load="out", train_iters=5, global_batch_size=batch, **common))
    assert capsys.readouterr().out.count("amax histories of gradients times 0.25") == 1
    same, larger = loaded
    assert larger["input"] == same["input"]
    assert larger["weight"] == same["weight"]
    assert larger["grad_output"] == [amax / 4 for amax in same["grad_output"]]
    # And so they are, by the gradients of the next step: 2 is halfway, in logarithms, to the 4 of a wrong factor.
    for (history, slot), expected in zip(
        [layer.histories["grad_output"] for layer in runtimes[1].layers], larger["grad_output"], strict=True
    ):
        assert 1 / 2 < history.window[0, slot].item() / expected < 2


@pytest.mark.parametrize("fill", [True, None])
def test_calibrate_amax_fills_the_histories_of_a_new_run(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fill: bool | None
) -> None:
    iterate, in_effect = loop._train_iteration, list[float]()

    def recorded(run: Any, *rest: Any) -> Any:
        if run.progress.iteration == 0:
            layers = run.trainer.runtime.layers
            in_effect.extend(h.in_effect[slot].item() for one in layers for h, slot in one.histories.values())
        return iterate(run, *rest)

    monkeypatch.setattr(loop, "_train_iteration", recorded)
    drive(argv(save="out", recipe="fp8_delayed", train_iters=2, calibrate_amax=fill))
    assert ("histories filled by 3 passes" in capsys.readouterr().out) is bool(fill)
    assert [amax > 0 for amax in in_effect] == [bool(fill)] * (2 * 4 * 3)
    drive(argv(save="plain", train_iters=1, calibrate_amax=fill))
    assert ("nothing to fill, recipe bf16 has no delayed scaling" in capsys.readouterr().out) is bool(fill)


def test_calibration_leaves_no_trace_but_the_histories(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    # Dropout is on. A run under bf16 that calibrates all the same is the run that does not.
    drive(argv(**COMMON))
    shutil.rmtree("out/iter_0000006")
    Path("out", storage.TRACKER).write_text("2\n")
    load = checkpoint.load

    def uncalibrated(*args: Any) -> Any:
        return replace(load(*args), uncalibrated=True)

    monkeypatch.setattr(checkpoint, "load", uncalibrated)
    whole = losses(Path("out"))
    drive(argv(**COMMON))
    assert losses(Path("out")) == whole
