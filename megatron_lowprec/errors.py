"""``UserError``, and command-line parsing that prints errors as one line."""

import argparse
import os
import re
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

_LONGEST = 4000  # characters of a message, which may quote a file
_CLOSED_PIPE = 128 + 13  # a shell's exit code for SIGPIPE
# Characters that steer a terminal, or that UTF-8 cannot encode (a surrogate is half of a character).
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def printable(text: str) -> str:
    """``text`` in one line, with escapes in place of control characters and surrogates: no file steers a terminal."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class UserError(ValueError):
    """An error that a user can cause and fix; the message is one printable line: request, cause and remedy.

    The driver prints only the message, on one rank, and exits with code 2. Libraries can catch it as ``ValueError``.
    """

    def __init__(self, message: object) -> None:
        line = printable(str(message))
        half = _LONGEST // 2
        super().__init__(line if len(line) <= _LONGEST else f"{line[:half]} [...] {line[-half:]}")


class Parser(argparse.ArgumentParser):
    """Argument parser of a tool; prints the description unformatted and errors as one line, like ``UserError``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter} | kwargs)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2; argparse would print the usage first."""
        self.exit(2, f"{self.prog}: error: {printable(message)} (see --help)\n")


def names(text: str) -> list[str]:
    """The names in an option's comma-separated value."""
    return [name for name in text.split(",") if name]


def run_tool(name: str, work: Callable[[], int | None]) -> int:
    """Exit code of ``work``, 0 for None; a UserError prints one line to stderr and gives 2.

    141 if the reader of a pipe has closed stdout, as a shell shows a program that SIGPIPE ended.
    """
    try:
        code = work() or 0
        sys.stdout.flush()  # an error in the interpreter's last flush could not be caught
        return code
    except UserError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        if not _stdout_is_closed():  # another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush
        return _CLOSED_PIPE


def _stdout_is_closed() -> bool:
    """Whether stdout is a pipe without a reader."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def current_argv(argv: Sequence[str], renamed: Mapping[str, str]) -> list[str]:
    """``argv`` with renamed options replaced and a warning for each; a name without dashes is the subcommand."""
    current = []
    for position, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name in renamed and (name.startswith("--") or position == 0):
            print(f"warning: {name} is now {renamed[name]}; the next release drops the old name", file=sys.stderr)
            word = renamed[name] + equals + value
        current.append(word)
    return current
