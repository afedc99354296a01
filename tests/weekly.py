"""Further cases of a promise that others keep on every change: ``make test`` leaves them out, ``make test-weekly`` not.

pytest on a file or a folder runs all cases.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def also_weekly(cases: Iterable[str | tuple[str, ...]], on_every_change: Collection[str]) -> list[Any]:
    """Parameters of a test: all cases, those that are not run on every change under the mark ``weekly``.

    The name of a case of several values has hyphens between them.
    """
    named = {"-".join(case): case for case in ((case,) if isinstance(case, str) else case for case in cases)}
    assert set(on_every_change) <= set(named)
    marks = {name: () if name in on_every_change else pytest.mark.weekly for name in named}
    return [pytest.param(*case, id=name, marks=marks[name]) for name, case in named.items()]


ALIKE = frozenset({"nvfp4", "nvfp4_bf16_tail", "nvfp4_four_over_six"})
"""Recipes with the operands of nvfp4_all, or between those and quartet2's."""


def each_kind(recipes: Iterable[str]) -> list[Any]:
    """Parameters of a test of all recipes: those of ``ALIKE`` weekly."""
    names = list(recipes)
    return also_weekly(names, [name for name in names if name not in ALIKE])


def checks_of(checks: Iterable[str], only_weekly: Collection[str], weekly: bool) -> list[str]:
    """The checks of a worker that one launch runs: those only of a weekly run if that is asked for."""
    checks = list(checks)
    assert set(only_weekly) <= set(checks)
    return [name for name in checks if weekly or name not in only_weekly]
