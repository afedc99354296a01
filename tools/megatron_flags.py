"""Write the list of Megatron-LM's flags from the parsers of its releases, for the page and the answers of our parser.

    MEGATRON_LM=checkout-or-tarball:another python tools/megatron_flags.py            # update the list
    MEGATRON_LM=checkout-or-tarball:another python tools/megatron_flags.py --check    # exit code 1 if it would change

Then give new flags an answer in megatron_lowprec/training/config/megatron_answers.yaml, and run
python tools/doc_tables.py, which writes docs/guide/megatron-flags.md.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.files import atomic_write
from megatron_lowprec.training.config.megatron_flags import INVENTORY, Flag

# Runs with a checkout as the only Megatron: its parser imports most of it. Release 0.19 needs typing.override, which
# Python 3.11 lacks.
_DUMP = """
import argparse, enum, json, typing
typing.override = getattr(typing, "override", lambda function: function)
from megatron.core import package_info
from megatron.training.arguments import add_megatron_arguments
def word(value):
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, (list, tuple)):
        return " ".join(map(word, value))
    return value.name if isinstance(value, enum.Enum) else str(value)
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve"))
flags = {
    name: [{None: "1"}.get(action.nargs, str(action.nargs)), word(action.default) if action.nargs != 0 else ""]
    for action in parser._actions
    for name in action.option_strings
    if name.startswith("--") and name != "--help"
}
print(json.dumps({"release": f"{package_info.MAJOR}.{package_info.MINOR}", "flags": flags}))
"""


def flags_of(checkout: Path) -> tuple[str, dict[str, tuple[str, str]]]:
    """Release of a checkout, and flag -> (number of values as argparse writes it, default)."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", _DUMP], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UserError(f"{checkout}: its parser cannot be built: {done.stderr.strip()[-300:]}; name a Megatron-LM")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["release"], {name: (values, default) for name, (values, default) in found["flags"].items()}


def checkouts(sources: Sequence[str], scratch: Path) -> Iterator[Path]:
    """The checkouts; a tarball is unpacked in ``scratch``."""
    for number, source in enumerate(sources):
        checkout = Path(source)
        if not checkout.is_dir():
            with tarfile.open(source) as tar:
                tar.extractall(scratch / str(number), filter="data")
            (checkout,) = (scratch / str(number)).iterdir()
        yield checkout


def inventory(sources: Sequence[str]) -> str:
    """Content of the list: a flag of any of these checkouts or tarballs per line."""
    with tempfile.TemporaryDirectory() as scratch:
        releases = dict(map(flags_of, checkouts(sources, Path(scratch))))
    newest_first = sorted(releases, key=lambda release: [int(part) for part in release.split(".")], reverse=True)
    lines = ["flag\tvalues\tdefault\treleases"]
    for name in sorted({name for flags in releases.values() for name in flags}):
        holding = [release for release in newest_first if name in releases[release]]
        lines.append(Flag(name, *releases[holding[0]][name], tuple(reversed(holding))).line())
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the list would change")
    args = parser.parse_args(argv)
    sources = [source for source in os.environ.get("MEGATRON_LM", "").split(os.pathsep) if source]
    if not sources:
        raise UserError("MEGATRON_LM names no Megatron-LM: set it to checkouts or tarballs, with colons between")
    text = inventory(sources)
    stale = text != INVENTORY.read_text(encoding="utf-8")
    if stale:
        print(f"{'out of date' if args.check else 'wrote'}: {INVENTORY.name}")
        if not args.check:
            atomic_write(INVENTORY, text)
    return int(args.check and stale)


if __name__ == "__main__":
    sys.exit(run_tool("megatron_flags.py", main))
