"""Kernels that a rule keeps, since their lookup must cost less than a launch."""

from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class KernelCache:
    """Base of a rule. Copies are the rule itself; pickles hold no kernels, which cannot be pickled.

    Attributes:
        kernels: specialized for the rule.
        prepared: constants of launches for matrices of a layout.
    """

    kernels: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    prepared: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kernels": {}, "prepared": {}}
