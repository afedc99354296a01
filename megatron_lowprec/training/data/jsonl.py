"""Text documents from JSON-lines files, plain or compressed, in batches that record line numbers."""

import codecs
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatron_lowprec.errors import UserError, type_of
from megatron_lowprec.files import parse_json

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst")

LONGEST_LINE = 2**28
"""Bytes of a document with its markup; without a limit one line of a compressed file could fill the memory."""

_BATCH_BYTES = 512 * 1024
_READ_BYTES = 128 * 1024
_ZSTD_BYTES = 8 * 1024  # decompressed at once: zstd makes up to 2**15 times as many of them


@dataclass(frozen=True)
class Batch:
    """Consecutive raw lines of one file.

    ``first_line`` counts from 1; ``bytes_read`` counts the (compressed) bytes of all files read up to the last one.
    """

    path: str
    first_line: int
    lines: tuple[bytes, ...]
    bytes_read: int


def is_text_file(path: str) -> bool:
    """Whether the suffix is that of JSON lines, plain or compressed; the file need not exist."""
    return path.endswith(SUFFIXES)


def batches(paths: Sequence[str]) -> Iterator[Batch]:
    """The files' lines in order, about half a megabyte at a time.

    The name's last suffix selects the decompression: .gz, .xz, .zst; anything else is read as plain text.

    Raises:
        UserError: missing or unreadable file, broken compression, or a .zst without the ``zstandard`` package.
    """
    bytes_before = 0
    for path in paths:
        yield from _file_batches(path, bytes_before)
        bytes_before += os.path.getsize(path)


def texts(batch: Batch, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The strings under ``keys`` of each line; blank lines are skipped.

    Raises:
        UserError: a line that is not a JSON object, lacks a key, has no text under it, or text that is not valid
            Unicode. The message names file and line.
    """
    for number, line in enumerate(batch.lines, batch.first_line):
        if not line.strip():
            continue
        where = f"{batch.path}, line {number}"
        document = parse(line, where)
        yield tuple(_text(document, key, where) for key in keys)


def parse(line: bytes, where: str) -> dict[str, object]:
    """The JSON object of a line.

    Raises:
        UserError: not a JSON object; ``where`` is the prefix of the message.
    """
    try:
        return parse_json(line.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except ValueError as error:
        raise UserError(f"{where}: not a JSON object ({error}); each line must be one") from None


def checked_text(value: object, what: str) -> str:
    """``value`` if it is text that can be encoded.

    Raises:
        UserError: it is not; ``what`` is the prefix of the message.
    """
    if not isinstance(value, str):
        raise UserError(f"{what} holds {type_of(value)}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} is not Unicode ({error.reason} at {error.start}); mend the line") from None
    return value


def _file_batches(path: str, bytes_before: int) -> Iterator[Batch]:
    first_line, lines, size = 1, list[bytes](), 0
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(open(path, "rb"))
            stream = stack.enter_context(_decompressed(raw, path))
            while line := stream.readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE:
                    where = f"{path}, line {first_line + len(lines)}"
                    raise UserError(f"{where}: longer than {LONGEST_LINE:,} bytes; split the document")
                lines.append(line)
                size += len(line)
                if size >= _BATCH_BYTES:
                    yield Batch(path, first_line, tuple(lines), bytes_before + raw.tell())
                    first_line, lines, size = first_line + len(lines), [], 0
            if lines:
                yield Batch(path, first_line, tuple(lines), bytes_before + os.path.getsize(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path (relative ones start at the current folder)") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        last = first_line + len(lines) - 1
        raise UserError(f"{path}: cannot be read beyond line {last}: {error}; fetch or compress it again") from None


def _text(document: dict[str, object], key: str, where: str) -> str:
    if key not in document:
        found = ", ".join(map(repr, document)) or "none"
        remedy = "name the right one with megatron-lowprec preprocess --json-keys"
        chat = ", or train on the conversations with --sft" if "messages" in document else ""
        raise UserError(f"{where}: no key {key!r}; found: {found}; {remedy}{chat}")
    return checked_text(document[key], f"{where}: {key!r}")


def _decompressed(raw: IO[bytes], path: str) -> IO[bytes]:
    match Path(path).suffix:
        case ".gz":
            return gzip.open(raw, "rb")  # type: ignore[return-value]
        case ".xz":
            return lzma.open(raw, "rb")
        case ".zst":
            return _zstandard(raw, path)
        case _:
            return raw


def _zstandard(raw: IO[bytes], path: str) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{path}: .zst needs the zstandard package; pip install 'megatron-lowprec[zstd]'") from None

    # Not the library's own stream reader, which treats a truncated file as complete.
    def chunks() -> Iterator[bytes]:
        frame = None
        while data := raw.read(_ZSTD_BYTES):
            while data:
                frame = frame or zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
                try:
                    yield frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise OSError(str(error)) from None
                data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        if frame is not None:
            raise EOFError("compressed file ended before the end of its last frame")

    return io.BufferedReader(_Chunks(chunks()), _READ_BYTES)


class _Chunks(io.RawIOBase):
    """Chunks of bytes as a readable stream."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count
