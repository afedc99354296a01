"""Files that other processes read while one writes them."""

import os
import secrets
from contextlib import suppress
from pathlib import Path


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
