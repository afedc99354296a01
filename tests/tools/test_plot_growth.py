"""tools/plot_growth.py: a figure of runs and their weights, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import plot_growth

TENSOR = "decoder.layers.mlp.linear_fc1.weight"


@pytest.fixture
def archive(tmp_path: Path) -> str:
    """A folder with the run ``one``, and the sizes of its weights."""
    run = tmp_path / "archive" / "one"
    run.mkdir(parents=True)
    rows = [
        {"iteration": i, "consumed samples": 8 * i, "lm loss": 3.0, "grad-norm": 1 + i / 100} for i in range(1, 401)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {str(at): {TENSOR: {"rms": [0.02, 0.03]}} for at in (200, 400)}
    (tmp_path / "weights.json").write_text(json.dumps({"one": sizes}))
    return str(tmp_path / "archive")


def plotted(archive: str, tmp_path: Path, weights: str = "weights.json", tensor: str = TENSOR, layer: int = 2) -> int:
    flags = {"weights": tmp_path / weights, "tensor": tensor, "layer": layer, "out": tmp_path / "out.png"}
    return plot_growth.main([archive, *(word for name, value in flags.items() for word in (f"--{name}", str(value)))])


def test_a_figure_is_drawn(archive: str, tmp_path: Path) -> None:
    assert plotted(archive, tmp_path) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": "nowhere.json"}, "nowhere.json: no such file"),
        ({"weights": "archive/one/metrics.jsonl"}, "metrics.jsonl: cannot be read"),
        ({"tensor": "decoder.nothing"}, f"--tensor decoder.nothing: not among the weights; name one of {TENSOR}"),
        ({"layer": 99}, f"--layer 99: {TENSOR} has sizes of 2 layers; give one from 1 to 2"),
        ({"layer": 0}, "--layer 0: "),
    ],
)
def test_errors_are_one_line(
    archive: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str | int], words: str
) -> None:
    assert plotted(archive, tmp_path, **changes) == 2  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out.png").exists()
