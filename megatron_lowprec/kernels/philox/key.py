"""Philox keys as kernel arguments."""

from functools import lru_cache
from typing import NamedTuple


class Key(NamedTuple):
    """A Philox key as two int32 arguments of a Triton kernel."""

    word0: int = 0
    word1: int = 0

    @staticmethod
    @lru_cache(maxsize=1 << 14)
    def of(key: tuple[int, int]) -> "Key":
        """From two 32-bit words."""
        return Key(_signed(key[0]), _signed(key[1]))


def _signed(word: int) -> int:
    """A 32-bit word as an int32, so that Triton's signature does not depend on the value."""
    return word - (1 << 32) if word >= 1 << 31 else word
