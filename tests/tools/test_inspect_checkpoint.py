"""What a checkpoint holds, told without loading it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_lowprec.commands import inspect_checkpoint
from megatron_lowprec.training.checkpoint import loader
from tests.training.checkpoint import foreign
from tests.training.conftest import checkpoints  # noqa: F401 - a fixture


@pytest.fixture
def out(checkpoints: Path, tmp_path: Path) -> Path:  # noqa: F811
    return Path(shutil.copytree(checkpoints, tmp_path / "out"))


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """What was printed, by the word in front."""
    found: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        what, _, text = line.partition(":")
        found.setdefault(what, []).append(text.strip())
    return found


def test_recipe_step_layout_and_sizes(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_checkpoint.main([str(out)]) == 0
    told = lines(capsys)
    assert told["there are"] == ["4 (latest), 2"]
    assert told["step"] == ["4, 16 samples consumed"]
    assert told["recipe"][0].startswith("fp8_delayed: ")
    assert told["layout"] == ["tensor 1, pipeline 1, context 1, expert 1, data 1"]
    assert told["seed"][0].startswith("1234")
    # 118,528 parameters: weights and two moments in fp32; no main weights in an fp32 run.
    assert "weights, float32: 16 tensors, 118,528 values, 474.1 kB" in told["holds"]
    assert "optimizer's exp_avg, float32: 16 tensors, 118,528 values, 474.1 kB" in told["holds"]
    # 3 operands of 4 linear layers, stacked over 2 layers: 1024 steps and the amax in effect.
    assert "amax histories, float32: 12 tensors, 24,600 values, 98.4 kB" in told["holds"]
    assert told["holds"][-1] == "random state of 1 rank"
    assert told["on disk"][0].endswith("; whole")


def test_another_iteration_or_one_folder(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_checkpoint.main([str(out), "--iteration", "2"]) == 0
    chosen = lines(capsys)
    assert inspect_checkpoint.main([str(out / "iter_0000002")]) == 0
    assert lines(capsys)["step"] == chosen["step"] == ["2, 8 samples consumed"]


def test_another_iteration_beside_a_named_folder_is_the_one_that_is_scored(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect_checkpoint.main([str(out / "iter_0000002"), "--iteration", "4"]) == 0
    told = lines(capsys)
    scored = loader.at_iteration(loader.find(str(out / "iter_0000002")), 4)
    assert told["checkpoint"] == [str(scored.folder)] == [str(out / "iter_0000004")]
    assert told["step"] == ["4, 16 samples consumed"]
    assert inspect_checkpoint.main([str(out / "iter_0000002"), "--iteration", "3"]) == 2
    assert "no checkpoint of iteration 3; there are 4, 2" in capsys.readouterr().err


def test_a_run_s_folder_is_enough(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out.rename(tmp_path / "checkpoints")
    assert inspect_checkpoint.main([str(tmp_path)]) == 0
    assert lines(capsys)["step"] == ["4, 16 samples consumed"]


def test_a_damaged_checkpoint_is_reported(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = out / "iter_0000004" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert inspect_checkpoint.main([str(out)]) == 1
    told = lines(capsys)
    assert told["damaged"][0].startswith(f"{out / 'iter_0000004'}: __0_0.distcp is cut short")
    assert told["there are"] == ["4 (latest, damaged), 2"]


def test_other_checkpoints_that_cannot_be_loaded_are_marked(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for iteration in (1, 3):
        shutil.copytree(out / "iter_0000002", out / f"iter_000000{iteration}")
    with (out / "iter_0000002" / "config.yaml").open("a") as file:
        file.write("\n")
    (out / "iter_0000001" / ".metadata").unlink()
    foreign.common(out / "iter_0000003")
    assert inspect_checkpoint.main([str(out)]) == 0
    assert lines(capsys)["there are"] == ["4 (latest), 3 (refused), 2 (damaged), 1 (damaged)"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.pt", "config.yaml", "metadata.json"])
def test_a_flipped_bit_of_any_file_is_found(out: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = out / "iter_0000004" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert inspect_checkpoint.main([str(out)]) == 1
    assert name in lines(capsys)["damaged"][0]


def test_a_checkpoint_without_checksums_is_reported(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_checkpoint.main([str(out)]) == 0
    assert lines(capsys)["checksums"] == ["of every file, as it was saved"]
    (out / "iter_0000004" / "checksums.json").unlink()
    assert inspect_checkpoint.main([str(out)]) == 0
    assert lines(capsys)["checksums"] == ["none, as older versions saved"]


@pytest.mark.parametrize(("iteration", "words"), [("3", "there are 4, 2"), (None, "no checkpoint there")])
def test_a_missing_checkpoint_is_one_line(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], iteration: str | None, words: str
) -> None:
    arguments = [str(out), "--iteration", iteration] if iteration else [str(tmp_path)]
    assert inspect_checkpoint.main(arguments) == 2
    assert words in capsys.readouterr().err
