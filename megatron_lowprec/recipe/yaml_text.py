"""Strict reading of hand-written YAML: safe types only, no duplicate keys, one-line errors."""

from pathlib import Path
from typing import Any

import yaml

from megatron_lowprec.errors import UserError


class _Loader(yaml.SafeLoader):
    """Rejects duplicate keys, of which yaml.SafeLoader silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} is there twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml_file(path: Path, where: str, hint: str) -> Any:
    """The content of a YAML file; ``where`` is the prefix of errors, ``hint`` the suffix of the missing-file error.

    Raises:
        UserError: a missing or unreadable file, or as ``read_yaml_text``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{where}: no such file; {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: cannot be read: {error}") from None
    return read_yaml_text(text, where)


def read_yaml_text(text: str, where: str) -> Any:
    """The parsed YAML; ``where`` is the prefix of errors.

    Raises:
        UserError: with line and column, for invalid YAML, a duplicate key, or a Python type.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise UserError(f"{where} is no valid YAML: {place}{error.problem}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{where} is no valid YAML: {' '.join(str(error).split())}") from None
