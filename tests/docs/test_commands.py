"""Every command in the pages: its program exists, takes those flags, and finds the files that it names."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import io
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from torch.distributed.run import get_args_parser as torchrun_parser

from megatron_lowprec.commands import sweep
from megatron_lowprec.commands.main import COMMANDS as COMMANDS_OF_PACKAGE
from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.sweep.cli import _parser as sweep_parser
from megatron_lowprec.te.factory import why_no_factory
from megatron_lowprec.te.translation import INSTALL, why_not
from megatron_lowprec.training.config import arguments
from megatron_lowprec.training.config.megatron_flags import megatron_flags, translate
from megatron_lowprec.training.config.resolve import resolve_model
from tests.docs.markdown import (
    ELLIPSES,
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
    spans,
)
from tests.tools.test_packaging import declared
from tools.bench import __main__ as bench

# Those that a page shows an error of are run in test_commands_run.py.
_REFUSED = {command for page in PAGES for command, _ in refusals(page)}
COMMANDS = [command for page in PAGES for command in commands(page) if command not in _REFUSED]
# What the reader puts in, or what another command of the page writes.
_PLACEHOLDER = re.compile(r"[A-Z_]+(\.yaml)?|\$.*|FILLED_IN.*|.*….*")
_WRITTEN = ("runs/", "reports/", "my_", "checkpoints/")
_SLURM = {
    *("--nodes", "--gpus-per-node", "--cpus-per-task", "--time", "--job-name", "--signal", "--output", "--batch"),
    *("--partition", "--account", "--qos", "--requeue", "--kill-on-bad-exit", "--nodelist", "--wrap"),
}


def plain(words: Sequence[str]) -> list[str]:
    """Without what stands for "and the rest of it"; an ellipsis behind a flag is that flag's value."""
    before = ["", *words]
    return [w for w, last in zip(words, before) if w not in ELLIPSES or last.startswith("--")]


class Parsed(Exception):  # noqa: N818 - nothing is wrong
    """A tool's own parser has taken its command line."""

    def __init__(self, namespace: argparse.Namespace) -> None:
        self.namespace = namespace


