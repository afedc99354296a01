"""Files that other processes read while one writes them."""

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a file of JSON objects, which may be absent or in the middle of a write."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def atomic_write(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a text file; readers see the old or the new content, never a part.

    ``durable`` syncs the content to disk first, so that a power cut leaves one of the two; some file systems cannot.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                with suppress(OSError):
                    os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
