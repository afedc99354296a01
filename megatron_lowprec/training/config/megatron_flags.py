"""Answers to Megatron-LM's flags that are no options here: read as others, without effect, or refused with the reason.

megatron_flags.tsv lists the flags of Megatron-LM's releases (tools/megatron_flags.py writes it from their parsers),
megatron_answers.yaml has the answers. Parser, hints and docs/guide/megatron-flags.md follow from the two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

INVENTORY = Path(__file__).with_name("megatron_flags.tsv")
_ANSWERS = Path(__file__).with_name("megatron_answers.yaml")
PAGE = "docs/guide/megatron-flags.md"


@dataclass(frozen=True)
class Flag:
    """A flag of Megatron-LM's: number of values as argparse writes it (0, 1, +, *), default, releases with it."""

    name: str
    values: str
    default: str
    releases: tuple[str, ...]

    def line(self) -> str:
        """Its line of the list."""
        return "\t".join((self.name, self.values, self.default, " ".join(self.releases)))


@dataclass(frozen=True)
class Answer:
    """What happens to a flag, or to one value of it.

    Args:
        text: the reason; of "read as" the words in its place, which the flag's values follow.
        requires: options with which a flag has no effect; with others it is refused.
    """

    kind: Literal["read as", "no effect", "refused"]
    text: str
    requires: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Translated:
    """A command line in our flags.

    Attributes:
        words: the rest, with flags that are read as others replaced.
        read_as: "old -> new" of each.
        idle: flags without effect, with their answers.
        refused: reason -> flags with their values.
        unknown: flags of neither side.
    """

    words: list[str] = field(default_factory=list)
    read_as: list[str] = field(default_factory=list)
    idle: dict[str, Answer] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """At most two lines for the log."""
        lines = [f"read as this driver's flags: {', '.join(self.read_as)}"] if self.read_as else []
        idle = [f"Megatron-LM's flags without effect here ({PAGE}): {', '.join(self.idle)}"] if self.idle else []
        return lines + idle

    def problems(self) -> list[str]:
        """A line for each reason to refuse a flag."""
        return [f"{', '.join(flags)}: {reason}" for reason, flags in self.refused.items()]


@cache
def megatron_flags() -> dict[str, Flag]:
    """The flags of Megatron-LM's releases by name."""
    rows = (line.split("\t") for line in INVENTORY.read_text(encoding="utf-8").splitlines()[1:])
    return {name: Flag(name, values, default, tuple(releases.split())) for name, values, default, releases in rows}


@cache
def answers() -> dict[str, Answer]:
    """Flag, flag=value or glob -> answer, as the file has them."""
    content = yaml.safe_load(_ANSWERS.read_text(encoding="utf-8"))
    found = {key: Answer("read as", words) for key, words in content["read as"].items()}
    for kind in ("no effect", "refused"):
        for group in content[kind]:
            for key in group["flags"].split():
                assert key not in found, f"{key} has two answers"
                found[key] = Answer(kind, group["because"], group.get("requires", {}))
    return found


def answer(name: str, values: Sequence[str] = ()) -> Answer | None:
    """The answer to a flag with these values; None if it has none.

    A flag that is refused has no effect with Megatron-LM's default as its value.
    """
    table, value = answers(), " ".join(values)
    if values and f"{name}={value}" in table:
        return table[f"{name}={value}"]
    found = table.get(name)
    if found is None:
        given, globs = (name, f"{name}={value}"), (key for key in table if "*" in key)
        found = next((table[key] for key in globs if any(fnmatchcase(each, key) for each in given)), None)
    flag = megatron_flags().get(name)
    if found is not None and found.kind == "refused" and flag is not None and values and _same(value, flag.default):
        return Answer("no effect", f"{value} is Megatron-LM's default")
    return found


def explain(name: str) -> str | None:
    """What to do in place of a flag that is no option here, for an error; None if it is no flag of Megatron-LM's."""
    found = answer(name)
    if found is None:
        return None
    texts = {"read as": f"use {found.text}", "no effect": f"it has no effect here: {found.text}; leave it out"}
    return texts.get(found.kind, found.text)


def translate(words: Sequence[str], ours: Mapping[str, Collection[str] | None]) -> Translated:
    """Sort a command line's flags by their answers.

    Args:
        ours: this driver's flags -> their values, or None for any.
    """
    found = Translated()
    position = 0
    while position < len(words):
        name, equals, inline = words[position].partition("=")
        end = position + 1
        while end < len(words) and not words[end].startswith("--"):
            end += 1
        follow = list(words[position + 1 : end])
        if not name.startswith("--"):
            found.words.append(words[position])
            position += 1
            continue
        values = [inline] if equals else follow
        if name in ours:
            choices = ours[name]
            given = None if choices is None or not values or values[0] in choices else answer(name, values[:1])
        else:
            given = answer(name, values)
        if given is None and name in ours:
            found.words.append(words[position])
            position += 1
            continue
        position = end
        shown = " ".join([name, *values])
        if given is None:
            found.unknown.append(name)
        elif given.kind == "refused":
            found.refused.setdefault(given.text, []).append(shown)
        else:
            taken, stray = _split(name, values, bool(equals))
            if given.kind == "read as":
                keep = f"{name}={' '.join(values)}" not in answers()
                meant = given.text.split() + (taken if keep else [])
                found.words += meant
                found.read_as.append(f"{' '.join([name, *taken])} -> {' '.join(meant)}")
            else:
                found.idle[name] = given
            found.words += stray + (follow if equals else [])
    return found


def _split(name: str, values: list[str], inline: bool) -> tuple[list[str], list[str]]:
    """A flag's own values, and words behind them that belong to no flag."""
    flag = megatron_flags().get(name)
    count = len(values) if inline or flag is None or flag.values in "+*" else int(flag.values)
    return values[:count], values[count:]


def _same(value: str, default: str) -> bool:
    try:
        return float(value) == float(default)
    except ValueError:
        return value == default
