"""Replaces machine-specific absolute paths in texts."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Start of an absolute path: not within a relative path, a ratio of units or a web address.
_START = r"(?:(?<![\w.~/-])|(?<=file://))"
_FOLDERS = r"/(?:[^/\s\"'`,;:()\[\]{}<>|]+/)+"


class Redaction:
    """Replaces known folders by their placeholders, and the folder of any other absolute path by FOLDER1, FOLDER2, ...

    Equal folders have equal placeholders in all texts, so equal paths stay equal and different ones stay different.

    Args:
        known: absolute folder -> placeholder; of nested folders the innermost counts.
    """

    def __init__(self, known: Mapping[str, str]) -> None:
        self._known = dict(known)
        self._others: dict[str, str] = {}
        names = "|".join(re.escape(folder) for folder in sorted(known, key=len, reverse=True))
        self._paths = re.compile(rf"{_START}(?:(?P<known>{names})(?![\w-])|(?P<folders>{_FOLDERS}))")

    def __call__(self, text: str) -> str:
        """The text without absolute paths that have a folder."""
        return self._paths.sub(self._placeholder, text)

    def _placeholder(self, found: re.Match[str]) -> str:
        if found["known"]:
            return self._known[found["known"]]
        return self._others.setdefault(found["folders"], f"FOLDER{len(self._others) + 1}") + "/"
