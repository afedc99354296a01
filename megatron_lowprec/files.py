"""Files that one process writes while others read."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Complete rows of a JSON-lines file, which may be absent or partially written."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def default_mode(path: Path) -> None:
    """Give a file the rights of newly opened ones; safetensors lets only its owner read what it writes."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Path of a new file in the same folder, which replaces ``path`` at the end; on an error it is removed instead."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def atomic_write(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a text file atomically; readers see the old or the new content.

    ``durable`` syncs the content to disk first, so this also holds after a power cut; some file systems cannot sync.
    """
    with atomic_replace(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            with suppress(OSError):
                os.fsync(file.fileno())
