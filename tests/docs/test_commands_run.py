"""Commands of the pages that are run for real: all that print and stop, and a few as their own processes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser as torchrun_parser

from megatron_lowprec import UserError, recipes
from megatron_lowprec.training import run as driver
from megatron_lowprec.training.distributed.startup import Ranks
from tests.docs.markdown import ELLIPSES, ERROR, PAGES, ROOT, Command, commands, refusals
from tests.launch import fork_ranks
from tests.waiting import PATIENCE

_PRINT_AND_STOP = {"--list-recipes", "--explain-recipe", "--memory-plan"}
_REFUSED = {command for page in PAGES for command, _ in refusals(page)}


def prints_and_stops(command: Command) -> bool:
    """Whether it needs no more than what the repository holds."""
    words = set(command.words)
    given = not words & {*ELLIPSES, "NAME"} and not any(word.startswith("my_") for word in words)
    return "pretrain_gpt.py" in words and bool(words & _PRINT_AND_STOP) and given and command not in _REFUSED


PRINTING = [command for page in PAGES for command in commands(page) if prints_and_stops(command)]


@pytest.mark.parametrize("command", PRINTING, ids=str)
def test_command_prints(command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert command.words[:2] == ("python", "pretrain_gpt.py")
    driver.run(list(command.words[2:]), Ranks(0, 1, 0, 1))
    printed = capsys.readouterr().out
    if "--list-recipes" in command.words:
        assert [line.split()[0] for line in printed.splitlines()] == list(recipes())
    elif "--memory-plan" in command.words:
        assert "\n  peak " in printed
    else:
        assert "\nnever quantized: " in printed
        # An override that changed nothing would not be worth its line.
        changes = [word for word in command.words if "." in word and "=" in word]
        assert all(f"+{change}" in printed.splitlines()[0 if "--config" in command.words else 1] for change in changes)


def test_printing_commands_are_found() -> None:
    assert len(PRINTING) > 15
    assert {next(iter(set(command.words) & _PRINT_AND_STOP)) for command in PRINTING} == _PRINT_AND_STOP


def known(command: str) -> list[str]:
    """Words of a command behind ``python``."""
    words = shlex.split(command)
    on_pages = {command.words for page in PAGES for command in commands(page)}
    assert tuple(words) in on_pages, "no page has this command: take it out here, or put it back there"
    return words[1:]


@pytest.mark.slow
def test_a_refusal_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """In an empty folder, as its reader starts it."""
    script, *words = known("python pretrain_gpt.py --recipe mxfp4_sr_rht")
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(ERROR)


REFUSED = [(command.words, said) for page in PAGES for command, said in refusals(page)]


def test_refused_commands_are_found() -> None:
    assert len(REFUSED) > 8


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_command_is_refused_before_the_run_starts_in_these_words(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processes, arguments = 1, list(words[2:])
    if words[0] == "torchrun":
        given = torchrun_parser().parse_args(list(words[1:]))
        processes, arguments = int(given.nproc_per_node), given.training_script_args

    def started(*_: object) -> None:
        raise AssertionError("the run would have started")

    monkeypatch.setattr(driver, "connect", started)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # as on the machine of the page's reader
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refusal:
        driver.run(arguments, Ranks(0, processes, 0, processes))
    assert str(refusal.value) == said


@pytest.mark.slow
def test_two_iterations_under_a_changed_recipe(tmp_path: Path) -> None:
    words = known(
        "python pretrain_gpt.py --config configs/models/gpt_tiny.yaml --mock-data --no-save --train-iters 2 "
        "--eval-iters 0 --recipe mxfp8 --recipe-override dgrad.grad_output.format=e5m2 "
        "--recipe-override keep_bf16.last_layers=1"
    )
    printed = fork_ranks(1, words, tmp_path)
    (metrics,) = tmp_path.glob("runs/gpt_tiny-mxfp8+*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["iteration"] for row in rows if "lm loss" in row] == [1, 2]
    assert "kept in the compute dtype by the recipe on this stage: layers.2." in printed
