"""Further cases of a promise that others keep on every change: ``make test`` leaves them out, ``make test-weekly`` not.

pytest on a file or a folder runs all cases.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def also_weekly(cases: Iterable[str], on_every_change: Collection[str]) -> list[Any]:
    """Parameters of a test: all cases, those that are not run on every change under the mark ``weekly``."""
    cases = list(cases)
    assert set(on_every_change) <= set(cases)
    return [case if case in on_every_change else pytest.param(case, marks=pytest.mark.weekly) for case in cases]
