"""Command line and YAML -> Config: defaults <- YAML <- command line, each value checked against its field's type."""

from __future__ import annotations

import argparse
import difflib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from megatron_lowprec.errors import UserError, type_of
from megatron_lowprec.recipe.yaml_text import read_yaml_file
from megatron_lowprec.shipped import find, shipped_like
from megatron_lowprec.training.config.fp8_flags import FP8_FLAGS, refused_fp8_flags, translate_fp8_flags
from megatron_lowprec.training.config.megatron_flags import Translated, explain, megatron_flags, translate
from megatron_lowprec.training.config.options import DEFAULTS, GROUPS, OPTIONS, Config, options_in
from megatron_lowprec.training.options.declaration import Part
from megatron_lowprec.training.options.model_options import ModelOptions

DEFAULT_CONFIG = "configs/models/gpt_tiny.yaml"
RENAMED = {option.was: name for name, option in OPTIONS.items() if option.was}
"""Former name, in configuration files and records of runs -> name."""


@dataclass(frozen=True)
class _Kind:
    """A field's parsed type: element type, whether it is a list, allowed values."""

    element: type
    is_list: bool
    choices: tuple[str, ...] | None


def _kind(annotation: Any) -> _Kind:
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (a for a in get_args(annotation) if a is not type(None))
    if get_origin(annotation) is Literal:
        return _Kind(str, False, get_args(annotation))
    if get_origin(annotation) is list:
        return _Kind(get_args(annotation)[0], True, None)
    return _Kind(annotation, False, None)


KINDS: dict[str, _Kind] = {name: _kind(hint) for name, hint in get_type_hints(Config).items()}


def flag(name: str) -> str:
    """``num_layers`` -> ``--num-layers``"""
    return "--" + name.replace("_", "-")


