"""Launching a Triton kernel again without going through its signature, which costs the host more than the launch."""

from collections.abc import Hashable, Mapping
from typing import Any

_compiled: dict[Hashable, Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: Mapping[str, Any],
    *,
    specialized_on: Hashable,
    **options: Any,
) -> None:
    """Run ``kernel[grid](*arguments, **constants, **options)``, compiled once for each key.

    Args:
        arguments: in the order of the signature.
        constants: the constexpr parameters, in the order of the signature, behind all others.
        specialized_on: all that Triton would tell apart in ``arguments``: dtypes, alignment, divisibility by 16, ones.
        options: num_warps and the like; the same whenever kernel, constants and key are the same.
    """
    key = (kernel, specialized_on, *constants.values())
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*arguments, *constants.values())
        return
    compiled = kernel[grid](*arguments, **constants, **options)
    if hasattr(compiled, "packed_metadata"):  # the interpreter returns nothing to keep
        _compiled[key] = compiled
