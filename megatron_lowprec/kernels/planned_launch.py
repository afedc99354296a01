"""Launches that Inductor makes in its generated code, without this package.

Inductor writes a kernel's source, that of all functions that it calls, and its constants into a module of its own. So
a constant is a number, or ``fields`` of a named tuple, which ``named`` restores there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import triton


class Launch(NamedTuple):
    """One launch.

    Attributes:
        kernel: an autotuner with one configuration.
        programs: their number in each of three dimensions; integers or symbols, as sizes among ``arguments``.
        arguments: parameter -> integer or constant, or the name of a tensor among those of the plan.
    """

    kernel: Any
    programs: tuple[Any, Any, Any]
    arguments: dict[str, Any]


class Plan(NamedTuple):
    """Launches in order, with the fp32 tensors that they need besides the operands and results: name -> shape.

    Attributes:
        zeros: tensors that begin as zeros, results among them.
        empty: tensors that begin as anything.
    """

    launches: list[Launch]
    zeros: dict[str, tuple[Any, ...]]
    empty: dict[str, tuple[Any, ...]]


@lru_cache(maxsize=256)
def with_warps(kernel: Any, warps: int) -> Any:
    """A kernel with one configuration, as ``Launch`` has it."""
    return triton.autotune(configs=[triton.Config({}, num_warps=warps)], key=[])(kernel)


def fields(constants: Any) -> tuple[Any, ...]:
    """A named tuple as ((name, value), ...), nested, for ``named``."""
    values = (fields(each) if isinstance(each, tuple) else each for each in constants)
    return tuple(zip(constants._fields, values, strict=True))


@triton.constexpr_function
def named(pairs):  # type: ignore[no-untyped-def]
    """The named tuple of ``fields``; its source alone is in the generated code."""
    from collections import namedtuple

    names, values = zip(*pairs)
    return namedtuple("Constants", names)(*(named(each) if isinstance(each, tuple) else each for each in values))
