"""The exception for requests that cannot be met, and a command line that prints it as one line."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn


class UserError(ValueError):
    """Something a user can cause and mend; the message is one line: what was asked, what was found, what to do.

    The driver prints the message alone, on one rank, and exits with code 2; libraries may catch it as ``ValueError``.
    """


class Parser(argparse.ArgumentParser):
    """A tool's command line: its description as it is written, its errors in one line, as a ``UserError``'s."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter} | kwargs)

    def error(self, message: str) -> NoReturn:
        """Exit code 2; argparse's own prints the usage first."""
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def names(text: str) -> list[str]:
    """An option's value, names with commas between."""
    return [name for name in text.split(",") if name]


def run_tool(name: str, work: Callable[[], int | None]) -> int:
    """The exit code that ``work`` returns, None being 0; a UserError is one line on stderr and exit code 2."""
    try:
        return work() or 0
    except UserError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2


def current_argv(argv: Sequence[str], renamed: Mapping[str, str]) -> list[str]:
    """``argv`` with former names replaced, each with a warning; a name without dashes is the subcommand."""
    current = []
    for position, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name in renamed and (name.startswith("--") or position == 0):
            print(f"warning: {name} is now {renamed[name]}; the next release drops the old name", file=sys.stderr)
            word = renamed[name] + equals + value
        current.append(word)
    return current
