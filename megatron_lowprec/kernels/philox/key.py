"""A Philox key as kernels take it."""

from functools import lru_cache
from typing import NamedTuple


class Key(NamedTuple):
    """A Philox key as Triton's int32 arguments."""

    word0: int = 0
    word1: int = 0

    @staticmethod
    @lru_cache(maxsize=1 << 14)
    def of(key: tuple[int, int]) -> "Key":
        """From two 32-bit words."""
        return Key(_signed(key[0]), _signed(key[1]))


def _signed(word: int) -> int:
    """A 32-bit word as an int32, so that no value changes a kernel's signature."""
    return word - (1 << 32) if word >= 1 << 31 else word
