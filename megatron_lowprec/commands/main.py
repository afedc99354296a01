"""``megatron-lowprec COMMAND ...``: imports the module of one command, so that none pays for another's libraries."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from megatron_lowprec import __version__
from megatron_lowprec.errors import UserError, run_tool
from megatron_lowprec.training.config.arguments import nearest
from megatron_lowprec.training.distributed import startup


class Command(NamedTuple):
    """A module of this folder, whose ``main(arguments, program)`` returns the exit code, and a line of help."""

    module: str
    summary: str


COMMANDS: Mapping[str, Command] = {
    "train": Command("train", "train a model under a recipe: on every GPU of this machine, else on its CPU"),
    "eval": Command("evaluate", "loss and perplexity of a checkpoint"),
    "export": Command("export_hf", "write a checkpoint as a Hugging Face model"),
    "import": Command("import_hf", "make a checkpoint of a Hugging Face model"),
    "import-megatron": Command("import_megatron", "make a checkpoint of one of Megatron-LM"),
    "inspect": Command("inspect_checkpoint", "what a checkpoint holds"),
    "preprocess": Command("preprocess_data", "tokenize text ahead of training"),
    "recipes": Command("show_recipes", "list the recipes, or explain one"),
    "sweep": Command("sweep", "recipes x models x overrides x seeds, here or under Slurm"),
    "report": Command("report_page", "curves, gaps and verdicts of runs as one HTML page"),
    "lab": Command("lab", "experiments on formats, scales, rounding and accumulators"),
    "conformance": Command("conformance", "check any quantizer against vectors of codes and scales"),
    "doctor": Command("doctor", "what is installed here, what is missing, what runs natively"),
}

# Top-level module -> the extra that brings it.
_EXTRAS = {
    **dict.fromkeys(("megatron", "psutil", "tokenizers", "safetensors", "tensorboard", "rich"), "train"),
    **dict.fromkeys(("scipy", "jinja2", "matplotlib", "PIL"), "lab"),
    "transformer_engine": "te",
}


def main() -> None:
    """Run the command line; exits with its code."""
    startup.leave(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Exit code: 0; 2 for a UserError; else the command's."""
    name = arguments[0] if arguments else "--help"
    if name in ("--help", "-h", "help"):
        print(_help())
        return 0 if arguments else 2
    if name == "--version":
        print(__version__)
        return 0
    return run_tool("megatron-lowprec", lambda: _run(name, arguments[1:]))


def _run(name: str, arguments: Sequence[str]) -> int:
    if name not in COMMANDS:
        hint = nearest(name, list(COMMANDS)) or f"; it is one of {', '.join(COMMANDS)}"
        raise UserError(f"there is no command {name}{hint}")
    program = f"megatron-lowprec {name}"
    try:
        code: int = import_module(f"megatron_lowprec.commands.{COMMANDS[name].module}").main(arguments, program)
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in _EXTRAS:
            raise
        raise UserError(
            f"{name} needs {missing}, which is not installed: pip install 'megatron-lowprec[{_EXTRAS[missing]}]'"
        ) from None
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: megatron-lowprec COMMAND ...",
            "",
            "Low-precision pretraining recipes for Megatron-core.",
            "",
            *lines,
            "",
            "megatron-lowprec COMMAND --help lists a command's options.",
        ]
    )
