"""The command lines of all tools say what is wrong with them in one line, as a UserError does."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

import pytest

from megatron_lowprec.errors import Parser

ROOT = Path(__file__).parents[1]
PROGRAMS = [
    *(file for file in sorted((ROOT / "tools").glob("*.py")) if file.stem != "__init__"),
    *sorted((ROOT / "tools").glob("*/__main__.py")),
    ROOT / "megatron_lowprec/sweep/cli.py",
]


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda file: str(file.relative_to(ROOT)))
def test_an_unknown_flag_is_one_line(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    monkeypatch.setattr(sys, "argv", ["tool.py", "--no-such-flag"])
    with pytest.raises(SystemExit) as stop:
        module.main(["--no-such-flag"]) if module.main.__code__.co_argcount else module.main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"\S.*: error: .* \(see --help\)\n", error)


def test_a_description_is_shown_as_it_is_written() -> None:
    parser = Parser(prog="tool.py", description="Line one.\n\n    python tool.py")
    assert "\n\n    python tool.py" in parser.format_help()
    assert isinstance(parser, argparse.ArgumentParser)
