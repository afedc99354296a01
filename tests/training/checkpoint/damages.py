"""What may have happened to the bytes of a file."""

from __future__ import annotations

from collections.abc import Callable

DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda content: None,
    "empty": lambda content: b"",
    "cut short": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "zeros": lambda content: bytes(len(content)),
}
