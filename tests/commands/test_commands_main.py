"""`megatron-lowprec`: its subcommands, their errors in one line, and what each needs."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

from megatron_lowprec import get_recipe
from megatron_lowprec.commands import doctor, main, train
from megatron_lowprec.commands.main import COMMANDS, run
from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.shipped import SHIPPED, find, names_in, shipped_like


def test_the_help_has_every_command_and_every_command_is_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name} " in text
        assert command.summary in text
    modules = {path.stem for path in (SHIPPED / "commands").glob("*.py")}
    assert modules == {command.module for command in COMMANDS.values()} | {"__init__", "main"}
    assert run([]) == 2


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trian"]) == 2
    assert capsys.readouterr().err == "megatron-lowprec: error: there is no command trian; the nearest one is train\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_an_error_names_the_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = run([name, "--no-such-flag"])
    except SystemExit as stop:  # argparse's
        code = stop.code
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"megatron-lowprec {name}: error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "extra"), [("jinja2", "lab"), ("megatron.core", "train"), ("transformer_engine", "te")]
)
def test_a_missing_package_is_named_with_its_extra(
    module: str, extra: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(main, "import_module", missing)
    assert run(["report"]) == 2
    assert capsys.readouterr().err.endswith(f"is not installed: pip install 'megatron-lowprec[{extra}]'\n")


def test_a_missing_module_of_the_package_is_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "report", main.Command("nothing", ""))  # type: ignore[misc]
    with pytest.raises(ModuleNotFoundError, match=r"megatron_lowprec\.commands\.nothing"):
        run(["report"])


# ---- train


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What train starts: the driver's arguments, or the command that replaces the process."""
    found: list[list[str]] = []

    def drive(argv: list[str], program: str) -> int:
        found.append([program, *argv])
        return 0

    monkeypatch.setattr(train.driver, "main", drive)
    monkeypatch.setattr(os, "execv", lambda program, words: found.append(words))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return found


@pytest.mark.parametrize(("gpus", "cores", "processes"), [(0, 8, 2), (0, 1, 1), (1, 8, 1), (4, 8, 4)])
def test_a_process_for_each_gpu_or_two_on_a_cpu(
    gpus: int, cores: int, processes: int, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    run(["train", "--recipe", "mxfp8"])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    rank = ["-m", "megatron_lowprec", "train", "--recipe", "mxfp8"]
    assert started == [[*torchrun, *rank] if processes > 1 else ["megatron-lowprec train", "--recipe", "mxfp8"]]


def test_a_rank_of_torchrun_and_what_only_prints_start_nothing(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert run(["train", "--memory-plan"]) == 0
    monkeypatch.setenv("RANK", "1")
    assert run(["train", "--config", "gpt_345m"]) == 0
    assert [words[0] for words in started] == ["megatron-lowprec train"] * 2


@pytest.mark.parametrize("flags", [["--recipe", "mxfp9"], ["--config", "gpt_none"], ["--train-iters", "many"]])
def test_a_typo_is_one_line_before_anything_starts(
    flags: list[str], started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", *flags]) == 2
    assert started == []
    assert capsys.readouterr().err.count("\n") == 1


# ---- recipes


def test_recipes_are_listed_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes"]) == 0
    assert "mxfp4_rht_sr" in capsys.readouterr().out
    assert run(["recipes", "mxfp4_rht128_sr", "--config", "gpt_345m"]) == 0
    assert "Hadamard 128" in capsys.readouterr().out


# ---- shipped files


def test_shipped_files_are_found_by_path_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = SHIPPED / "configs/models/gpt_tiny.yaml"
    assert find("configs/models/gpt_tiny.yaml") == find("gpt_tiny", "configs/models") == path
    assert find("gpt_tiny") == Path("gpt_tiny")  # no folder was meant
    assert find("__init__.py") == Path("__init__.py")  # neither configs nor data
    assert load_recipe("mxfp8_bf16_ends") == load_recipe("configs/recipes/mxfp8_bf16_ends.yaml")
    for folder in ("gpt_tiny", "mxfp8_bf16_ends"):  # such as runs that are named so
        Path(folder).mkdir()
    assert find("gpt_tiny", "configs/models") == path
    assert load_recipe("mxfp8_bf16_ends") == load_recipe("configs/recipes/mxfp8_bf16_ends.yaml")
    Path("configs/models").mkdir(parents=True)
    Path("configs/models/gpt_tiny.yaml").touch()
    assert find("configs/models/gpt_tiny.yaml") == Path("configs/models/gpt_tiny.yaml")  # the user's own comes first
    assert "gpt_tiny" in names_in("configs/models")
    assert shipped_like("gpt_345", "configs/models") == "did you mean configs/models/gpt_345m.yaml?"
    with pytest.raises(UserError, match="there is no recipe 'mxfp8_bf16_end'"):
        load_recipe("mxfp8_bf16_end")


# ---- doctor


def test_doctor_names_what_is_missing_and_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [
        "torch>=2.11",
        'no-such-package<2,>=1; extra == "train"',
        "megatron-lowprec[train]; extra == 'lab'",
        'ruff>=0.15; extra == "dev"',
    ]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: known)
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "without no-such-package: no training" in text
    assert "pip install 'megatron-lowprec[train]'" in text
    assert "ruff" not in text
    assert " <2,>=1 " in text


def test_doctor_prints_the_backend_of_each_recipe() -> None:
    assert [doctor.runs(get_recipe("fp8_blockwise"), arch) for arch in ("cpu", "sm89", "sm90", "sm100")] == [
        *("emulated", "emulated", "native", "emulated")
    ]
    assert doctor.runs(get_recipe("fp8_mxfp4_rht_sr"), "sm90") == "native: fprop"
    assert doctor.runs(get_recipe("bf16"), "sm90") == "compute dtype"
    assert [doctor.runs(get_recipe("nvfp4_all"), arch) for arch in ("sm90", "sm100")] == ["emulated", "native*"]


def test_every_module_takes_the_program_s_name() -> None:
    for command in COMMANDS.values():
        code = import_module(f"megatron_lowprec.commands.{command.module}").main.__code__
        assert code.co_varnames[: code.co_argcount][1:] == ("program",)
