"""Files that other programs may have written or damaged, or are writing: JSON within limits, atomic replacement."""

import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_lowprec.errors import UserError, type_of

LARGEST_FILE = 2**28
"""Bytes of a JSON or YAML file. The largest that is read here, a tokenizer's vocabulary, has about 2**24."""
LARGEST_LINES = 2**32
"""Bytes of a file of JSON lines."""
LONGEST_LINE = 2**20
"""Bytes of a JSON line. A row of metrics has about 500."""
LONGEST_NUMBER = 100
"""Characters of a number: more than any float has, and far below those that take Python minutes."""
_BLOCK = 2**22  # bytes read at once
# All control characters but tab and newline, which steer a terminal, and surrogates, which UTF-8 cannot encode.
_NOT_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

Row = dict[str, Any]


def read_text(path: Path, largest: int = LARGEST_FILE) -> str:
    """The content of a UTF-8 file of at most ``largest`` bytes, without a byte order mark.

    Raises:
        FileNotFoundError: no such file.
        ValueError: why it cannot be read, in one line.
    """
    try:
        with path.open("rb") as file:
            content = file.read(largest + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    if len(content) > largest:
        raise ValueError(f"more than {largest:,} bytes")
    return content.decode("utf-8-sig")


def check_text(value: Any) -> None:
    """Raise ValueError for a string in ``value``, mappings and lists included, with a control character or a surrogate.

    Tab and newline are allowed. Such strings would steer a terminal, or end a figure or a file that shows them.
    """
    if isinstance(value, str):
        if _NOT_TEXT.search(value):
            raise ValueError(f"a control character or half a character in {value[:80]!a}")
    elif isinstance(value, dict):
        for key, item in value.items():
            check_text(key)
            check_text(item)
    elif isinstance(value, list):
        for item in value:
            check_text(item)


def parse_json(text: str) -> Row:
    """A JSON object, with any text in it.

    Raises:
        ValueError: why it is none, in one line.
    """
    try:
        found = _JSON.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"not a JSON object but {type_of(found)}")
    return found


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


_JSON = json.JSONDecoder(parse_int=_integer)


def read_json(path: Path, remedy: str, check: Callable[[Row], object] = check_text) -> Row:
    """The JSON object in a file, by default with printable text only.

    Args:
        remedy: suffix of errors.
        check: raises ValueError for an object that is refused.

    Raises:
        FileNotFoundError: no such file.
        UserError: it cannot be read, or is not such an object.
    """
    try:
        found = parse_json(read_text(path))
        check(found)
    except ValueError as error:
        raise UserError(f"{path}: cannot be read: {error}; {remedy}") from None
    return found


def json_lines(
    path: Path, say: Callable[[str], None], check: Callable[[Row], object] = check_text, tail: int | None = None
) -> Iterator[Row]:
    """Rows of a JSON-lines file, which may be absent; a process may be writing its last line.

    A line that is no such row is dropped. ``say`` is called at the end if any was, with a message in one line; a last
    line without its end is no damage.

    Args:
        check: raises ValueError, KeyError or TypeError for an object that is no row.
        tail: read only the lines that begin in that many last bytes.

    Raises:
        UserError: the file cannot be read, or has more than ``LARGEST_LINES`` bytes.
    """
    dropped: list[str] = []
    try:
        for number, line in _lines(path, tail):
            try:
                if len(line) > LONGEST_LINE:
                    raise ValueError(f"more than {LONGEST_LINE:,} bytes")
                row = parse_json(line.decode("utf-8"))
                check(row)
            except (ValueError, KeyError, TypeError) as error:
                if line.endswith(b"\n"):
                    dropped.append(f"line {number} ({_in_a_line(error)})")
                continue
            yield row
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    if dropped:
        more = f" and {len(dropped) - 3} more" if len(dropped) > 3 else ""
        say(f"{path}: dropped, as no row of such a file: {', '.join(dropped[:3])}{more}")


def _lines(path: Path, tail: int | None) -> Iterator[tuple[int, bytes]]:
    """Line numbers and lines that are not blank; a line that is too long ends soon after the limit."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        if tail is not None and size > tail:
            file.seek(size - tail - 1)
            file.readline()
        elif size > LARGEST_LINES:
            raise UserError(f"{path}: {size:,} bytes are more than the {LARGEST_LINES:,} that are read; shorten it")
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            rest = line
            while len(line) > LONGEST_LINE and rest and not rest.endswith(b"\n"):
                rest = file.readline(LONGEST_LINE)
            if line.strip():
                yield number, line.removesuffix(b"\n") + b"\n" * rest.endswith(b"\n")


def _in_a_line(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())


def crc32_of(path: Path) -> str:
    """CRC-32 of a file's bytes, 8 hex digits."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


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


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Path of a new folder in ``folder``, whose files move up at the end; on an error they are removed instead."""
    partial = folder / f".unfinished.{secrets.token_hex(4)}"
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.iterdir():
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
