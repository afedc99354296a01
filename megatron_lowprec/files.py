"""Files that one process writes while others read."""

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Complete rows of a JSON-lines file, which may be absent or partially written."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def atomic_write(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a text file atomically; readers see the old or the new content.

    ``durable`` syncs the content to disk first, so this also holds after a power cut; some file systems cannot sync.
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