def parse_of_tool(module: str, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """``words`` by the parser in the tool's ``main``, which goes no further."""
    parse = argparse.ArgumentParser.parse_args

    def and_stop(parser: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        raise Parsed(parse(parser, *args, **kwargs))  # type: ignore[arg-type,call-overload]

    main = importlib.import_module(module).main
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", and_stop)
        patch.setattr(sys, "argv", [module, *words])
        try:
            main(list(words)) if main.__code__.co_argcount else main()
        except Parsed as parsed:
            return parsed.namespace
        except SystemExit:
            raise AssertionError(f"{module} does not take {' '.join(words)}") from None
    raise AssertionError(f"{module} never parsed its arguments")


def check_driver(words: Sequence[str]) -> None:
    """Flags of pretrain_gpt.py, its configuration and its recipe; the model's sizes where all of it is there."""
    whole = len(plain(words)) == len(words)
    parser = arguments.build_parser()
    asked = translate(plain(words), arguments.choices_of_flags(parser))
    assert not asked.refused, asked.problems()
    options = vars(parser.parse_args([*asked.words, *asked.unknown]))
    config = options.get("config")
    if config is not None and (_PLACEHOLDER.fullmatch(config) or config.startswith(_WRITTEN)):
        whole = False
    elif config is not None:
        assert arguments.find(config).is_file(), f"{config} is not there"
        arguments.read_yaml(str(arguments.find(config)))
    recipe = options.get("recipe")
    if recipe is not None and not _PLACEHOLDER.fullmatch(recipe) and not recipe.startswith("my_"):
        load_recipe(recipe, options.get("recipe_override", []))
    if whole and not options.get("list_recipes"):
        resolve_model(arguments.parse(list(words))[0])


def check_slurm(words: Sequence[str]) -> list[str]:
    """The script's own words, after options of sbatch that are known here."""
    rest = plain(words)
    while rest and rest[0].startswith("--"):
        option = rest.pop(0)
        assert option.partition("=")[0] in _SLURM, f"{option}: an option of Slurm that no test knows"
        if "=" not in option:
            rest.pop(0)
    return rest


def check_make(words: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^\.PHONY: (.*)$", makefile, re.M)[0].split())
    variables = set(re.findall(r"^(\w+) \??:?=", makefile, re.M))
    for word in words:
        name, equals, _ = word.partition("=")
        assert name in (variables if equals else targets), f"make {word}: the Makefile has no {name}"


def check_pip(words: Sequence[str], line: str) -> None:
    assert words[0] == "install", words
    for word in words[1:]:
        if word.startswith("-") or word == ".":
            continue
        requirement = Requirement(re.sub(r"^\.(?=\[)", "megatron-lowprec", word))  # of this folder
        if requirement.name.replace("_", "-") == "megatron-lowprec":
            assert requirement.extras <= set(declared()), f"pyproject.toml has no extra of {word}"
        elif requirement.name == "transformer-engine":
            assert word in INSTALL
        else:
            raise AssertionError(f"{line}: no test knows where {word} comes from")


def check_pytest(words: Sequence[str]) -> None:
    """Folders and files with tests, of the mark that is asked for."""
    marks, paths = pytest_words(words)
    for path in paths:
        name, _, test = path.partition("::")
        files = [ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("test_*.py"))
        texts = [file.read_text(encoding="utf-8") for file in files]
        assert texts, f"{name} has no tests"
        assert not test or f"def {test.split('::')[-1].partition('[')[0]}(" in texts[0], f"{name} has no {test}"
        assert all(any(re.search(rf"\b{mark}\b", text) for text in texts) for mark in marks), f"{name}: none of {marks}"


def pytest_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Marks, which pyproject.toml declares, and paths."""
    parser = argparse.ArgumentParser(prog="pytest")
    parser.add_argument("-m", dest="marks", default="")
    parser.add_argument("-n", dest="workers")
    parser.add_argument("-q", "-v", "--collect-only", action="store_true")
    parser.add_argument("-r", "-rs", dest="report", action="store_true")
    parser.add_argument("paths", nargs="*")
    given = parser.parse_args(list(words))
    declared_marks = re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    marks = re.findall(r"\w+", given.marks)
    assert set(marks) <= {*declared_marks, "not", "and", "or"}, f"-m {given.marks}: pyproject.toml has {declared_marks}"
    return [mark for mark in marks if mark in declared_marks and "not" not in marks], given.paths


def check_measure(words: Sequence[str]) -> None:
    """Names of parts, from the script's own comment."""
    text = (ROOT / "scripts/measure.sh").read_text(encoding="utf-8")
    parts = re.findall(r"^#   ([a-z]+)  ", text, re.M)
    unknown = [word for word in plain(words[1:]) if word not in parts and word not in ("PART...", "--")]
    assert not unknown, f"scripts/measure.sh has no {unknown}, but {parts}"


def check_study(words: Sequence[str]) -> None:
    """An action, and lanes that exist; a word in capitals is the reader's."""
    assert words[0] in ("start", "wait", "pack"), words
    for lane in words[3:] if words[0] == "start" else ():
        assert _PLACEHOLDER.fullmatch(lane.removeprefix("scripts/studies/")) or (ROOT / lane).is_file(), f"no {lane}"


def check_lm_eval(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="lm_eval")
    for name in ("--model", "--model_args", "--include_path", "--tasks"):
        parser.add_argument(name, required=True)
    for name in ("--batch_size", "--metadata", "--output_path", "--device"):
        parser.add_argument(name)
    given = parser.parse_args(list(words))
    assert (ROOT / given.include_path / f"{given.tasks}.yaml").is_file(), f"{given.include_path} has no {given.tasks}"


def check_command(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A subcommand of megatron-lowprec with its options."""
    if not words or words[0].startswith("-"):
        return None
    name, *rest = plain(words)
    assert name in COMMANDS_OF_PACKAGE, f"megatron-lowprec {name}: there is no such command"
    if not rest:  # running text names it
        return None
    if name == "train":
        return check_driver(rest)
    if name == "recipes":
        return check_driver(["--recipe", *rest, "..."])
    parse_of_tool(f"megatron_lowprec.commands.{COMMANDS_OF_PACKAGE[name].module}", rest, monkeypatch)
    return check_sweep(rest) if name == "sweep" else None


def check_sweep(words: Sequence[str]) -> None:
    """A shipped sweep with these flags has jobs."""
    if not words[0].startswith("configs/") or {"--status", "--slurm", "--slurm-dry-run"} & {*words}:
        return
    with redirect_stdout(io.StringIO()) as printed:
        code = sweep.main([*words, "--dry-run"])
    assert (code, bool(printed.getvalue())) == (0, True), f"{' '.join(words)} selects no job"


def check_python(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = plain(words)
    if words[0] == "-c":
        compile(words[1], "python -c", "exec")
        return None
    if words[0] == "-m":
        program, rest = words[1], words[2:]
        if program == "torch.distributed.run":
            return check_torchrun(rest, monkeypatch)
        if program == "megatron_lowprec":
            return check_command(rest, monkeypatch)
        if program == "megatron_lowprec.conformance":
            return check_command(["conformance", *rest], monkeypatch)
        if program == "pip":
            return check_pip(rest, " ".join(words))
        if program == "pytest":
            return check_pytest(rest)
        assert program.startswith(("tools.", "tests.")), f"python -m {program}: no test knows it"
        spec = importlib.util.find_spec(program)
        assert spec is not None, f"there is no {program}"
        if program.startswith("tests."):
            return None  # takes what any shell takes
        module = f"{program}.__main__" if spec.submodule_search_locations else program
        alternatives = rest[0].split("|") if rest and "|" in rest[0] else [None]
        for word in alternatives:
            given = rest if word is None else [word, *rest[1:]]
            found = parse_of_tool(module, given, monkeypatch)
            if program == "tools.bench":
                bench.check(found)
        return None
    script, rest = words[0], words[1:]
    if script == "pretrain_gpt.py":
        return check_driver(rest)
    if script == "Megatron-LM/pretrain_gpt.py":
        return check_megatron_lm(rest)
    assert (ROOT / script).is_file(), f"{script} is not there"
    assert script.startswith(("tools/", "scripts/")), f"python {script}: no test knows it"
    parse_of_tool(script.removesuffix(".py").replace("/", "."), rest, monkeypatch)
    return check_sweep(rest) if script == "scripts/sweep.py" else None


def check_megatron_lm(words: Sequence[str]) -> None:
    """Flags of Megatron-LM's own script, most of them made from TransformerConfig, and the recipe of a factory."""
    from megatron.core.transformer import TransformerConfig

    known = set(megatron_flags())
    for field in dataclasses.fields(TransformerConfig):
        default = ["--" + field.name.replace("_", "-")]
        known |= set(field.metadata.get("argparse_meta", {}).get("arg_names", default))
    assert [word for word in plain(words) if word.startswith("--") and word not in known] == []
    if "--spec" in words:
        package, name = words[words.index("--spec") + 1 :][:2]
        assert package == "megatron_lowprec.specs"
        load_recipe(name)
    if "--fp8-quantizer-factory" in words:
        package, _, name = words[words.index("--fp8-quantizer-factory") + 1].rpartition(".")
        assert package == "megatron_lowprec.te"
        assert why_not(load_recipe(name)) is None
        assert why_no_factory(load_recipe(name)) is None


def check_torchrun(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given = torchrun_parser().parse_args(plain(words))
    module = ["-m"] if given.module else []
    check_python([*module, given.training_script, *given.training_script_args], monkeypatch)


def check(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = command.words
    if program == "python":
        check_python(words, monkeypatch)
    elif program == "megatron-lowprec":
        check_command(words, monkeypatch)
    elif program == "torchrun":
        if words != ["--help"]:
            check_torchrun(words, monkeypatch)
    elif program == "make":
        check_make(words)
    elif program == "pip":
        check_pip(words, str(command))
    elif program == "lm_eval":
        check_lm_eval(words)
    elif program == "scripts/measure.sh":
        check_measure(words)
    elif program == "scripts/study.sh":
        check_study(words)
    elif program == "scripts/prepare_corpus.sh":
        assert len(words) in (2, 3), words
    else:
        rest = check_slurm(words)
        if rest and rest[0] == "torchrun":
            check_torchrun(rest[1:], monkeypatch)
        elif rest:
            assert rest[0] == "scripts/pretrain.sbatch"
            check_driver([*rest[2:], "..."])


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


# ---- flags in running text
_FLAG = re.compile(r"(?<![\w-])--[a-z0-9][a-z0-9_-]*")
# Other programs' flags that the pages speak of, besides Megatron-LM's.
_FOREIGN = {
    *("--nproc-per-node", "--nnodes", "--node-rank", "--standalone", "--shutdown-timeout", "--signals-to-handle"),
    *(
        "--signal",
        "--requeue",
        "--kill-on-bad-exit",
        "--help",
        "--no-build-isolation",
        "--no-deps",
        "--nodes",
        "--gpus-per-node",
    ),
    *("--generate-hashes", "--universal", "--python-version", "--no-annotate", "--no-header"),  # of uv
    *("--nv", "--container-image", "--container-mounts", "--container-workdir"),  # of apptainer and srun's plugins
    *("--module", "--override", "--compile", "--training"),  # of torchtitan, before a dot
    *_SLURM,
}


def known_flags() -> set[str]:
    """Of the driver and of every tool."""
    found = {*_FOREIGN, *megatron_flags()}
    parsers = [arguments.build_parser(), sweep_parser("sweep.py")]
    found |= {option for parser in parsers for action in parser._actions for option in action.option_strings}
    for file in [*(ROOT / "tools").rglob("*.py"), *SHIPPED.glob("commands/*.py"), *SHIPPED.glob("conformance/*.py")]:
        found |= set(re.findall(r'add_argument\(\s*"(--[a-z0-9-]+)"', file.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_in_the_text_exist(page: Path) -> None:
    known = known_flags()
    outputs = [fence.body for fence in fences(page) if fence.language == "text"]
    assert [flag for text in spans(page) + outputs for flag in _FLAG.findall(text) if flag not in known] == []


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
