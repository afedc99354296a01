"""Every command in the pages: its program exists, takes those flags, and finds the files that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.shipped import SHIPPED
from tests.docs.command_checks import check, check_driver
from tests.docs.markdown import (
    PAGES,
    ROOT,
    Command,
    Fence,
    commands,
    commands_of,
    fences,
    flag_lines,
    lines_of,
    name_of,
    refusals,
)

# Those that a page shows an error of are run in test_commands_run.py.
_REFUSED = {command for page in PAGES for command, _ in refusals(page)}
COMMANDS = [command for page in PAGES for command in commands(page) if command not in _REFUSED]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_command(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        check(command, monkeypatch)
    except (UserError, SystemExit) as error:
        raise AssertionError(f"{command}\n{error}") from None


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_files_of_a_command_exist(command: Command) -> None:
    for word in command.words:
        folder = word.split("/")[0]
        ours = folder in ("configs", "data", "scripts", "tests", "tools", "requirements") and "/" in word
        if ours and not word.startswith(("data/wikipedia", "data/cache")):
            assert any(ROOT.glob(word)) or any(SHIPPED.glob(word)), f"{word} is not there"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_of_flags(page: Path) -> None:
    for words in flag_lines(page):
        check_driver([*words, "..."])


# ---- the tests themselves
@pytest.mark.parametrize(
    "line",
    [
        "python pretrain_gpt.py --recipe mxfp9",
        "python pretrain_gpt.py --recipe mxfp8 --no-such-flag",
        "python pretrain_gpt.py --recipe mxfp8 --recipe-override dgrad.hadamard.blok=128",
        "python pretrain_gpt.py --config configs/models/gpt_none.yaml",
        "python pretrain_gpt.py --train-iters many",
        "torchrun Megatron-LM/pretrain_gpt.py --fp8-quantizer-factory megatron_lowprec.te.mxfp9",
        "torchrun Megatron-LM/pretrain_gpt.py --fp8-quantizer-factory megatron_lowprec.te.fp8_delayed",
        "torchrun Megatron-LM/pretrain_gpt.py --no-such-flag --fp8-quantizer-factory megatron_lowprec.te.mxfp8",
        "python tools/none.py",
        "python tools/evaluate.py --load runs/x --part all",
        "python -m tools.bench nothing",
        "python -m tools.bench step --shapes 345m,none",
        "python -m tools.bench step --recipes mxfp9",
        "python scripts/sweep.py configs/sweeps/muon.yaml --set train-data-path=CORPUS --only none",
        "python scripts/sweep.py configs/sweeps/muon.yaml --set train-data-path=CORPUS --size none",
        "python -m pytest -m gpus tests",
        "python -m pytest tests/none",
        "python -m pytest -m gpu tests/docs/test_words.py",
        "python -m pytest tests/docs/test_words.py::test_none",
        "MODEL=x timeout 10 scripts/measure.sh OUT step -- none",
        "scripts/study.sh start OUT 10 scripts/studies/none",
        "scripts/study.sh stop OUT",
        "torchrun --no-such-flag 2 pretrain_gpt.py",
        "torchrun --nproc-per-node 2 pretrain_gpt.py --recipe mxfp9",
        "make nothing",
        "make train NOTHING=1",
        "pip install 'megatron-lowprec[nothing]'",
        "lm_eval --model hf --model_args pretrained=my_model --include_path tools/harness --tasks nothing",
        "sbatch --no-such-option 1 scripts/pretrain.sbatch runs/x",
    ],
)
def test_a_wrong_command_is_noticed(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```\n{line}\n```\n", encoding="utf-8")
    (command,) = commands(page)
    with pytest.raises((AssertionError, UserError, SystemExit, ImportError)):
        check(command, monkeypatch)


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 30
    assert {command.words[0] for command in COMMANDS} >= {"python", "torchrun", "make", "sbatch", "pip"}


# Lines of a shell that start nothing of ours.
_OF_THE_SHELL = re.compile(r"#.*|\. \.venv/bin/activate|--.*|")
_SOURCED = re.compile(r"source (\S+)")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_shell_blocks_hold_commands_alone(page: Path) -> None:
    """Output is marked as text: else a command that no test recognizes would pass for it."""
    for fence in fences(page):
        if fence.language == "":
            functions = ""
            for line in lines_of(fence.body):
                if sourced := _SOURCED.fullmatch(line):
                    functions += (ROOT / sourced[1]).read_text(encoding="utf-8")
                    continue
                if f"{line.split(' ')[0]}()" in functions:
                    continue
                known = _OF_THE_SHELL.fullmatch(line) or commands_of(Fence(page, "", line))
                assert known, f"no command that is known here, and not marked as text: {line}"