def required(config: Config, *names: str) -> None:
    """Raise a UserError if one of these options has no value."""
    missing = [flag(name) for name in names if getattr(config, name) is None]
    if missing:
        pronoun = "it" if len(missing) == 1 else "them"
        hint = f"; {config.config} has none" if config.config else " or --config FILE.yaml"
        raise UserError(f"{', '.join(missing)} missing: give {pronoun}{hint}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def build_parser(problems: list[str] | None = None) -> argparse.ArgumentParser:
    """Parser of Megatron's flags; the namespace contains only flags given on the command line.

    Args:
        problems: gets a line for each value of a wrong type; without it the first one is raised.
    """
    parser = _Parser(
        prog="pretrain_gpt.py",
        usage="%(prog)s [--config FILE.yaml] [flags]",  # argparse would list all flags twice
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="YAML file with any of these options; the command line wins over it")
    for options in GROUPS:
        group = parser.add_argument_group((options.__doc__ or "").strip())
        for option in fields(options):
            _add_flag(group, option.name, problems)
    fp8 = parser.add_argument_group(
        "Megatron's FP8 flags: the layers kept in bf16 mean what they mean there; else use --recipe"
    )
    for name, is_switch in FP8_FLAGS.items():
        if is_switch:
            fp8.add_argument(flag(name), action="store_true", help=argparse.SUPPRESS)
        else:
            fp8.add_argument(flag(name), help=argparse.SUPPRESS)
    return parser


@cache
def _collecting_parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """A parser with the list of its last problems; sweeps and reports parse hundreds of command lines."""
    problems: list[str] = []
    return build_parser(problems), problems


def _add_flag(group: argparse._ActionsContainer, name: str, problems: list[str] | None) -> None:
    kind, declared = KINDS[name], OPTIONS[name]
    default = getattr(DEFAULTS, name)
    text = declared.meaning + ("" if default is None or default is False or default == [] else f" (default: {default})")
    text = argparse.SUPPRESS if declared.hidden else text.replace("%", "%%")
    convert = _converter(name, kind, problems)
    if kind.element is bool:
        group.add_argument(flag(name), action="store_true", help=text)
        if not name.startswith(("no_", "disable_")):
            # YAML may have switched it on.
            group.add_argument(flag("no_" + name), dest=name, action="store_false", help=argparse.SUPPRESS)
    elif name == "recipe_override":
        group.add_argument(flag(name), action="append", metavar="KEY=VALUE", help=text)
    elif kind.is_list:
        group.add_argument(flag(name), nargs="+", type=convert, help=text)
    else:
        shown = None if kind.choices is None else "{" + ",".join(kind.choices) + "}"
        group.add_argument(flag(name), type=convert, metavar=shown, help=text)


def _converter(name: str, kind: _Kind, problems: list[str] | None) -> Callable[[str], Any]:
    """argparse's ``type`` of an option; argparse itself would end at the first wrong value."""

    def convert(word: str) -> Any:
        try:
            value = kind.element(word)
        except ValueError:
            why = f"{word!r} is not {_WANTS[kind.element]}"
        else:
            if kind.choices is None or value in kind.choices:
                return value
            why = f"{word!r} is not one of {', '.join(kind.choices)}"
        if problems is None:
            raise argparse.ArgumentTypeError(why)
        problems.append(f"{flag(name)}: {why}")
        return None

    return convert


def nearest(name: str, known: Sequence[str]) -> str:
    """Suffix of an error about an unknown name: the nearest known name, if any."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.65)
    return f"; the nearest one is {close[0]}" if close else ""


def parse(argv: Sequence[str]) -> tuple[Config, frozenset[str], list[str]]:
    """The configuration, the names of options set by YAML or command line, and notes for the user.

    Raises:
        UserError: an unknown flag or key, a value of the wrong type, a flag of Megatron's that is refused here; names
            all such flags of the command line.
    """
    asked, namespace = _flags(argv)
    notes = asked.notes()
    given = current_names("the command line", namespace, notes)
    sizes = [name for name in options_in(Part.SHAPE, groups=(ModelOptions,)) if OPTIONS[name].required]
    if "config" not in given and not any(name in given for name in sizes) and not given.get("list_recipes"):
        given["config"] = DEFAULT_CONFIG
        notes.append(f"no --config and no model sizes were given: using {DEFAULT_CONFIG}")
    from_yaml: dict[str, Any] = {}
    if "config" in given:
        given["config"] = str(find(given["config"], "configs/models"))
        from_yaml = read_yaml(given["config"], notes)
        # Overrides accumulate; the command line's come last and take precedence.
        given["recipe_override"] = [*(from_yaml.get("recipe_override") or []), *given.get("recipe_override", [])]
    values = {**without_rivals(from_yaml, given), **given}
    fp8 = {name: values.pop(name) for name in FP8_FLAGS if name in values}
    recipe, overrides = values.get("recipe", Config.recipe), values.get("recipe_override", [])
    values["recipe_override"] = translate_fp8_flags(fp8, recipe, overrides, notes)
    config = Config(**values)
    if "split" in given and config.data_path is None:
        notes.append(f"--split {config.split} has no effect: it cuts the documents of --data-path")
    for name, answer in asked.idle.items():
        for option, wanted in answer.requires.items():
            if getattr(config, option) != wanted:
                shown = f"{flag(option)} {getattr(config, option)}"
                raise UserError(f"{name}: {answer.text}, and this run has {shown}; leave {name} out")
    return config, frozenset(values), notes


def choices_of_flags(parser: argparse.ArgumentParser) -> dict[str, tuple[str, ...] | None]:
    """The flags of ``build_parser``, with the values that one takes, or None for any."""
    return {
        name: KINDS[action.dest].choices if action.dest in KINDS else None
        for action in parser._actions
        for name in action.option_strings
    }


def _flags(argv: Sequence[str]) -> tuple[Translated, dict[str, Any]]:
    """Megatron's flags among the words, and the values of all others by name.

    Raises:
        UserError: names all flags that are unknown or refused, or have a value of the wrong type.
    """
    parser, wrong = _collecting_parser()
    wrong.clear()
    ours = choices_of_flags(parser)
    asked = translate(argv, ours)
    known = [*ours, *megatron_flags()]
    problems = asked.problems() + [f"unknown flag {name}{nearest(name, known)} (see --help)" for name in asked.unknown]
    namespace, stray = argparse.Namespace(), list[str]()
    try:
        namespace, stray = parser.parse_known_args(asked.words)
    except UserError as error:
        wrong.append(str(error))
    problems += [*wrong, *refused_fp8_flags(vars(namespace))]
    problems += [f"{word!r} is no flag, nor the value of one; flags begin with -- (see --help)" for word in stray]
    if len(problems) > 1:
        numbered = "; ".join(f"({number}) {problem}" for number, problem in enumerate(problems, 1))
        raise UserError(f"{len(problems)} reasons not to take these flags: {numbered}")
    if problems:
        raise UserError(problems[0])
    return asked, vars(namespace)


def _rivals() -> Iterator[tuple[frozenset[str], ...]]:
    """The ways to set a quantity, each by its options, for every quantity that has several."""
    ways: dict[str, dict[str, set[str]]] = {}
    for name, option in OPTIONS.items():
        quantity, _, way = option.one_of.partition("/")
        ways.setdefault(quantity, {}).setdefault(way or name, set()).add(name)
    return (tuple(map(frozenset, found.values())) for quantity, found in ways.items() if quantity)


# Mutually exclusive options: the command line's replace the file's; two in one place are an error.
_RIVALS = tuple(_rivals())


def without_rivals(
    from_yaml: dict[str, Any],
    given: dict[str, Any],
    where: tuple[str, str] = ("the YAML file", "the command line"),
) -> dict[str, Any]:
    """``from_yaml`` without options that ``given`` sets in another way; ``where`` names the two in an error.

    Raises:
        UserError: one of the two sets the same quantity in two ways.
    """
    for ways in _RIVALS:
        for place, values in ((where[1], given), (where[0], from_yaml)):
            used = [way for way in ways if any(values.get(name) for name in way)]
            if len(used) > 1:
                names = " and ".join(flag(next(n for n in sorted(way) if values.get(n))) for way in used)
                raise UserError(f"{place} has {names}, which exclude each other; leave one out")
        if any(given.get(name) for way in ways for name in way):
            from_yaml = {
                n: v for n, v in from_yaml.items() if not any(n in way and not way & given.keys() for way in ways)
            }
    return from_yaml


def rivals_of(name: str) -> frozenset[str]:
    """``name`` and the options that set the same quantity in another way."""
    return frozenset({name}).union(*(way for ways in _RIVALS if any(name in way for way in ways) for way in ways))


def current_names(where: str, options: Mapping[str, Any], notes: list[str] | None = None) -> dict[str, Any]:
    """Options under their present names; appends a note to ``notes`` for each old one.

    Raises:
        UserError: an option is given under both names, or has an empty text as value.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        if "" in (value if isinstance(value, list) else [value]):
            raise UserError(f"{where} has {flag(name)} with an empty value: give one, or leave the option out")
        new = RENAMED.get(name, name)
        if new in found or (new != name and new in options):
            raise UserError(f"{where} has {flag(name)} and {flag(new)}, its new name; leave {flag(name)} out")
        if new != name and notes is not None:
            notes.append(f"warning: {where}: {flag(name)} is now {flag(new)}; the next release drops the old name")
        found[new] = value
    return found


def read_yaml(path: str, notes: list[str] | None = None) -> dict[str, Any]:
    """Checked options from a YAML file: names are flags without the leading dashes, values have the field's type.

    Appends a note to ``notes`` for each option under an old name.
    """
    content = read_yaml_file(Path(path), f"--config {path}", shipped_like(path, "configs/models"))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: expected keys and values at the top, found {type_of(content)}")
    if {"base", "fprop", "dgrad", "wgrad"} & content.keys():
        raise UserError(f"--config {path} is a recipe: give it as --recipe, and as --config a model's configuration")
    return checked_options(f"--config {path}", content, notes)


def checked_options(where: str, content: Mapping[Any, Any], notes: list[str] | None = None) -> dict[str, Any]:
    """Field names and values from YAML's keys and values; ``where`` is the prefix of errors."""
    values: dict[str, Any] = {}
    given = {str(key).replace("-", "_"): (key, value) for key, value in content.items()}
    unknown = []
    for name, (key, value) in current_names(where, given, notes).items():
        if name == "config":
            raise UserError(f"{where}: config is not a key: --config names such a file")
        if name not in KINDS and name not in FP8_FLAGS:
            unknown.append(_unknown_key(str(key)))
            continue
        values[name] = value if name in FP8_FLAGS else checked_value(f"{where}: {key}", KINDS[name], value)
    if unknown:
        raise UserError(f"{where}: {'; '.join(unknown)}")
    return values


def _unknown_key(key: str) -> str:
    """What is wrong with a key of YAML that is no option, and what to write."""
    name = key.replace("_", "-")
    megatron = explain(f"--{name}")
    if megatron is not None:
        return f"'{key}': {megatron}"
    known = [n.replace("_", "-") for n in KINDS if n != "config"]
    return f"unknown key '{key}'{nearest(name, known) or '; pretrain_gpt.py --help lists all of them as flags'}"


def checked_value(where: str, kind: _Kind, value: Any) -> Any:
    """``value`` converted to the field's type; raises a UserError that names the fix."""
    if value is None:
        return None
    if kind.is_list:
        items = value if isinstance(value, list) else [value]
        if None in items:
            raise UserError(f"{where}: an entry of the list is empty; leave it out")
        return [checked_value(where, _Kind(kind.element, False, None), item) for item in items]
    if kind.element is str and isinstance(value, (int, float)) and not isinstance(value, bool) and kind.choices is None:
        return str(value)
    if kind.element is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind.element) or (kind.element is int and isinstance(value, bool)):
        raise UserError(f"{where}: wants {_WANTS[kind.element]}, found {value!r}{_number_hint(kind.element, value)}")
    if kind.choices is not None and value not in kind.choices:
        raise UserError(f"{where}: {value!r} is not one of {', '.join(kind.choices)}")
    return value


_WANTS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _number_hint(element: type, value: Any) -> str:
    if not isinstance(value, str) or element not in (int, float):
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    if element is int:
        return f", which is text; write {int(number)}" if number.is_integer() else ""
    mantissa, _, exponent = value.lower().partition("e")
    if not exponent:
        return f", which is text; write {value} without quotes"
    mantissa = mantissa if "." in mantissa else mantissa + ".0"
    sign = exponent if exponent[0] in "+-" else "+" + exponent
    return f", which YAML 1.1 reads as text; write {mantissa}e{sign}"
