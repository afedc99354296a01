"""A command of the pages: its program exists and takes those flags."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

import pytest
from torch.distributed.run import get_args_parser as torchrun_parser

from megatron_lowprec.commands import sweep
from megatron_lowprec.commands.main import COMMANDS as COMMANDS_OF_PACKAGE
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.te.factory import why_no_factory
from megatron_lowprec.te.translation import why_not
from megatron_lowprec.training.config import arguments
from megatron_lowprec.training.config.megatron_flags import megatron_flags, translate
from megatron_lowprec.training.config.resolve import resolve_model
from tests.docs.markdown import ROOT, Command
from tests.docs.other_programs import (
    PLACEHOLDER,
    check_lm_eval,
    check_make,
    check_measure,
    check_pip,
    check_pytest,
    check_slurm,
    check_study,
    plain,
)
from tools.bench import __main__ as bench

# What another command of the page writes.
_WRITTEN = ("runs/", "reports/", "my_", "checkpoints/")


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
    if config is not None and (PLACEHOLDER.fullmatch(config) or config.startswith(_WRITTEN)):
        whole = False
    elif config is not None:
        assert arguments.find(config).is_file(), f"{config} is not there"
        arguments.read_yaml(str(arguments.find(config)))
    recipe = options.get("recipe")
    if recipe is not None and not PLACEHOLDER.fullmatch(recipe) and not recipe.startswith("my_"):
        load_recipe(recipe, options.get("recipe_override", []))
    if whole and not options.get("list_recipes"):
        resolve_model(arguments.parse(list(words))[0])


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
