"""Strict reading of hand-written YAML: plain types only, no duplicate keys, within limits, one-line errors."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

try:
    from yaml import CSafeLoader as FastLoader
except ImportError:  # PyYAML was built without libyaml
    from yaml import SafeLoader as FastLoader  # type: ignore[assignment]

from megatron_lowprec.errors import UserError
from megatron_lowprec.files import LONGEST_NUMBER, check_text, read_text

LARGEST = 2**24
"""Bytes of a YAML file; a run's config.yaml has about 10,000."""
MOST_VALUES = 10**5
"""Values of a file, each as often as aliases repeat it."""
_STANDARD = "tag:yaml.org,2002:"
_TAGS: Mapping[str, type[yaml.Node]] = {
    **{_STANDARD + name: yaml.ScalarNode for name in ("null", "bool", "int", "float", "str", "merge")},
    _STANDARD + "seq": yaml.SequenceNode,
    _STANDARD + "map": yaml.MappingNode,
}


class _Strict(Composer, SafeConstructor, Resolver):
    """Accepts what JSON has as well; rejects duplicate keys, of which yaml.SafeLoader silently keeps the last."""

    # Dates are text: no option is a date, and YAML accepts some that no calendar has.
    yaml_implicit_resolvers = {  # noqa: RUF012 - as the base class has it
        first: [(tag, pattern) for tag, pattern in found if tag in _TAGS]
        for first, found in Resolver.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        name = node.tag.removeprefix(_STANDARD)
        if not isinstance(node, _TAGS.get(node.tag, ())):
            raise _mistake(node, f"a {_kind(node)} of type {name} is not read; write text, numbers, lists and mappings")
        if name in ("int", "float") and len(node.value) > LONGEST_NUMBER:
            raise _mistake(node, f"a number of {len(node.value):,} characters")
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError):  # of Python's own conversion
            raise _mistake(node, f"{str(node.value)[:80]!r} is no {name}") from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _mistake(key, f"{key.value!r} is there twice")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Loader(_Strict, FastLoader):
    """Five times as fast as ``_Explaining`` where PyYAML has libyaml.

    libyaml makes tokens and events only: its own composer has no limit of recursion, and ends the process by a
    segmentation fault.
    """

    def __init__(self, text: str) -> None:
        FastLoader.__init__(self, text)
        Composer.__init__(self)


class _Explaining(_Strict, yaml.SafeLoader):
    """PyYAML's own reader, whose errors name the token that was found."""


def _kind(node: yaml.Node) -> str:
    return type(node).__name__.removesuffix("Node").lower()


def _mistake(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def read_yaml_file(path: Path, where: str, hint: str) -> Any:
    """The content of a YAML file; ``where`` is the prefix of errors, ``hint`` the suffix of the missing-file error.

    Raises:
        UserError: a missing or unreadable file, or as ``read_yaml_text``.
    """
    try:
        text = read_text(path, LARGEST)
    except FileNotFoundError:
        raise UserError(f"{where}: no such file; {hint}") from None
    except ValueError as error:
        raise UserError(f"{where}: cannot be read: {error}") from None
    return read_yaml_text(text, where)


def read_yaml_text(text: str, where: str) -> Any:
    """The parsed YAML: None, bools, numbers, printable text, lists and mappings; ``where`` is the prefix of errors.

    Raises:
        UserError: with line and column, for invalid YAML, a duplicate key, another type, or more than ``MOST_VALUES``.
    """
    with suppress(yaml.YAMLError, ValueError, RecursionError):
        return _content(_Loader(text))
    try:
        return _content(_Explaining(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        why = f"{place}{error.problem}"
    except (yaml.YAMLError, ValueError) as error:
        why = " ".join(str(error).split())
    except RecursionError:
        why = "nested too deeply"
    raise UserError(f"{where} is no valid YAML: {why}")


def _content(loader: Any) -> Any:
    node = loader.get_single_node()
    if node is None:
        return None
    _count(node, {})
    found = loader.construct_document(node)
    check_text(found)
    return found


def _count(node: yaml.Node, counted: dict[yaml.Node, int]) -> int:
    """Values below a node with aliases resolved, found without resolving them; ``counted`` has those of other nodes."""
    if node not in counted:
        counted[node] = MOST_VALUES + 1  # while it is open: an alias to it from inside has no end
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = (part for pair in parts for part in pair) if isinstance(node, yaml.MappingNode) else parts
        counted[node] = 1 + sum(_count(part, counted) for part in parts)
    if counted[node] > MOST_VALUES:
        raise _mistake(node, f"more than {MOST_VALUES:,} values with all aliases resolved")
    return counted[node]
