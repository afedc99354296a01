"""The exception for requests that cannot be met, and a command line that prints it as one line."""

import argparse
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
