"""Former names of flags and subcommands, accepted for one release with a warning."""

import sys
from collections.abc import Mapping, Sequence


def current_names(argv: Sequence[str], renamed: Mapping[str, str]) -> list[str]:
    """``argv`` with each former name replaced; a name without dashes is a subcommand, the first word."""
    current = []
    for position, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name in renamed and (name.startswith("--") or position == 0):
            print(f"warning: {name} is now {renamed[name]}; the next release drops the old name", file=sys.stderr)
            word = renamed[name] + equals + value
        current.append(word)
    return current
