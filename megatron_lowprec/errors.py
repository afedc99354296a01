"""``UserError``, and command-line parsing that prints errors as one line."""

import argparse
import errno
import os
import re
import select
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

_LONGEST = 4000  # characters of a message, which may quote a file
_CLOSED_PIPE = 128 + 13  # a shell's exit code for SIGPIPE
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Where only the message has the number: safetensors', which is Rust, and of torch's worker processes.
_QUOTED_NUMBER = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")
# torch's zip writer has no number; a position is unexpected after a write that stored too little.
_SHORT_WRITE = re.compile(r"inline_container\.cc:\d+\] \. unexpected pos|PytorchStreamWriter failed writing file")
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
    """Argument parser of a tool; prints the description unformatted and errors as one line, like ``UserError``.

    Without any word on the command line, a tool that needs one prints its help before the error.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter} | kwargs)
        self._words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; keeps the words for ``error``."""
        self._words = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2, the help if no word was given; argparse would print the usage first."""
        if not self._words:
            self.print_help(sys.stderr)
        self.exit(2, f"{self.prog}: error: {printable(message)} (see --help)\n")


def type_of(value: object) -> str:
    """The type of an unexpected value, with its article, for an error: "a dict", "an int"; "nothing" for None."""
    name = type(value).__name__
    return "nothing" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def names(text: str) -> list[str]:
    """The names in an option's comma-separated value."""
    return [name for name in text.split(",") if name]


def disk_is_full(error: BaseException) -> UserError | None:
    """The error of a full disk, an exhausted quota or a file over its limit in the user's words; None for another.

    Libraries raise other types than OSError for it: safetensors' has the number in its message, torch's may have none.
    """
    if isinstance(error, OSError) and error.errno is not None:
        numbers, short = [error.errno], False
    else:
        message = str(error)
        numbers = [int(found[1] or found[2]) for found in _QUOTED_NUMBER.finditer(message)]
        short = _SHORT_WRITE.search(message) is not None
    what = next((os.strerror(number) for number in numbers if number in _FULL), None)
    if what is None:
        if not short:
            return None
        what = "a file could not be written to its end, as on a full disk"
    name = getattr(error, "filename", None)
    return UserError(f"{what}{'' if name is None else f': {name}'}; make room, or name another folder")


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
    except Exception as error:
        if (full := disk_is_full(error)) is None:
            raise
        print(f"{name}: error: {full}", file=sys.stderr)
        return 2


def _stdout_is_closed() -> bool:
    """Whether stdout is a pipe without a reader."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
