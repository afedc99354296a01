"""tools/compare_losses.py without its runs: what counts as a difference."""

from __future__ import annotations

import sys

import pytest

from tools import compare_losses


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ({"lm loss": [3.0, float("nan"), 2.0], "grad-norm": [1.0, float("nan"), 1.0]}, "1 of 1 runs"),
        ({"lm loss": [3.0, float("nan"), 2.5], "grad-norm": [1.0, float("nan"), 1.0]}, "differs from iteration 3 on"),
        ({"lm loss": [3.0, 2.5, 2.0], "grad-norm": [1.0, 1.0, 1.0]}, "differs from iteration 2 on"),
        ({"lm loss": [3.0, float("nan"), 2.0], "grad-norm": [1.5, 1.0, 1.0]}, "differs from iteration 1 on"),
        ({"lm loss": [3.0, float("nan")], "grad-norm": [1.0, float("nan")]}, "differs from iteration 3 on"),
    ],
)
def test_losses_that_are_nan_in_both_trees_are_equal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], new: compare_losses.Losses, words: str
) -> None:
    old = {"lm loss": [3.0, float("nan"), 2.0], "grad-norm": [1.0, float("nan"), 1.0]}
    monkeypatch.setattr(sys, "argv", ["compare_losses.py", "--base", "HEAD", "--recipes", "bf16", "--layouts", "one"])
    monkeypatch.setattr(compare_losses, "git", lambda *arguments: b"0123")
    monkeypatch.setattr(compare_losses, "base_losses", lambda *arguments: {"bf16 one": old})
    monkeypatch.setattr(compare_losses, "measure", lambda *arguments: {"bf16 one": new})
    assert compare_losses.main() == int("differs" in words)
    assert words in capsys.readouterr().out
