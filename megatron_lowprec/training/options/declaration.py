"""How an option is declared: a dataclass field with what parser, resume, sweep, report and docs read about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar


class Part(Enum):
    """What an option is about. Its value says what a run that resumes does where the checkpoint has another value."""

    RECIPE = "allowed and recorded: numerics from here on are the new recipe's"
    SHAPE = "refused: it determines the checkpoint's tensors"
    FUNCTION = "refused: the same tensors would compute something else"
    UPDATE = "allowed, logged and recorded"
    SCHEDULE = "as the schedule's rules say; recorded"
    DATA = "allowed, logged and recorded: later samples are others"
    TOKENIZER = "refused where ids mean other text"
    START = "without effect: it is about the first step"
    EVALUATION = "allowed: it changes what is measured"
    LAYOUT = "allowed"
    EXECUTION = "allowed: affects speed, memory and measurements"
    RESUME = "how to resume"
    OUTPUT = "allowed: affects paths, logs and interruptions"


NO_EFFECT_PARTS = (Part.LAYOUT, Part.EXECUTION, Part.RESUME, Part.OUTPUT)
"""Parts that change no update, but by its order of summation and by the draws of a rank."""


@dataclass(frozen=True)
class Group:
    """Options with one title, the docstring of the class; what is said here holds for each, as in ``Option``."""

    PART: ClassVar[Part]
    NEEDS: ClassVar[str] = ""
    READ_WITH: ClassVar[str] = ""


@dataclass(frozen=True)
class Option:
    """A declaration beside name, type and default.

    Args:
        part: what the option is about; by default its group's.
        least, above: smallest value, or what it has to exceed; None for no bound.
        most, below: largest value, or what it has to stay below; None for no bound.
        needs: what a value other than the default and ``formerly`` is refused without, separated by blanks: "name|name"
            of options of which one is set, "name=value|value", or "!name" of one that is not set.
        read_with: an option as in ``needs``, without which the value is not read, and not compared.
        required: resolution refuses a run that meets ``needs`` and has no value.
        one_of: the quantity that it sets. Options of a quantity exclude each other; "quantity/way" where several
            options together are one way.
        was: former name, which files and records of runs may have.
        formerly: another default of older versions, which records without the option may stand for; of an option whose
            default is None, what such records had.
        path: what it names the files of: "tokenizer" or "data".
        hidden: --help leaves it out.
        inference: a checkpoint that is opened for inference keeps it.
        optimizer_state: it determines the optimizer's tensors.
        own_note: a resume that changes it logs a line of its own.
        begins: with --load it says how a run begins.
        sweep: what sets it in a sweep, whose options may not have it.
        grouped: runs that differ in it are in different groups of a report.
        by_rank: ranks may have other values: names of what they compare otherwise, or a choice by the rank's GPU.
        draws: initial weights and dropout depend on it, because Megatron offsets its seed by rank.
    """

    help: str
    part: Part | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    needs: str = ""
    read_with: str = ""
    required: bool = False
    one_of: str = ""
    was: str | None = None
    formerly: Any = None
    path: str = ""
    hidden: bool = False
    inference: bool = False
    optimizer_state: bool = False
    own_note: bool = False
    begins: bool = False
    sweep: str | None = None
    grouped: bool = True
    by_rank: bool = False
    draws: bool = False

    @property
    def bounds(self) -> list[str]:
        """Bounds of a value, in words."""
        limits = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return [f"{word} {limit}" for word, limit in limits.items() if limit is not None]

    @property
    def meaning(self) -> str:
        """Help and bounds."""
        return "; ".join([self.help, *self.bounds])

    def admits(self, value: Any) -> bool:
        """Whether a value keeps all bounds, as any does without them; with a bound, NaN does not."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )


def arg(default: Any, help: str, part: Part | None = None, **declared: Any) -> Any:
    """A field with its ``Option``; each configuration gets a fresh copy of a list."""
    metadata = {"option": Option(help, part, **declared)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)
