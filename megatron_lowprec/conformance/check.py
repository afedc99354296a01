"""Checks an adapter's results against vectors, and writes this project's."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path

from megatron_lowprec.conformance.comparison import Adapter, Outcome, compare
from megatron_lowprec.conformance.reference_vectors import reference_cases, reference_inputs
from megatron_lowprec.conformance.vectors import Case, Group, read_cases, write_cases
from megatron_lowprec.errors import Parser, UserError


def main(arguments: Sequence[str], program: str = "conformance") -> int:
    """Exit code: 0; 1 for a difference, or a required result that is left out.

    Raises:
        UserError: an adapter or a folder that cannot be read; no case of that name; a bad expression.
    """
    args = _parser(program).parse_args(arguments)
    for flag, expression in (("--only", args.only), ("--require", args.require or "")):
        try:
            re.compile(expression)
        except re.error as error:
            raise UserError(f"{flag} {expression!r} is no regular expression: {error}") from None
    cases = _not_empty(
        reference_cases(args.only) if args.vectors is None else read_cases(args.vectors, args.only), args.only
    )
    if args.export is not None:
        count = write_cases(args.export, reference_inputs(), cases)
        print(f"{count} cases in {args.export}")
        return 0
    if args.adapter is not None and not args.list:
        return check(cases, load_adapter(args.adapter), args.require, args.ignore_zero_signs)
    for case in cases:
        print(case.name, f"({len(case.groups)} groups)", case.meta.get("operands", case.meta.get("peer", "")))
    return 0


def _not_empty(cases: Iterable[Case], only: str) -> Iterator[Case]:
    """The cases; UserError at once if there is none."""
    cases = iter(cases)
    first = next(cases, None)
    if first is None:
        raise UserError(f"--only {only!r}: no case has such a name; --list without --only prints all")
    return chain([first], cases)


def check(cases: Iterable[Case], adapter: Adapter, require: str | None = None, ignore_zero_signs: bool = False) -> int:
    """Print how each case went and what differs; exit code, as ``main``.

    Args:
        require: regular expression of the beginning of cases of which no result may be left out.
        ignore_zero_signs: +0 equals -0.
    """
    compared, failures, asked, whole = 0, 0, 0, Outcome()
    for case in cases:
        compared += 1
        case.meta.update({"zero_sign": "ignored"} if ignore_zero_signs else {})
        found = sum((_compared(case, group, adapter) for group in case.groups), Outcome())
        required = require is not None and re.match(require, case.name) is not None
        asked += required
        lines = [*found.differences, *(f"{place}: required, but left out" for place in found.left_out if required)]
        verdict = "differs" if lines else "equal" if found.entries else "declined"
        left = f", {len(found.left_out)} results left out" if found.entries and found.left_out else ""
        print(f"{case.name}: {found.entries} entries, {verdict}{left}", *lines, sep="\n  ")
        whole, failures = whole + found, failures + len(lines)
    if require is not None and not asked:
        raise UserError(f"--require {require!r}: the name of no case begins so; --list prints all")
    if not whole.entries and not whole.differ:
        raise UserError("the adapter answered nothing: no entry was compared; results have the names of the case's")
    print(f"{compared} cases, {whole.entries} entries, {whole.differ} differ, {len(whole.left_out)} results left out")
    return 1 if failures else 0


def _compared(case: Case, group: Group, adapter: Adapter) -> Outcome:
    try:
        return compare(case, group, adapter)
    except UserError:
        raise
    except Exception as error:
        error.add_note(f"the adapter failed for {case.name}, group {group.name!r}")
        raise


def load_adapter(name: str) -> Adapter:
    """The function MODULE:FUNCTION; modules of the working folder are found.

    Raises:
        UserError: there is none.
    """
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        found: Adapter = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--adapter {name}: {error}; give MODULE:FUNCTION, such as my_quantizers:adapt") from None
    return found


def _parser(program: str) -> Parser:
    parser = Parser(prog=program, description=__doc__)
    parser.add_argument("--vectors", type=Path, metavar="FOLDER", help="default: those of this project's reference")
    parser.add_argument("--adapter", metavar="MODULE:FUNCTION", help="compare what this function returns")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases in whose name it occurs")
    parser.add_argument("--require", metavar="REGEX", help="cases beginning so must be answered whole")
    parser.add_argument("--ignore-zero-signs", action="store_true", help="+0 equals -0")
    parser.add_argument("--list", action="store_true", help="list the cases")
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="write this project's vectors and exit")
    return parser
