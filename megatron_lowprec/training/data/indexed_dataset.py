"""Tokenized corpora in Megatron's indexed format, checked before every use.

A corpus is a prefix with three files: ``PREFIX.bin`` (token ids) and ``PREFIX.idx`` (document lengths), both as
``megatron.core.datasets.indexed_dataset`` defines them, and ``PREFIX.json``, this project's note of the ids'
vocabulary. ``corpus_writer`` publishes the note last: a corpus with a note is complete.
"""

import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_lowprec.errors import UserError
from megatron_lowprec.files import Row, atomic_write, crc32_of, read_json
from megatron_lowprec.training.data.tokenizer import Tokenizer
from megatron_lowprec.training.distributed.file_lock import lock

SUFFIXES = (".bin", ".idx")

_WINDOW = 2**22  # ids read at once
_MOST_IDS = 2**24  # more than any vocabulary has
_MAX_WINDOWS = 64  # of a corpus without a note: all ids of a common one, evenly spaced windows of a huge one

_INDEX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, documents' parts, document boundaries
_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_DTYPES: Mapping[int, type[np.integer]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


@dataclass(frozen=True)
class Note:
    """Content of ``PREFIX.json``. ``empty`` counts documents without a token, which were dropped."""

    tokenizer: str
    vocab_size: int
    fingerprint: str
    documents: int
    tokens: int
    empty: int
    json_key: str
    append_eod: bool
    source: tuple[str, ...]


def write_note(prefix: str, note: Note) -> None:
    """Write ``PREFIX.json``, the last file of a corpus, with checksums of the others."""
    content = asdict(note) | {"crc32": {suffix: crc32_of(Path(prefix + suffix)) for suffix in SUFFIXES}}
    Path(f"{prefix}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_prefix(prefix: str, tokenizer: Tokenizer) -> Row | None:
    """Check that ``prefix`` is a complete corpus of ``tokenizer``'s ids; returns its note, if any.

    With a note, the vocabulary's fingerprint must match. Without one (another tool wrote the corpus) ids must lie below
    ``vocab_size``: all are checked up to 2**28, evenly spaced windows of that many beyond. ``TokenReader`` checks every
    id as it is read.

    Raises:
        UserError: a missing, damaged or truncated file, or another vocabulary.
    """
    index = read_index(prefix)
    note = read_note(prefix)
    if note is None:
        check_ids(prefix, index, tokenizer.vocab_size, _MAX_WINDOWS)
        return None
    if note.get("tokens") != index.tokens or note.get("documents") != index.documents:
        raise UserError(
            f"{prefix}.json tells of {note.get('documents')} documents and {note.get('tokens')} tokens, but "
            f"{prefix}.idx of {index.documents} and {index.tokens}; they are not of one corpus: prepare it again"
        )
    if note.get("fingerprint") != tokenizer.fingerprint:
        raise UserError(
            f"{prefix} was written with another vocabulary: {note.get('tokenizer')} of {note.get('vocab_size')} ids "
            f"({note.get('fingerprint')}), but the run's is {tokenizer.type_name} of {tokenizer.vocab_size} "
            f"({tokenizer.fingerprint}); give that vocabulary's files or prepare the text again"
        )
    return note


@dataclass(frozen=True)
class Index:
    """Properties of ``PREFIX.bin`` according to ``PREFIX.idx``; ``has_modes`` is whether its parts have modes."""

    dtype: type[np.integer]
    parts: int
    documents: int
    tokens: int
    has_modes: bool


def read_index(prefix: str) -> Index:
    """Read ``PREFIX.idx`` and check all of it, and that both files are complete: Megatron-core checks nothing.

    Raises:
        UserError: a missing file, an invalid index, or inconsistent sizes.
    """
    for suffix in SUFFIXES:
        if not os.path.isfile(prefix + suffix):
            stem, extension = os.path.splitext(prefix)
            hint = f"name only the prefix: {stem}" if extension in SUFFIXES else "prepare the text first"
            raise UserError(f"data {prefix}: no file {prefix}{suffix}; {hint} (megatron-lowprec preprocess)")
    with open(f"{prefix}.idx", "rb") as file:
        head = file.read(_INDEX_HEADER.size)
    if len(head) < _INDEX_HEADER.size or not head.startswith(_INDEX_MAGIC):
        raise UserError(f"{prefix}.idx is not an index in Megatron's format; prepare the corpus again")
    _, version, code, parts, boundaries = _INDEX_HEADER.unpack(head)
    if version != 1 or code not in _INDEX_DTYPES:
        raise UserError(f"{prefix}.idx has version {version} and type code {code}, unknown here; prepare it again")
    # An int32 length and an int64 offset for each part, an int64 for each boundary, and in some an int8 for each part.
    expected = _INDEX_HEADER.size + 12 * parts + 8 * boundaries
    found = os.path.getsize(f"{prefix}.idx")
    if found < expected:
        raise UserError(f"{prefix}.idx is truncated: {found} bytes of {expected}; copy or prepare it again")
    if found not in (expected, expected + parts):
        raise UserError(f"{prefix}.idx is too long: {found} bytes of {expected}; copy or prepare it again")
    dtype = _INDEX_DTYPES[code]
    fault, expected = _faults(prefix, parts, boundaries, np.dtype(dtype).itemsize)
    if fault is not None:
        raise UserError(f"{prefix}.idx is damaged: {fault}; copy or prepare the corpus again")
    has_modes, tokens = found > _INDEX_HEADER.size + 12 * parts + 8 * boundaries, expected // np.dtype(dtype).itemsize
    found = os.path.getsize(f"{prefix}.bin")
    if found != expected:
        state = "truncated" if found < expected else "too long"
        raise UserError(
            f"{prefix}.bin is {state}: {found} bytes, but {prefix}.idx describes {expected}; copy or prepare both again"
        )
    return Index(dtype, parts, boundaries - 1, tokens, has_modes)


def _faults(prefix: str, parts: int, boundaries: int, item: int) -> tuple[str | None, int]:
    """The first fault of ``PREFIX.idx``, or None, and the bytes that its parts have together.

    Parts follow each other without gaps: an offset is the sum of the lengths before it, as Megatron-core writes them.
    """

    def windows(dtype: type[np.integer], begin: int, count: int) -> Iterator[tuple[int, npt.NDArray[np.integer]]]:
        for at in range(0, count, _WINDOW):
            offset = begin + at * np.dtype(dtype).itemsize
            yield at, np.fromfile(f"{prefix}.idx", dtype, min(_WINDOW, count - at), offset=offset)

    begins, size = _INDEX_HEADER.size, 0
    both = zip(windows(np.int32, begins, parts), windows(np.int64, begins + 4 * parts, parts), strict=True)
    for (at, lengths), (_, offsets) in both:
        if (wrong := np.flatnonzero(lengths < 0)).size:
            return f"its part {at + wrong[0]} has length {lengths[wrong[0]]}", size
        ends = size + np.cumsum(lengths, dtype=np.int64) * item
        expected = ends - lengths.astype(np.int64) * item
        if (wrong := np.flatnonzero(offsets != expected)).size:
            return f"its part {at + wrong[0]} begins at byte {offsets[wrong[0]]}, not {expected[wrong[0]]}", size
        size = int(ends[-1])
    before = 0
    for at, bounds in windows(np.int64, begins + 12 * parts, boundaries):
        steps = np.diff(bounds, prepend=before)
        if (wrong := np.flatnonzero((steps < 0) | (bounds > parts))).size:
            return f"its document {at + wrong[0]} begins at part {bounds[wrong[0]]} of {parts}", size
        if at == 0 and bounds[0] != 0:
            return f"its first document begins at part {bounds[0]}", size
        before = int(bounds[-1])
    if not boundaries or before != parts:
        return f"its documents end at part {before} of {parts}", size
    return None, size


class TokenReader:
    """Reads ids from ``PREFIX.bin``, each checked, in place of Megatron-core's memory map of the file.

    A process that reads a map of a file truncated meanwhile is killed by SIGBUS, and ids outside of the vocabulary
    reach the model.

    Args:
        vocab_size: ids must lie below it; None for any.
    """

    def __init__(self, prefix: str, vocab_size: int | None) -> None:
        self._path, self._vocab_size = f"{prefix}.bin", vocab_size
        self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115 - open as long as the reader

    def read(self, dtype: type[np.integer], count: int, offset: int) -> npt.NDArray[np.integer]:
        """``count`` ids from byte ``offset`` on; UserError if the file has fewer, or an id is outside."""
        item = np.dtype(dtype).itemsize
        content = os.pread(self._file.fileno(), int(count) * item, int(offset))
        if len(content) != count * item:
            raise UserError(
                f"{self._path} was truncated: {offset + len(content)} bytes of at least {offset + count * item}; copy "
                "or prepare the corpus again"
            )
        ids: npt.NDArray[np.integer] = np.frombuffer(content, dtype)
        if self._vocab_size is not None and count:
            for found in (int(ids.min()), int(ids.max())):
                if not 0 <= found < self._vocab_size:
                    raise UserError(
                        f"{self._path} holds id {found}, but the vocabulary has {self._vocab_size} ids; give the "
                        "vocabulary that it was written with, or copy or prepare the corpus again"
                    )
        return ids


def tokens_of(
    prefix: str, vocab_size: int, share: tuple[float, float] = (0.0, 1.0), most: int | None = None
) -> npt.NDArray[np.integer]:
    """Concatenated ids of the documents in ``share`` of a corpus, at most ``most``.

    ``share`` divides the documents as --split does.

    Raises:
        UserError: as :func:`read_index` and ``TokenReader``, or no token in that share.
    """
    index = read_index(prefix)
    lengths: npt.NDArray[np.int32] = np.fromfile(f"{prefix}.idx", np.int32, index.parts, offset=_INDEX_HEADER.size)
    first, last = (round(len(lengths) * end) for end in share)
    begin, end = (int(lengths[:cut].sum(dtype=np.int64)) for cut in (first, last))
    if begin == end:
        raise UserError(f"{prefix}: no token in its documents {first} to {last}; choose another --split")
    count = end - begin if most is None else min(end - begin, most)
    reader = TokenReader(prefix, vocab_size)
    return np.concatenate([*_windows(reader, index, begin, begin + count)])


def unigram_entropy(prefix: str) -> float:
    """Entropy of a corpus's token frequencies, in nats a token: the lowest loss of a model that ignores the context.

    Raises:
        UserError: as :func:`read_index` and ``TokenReader``.
    """
    index = read_index(prefix)
    counts = np.zeros(0, np.int64)
    for window in _windows(TokenReader(prefix, _MOST_IDS), index, 0, index.tokens):
        added = np.bincount(window, minlength=len(counts))
        added[: len(counts)] += counts
        counts = added
    counts = counts[counts > 0]
    return float(math.log(index.tokens) - (counts * np.log(counts)).sum() / index.tokens)


def verify(prefix: str, vocab_size: int | None = None) -> str:
    """Read all of a corpus and check its index, its ids and the checksums of its note; what was found, in a line.

    Ids must lie below ``vocab_size``, by default that of the note.

    Raises:
        UserError: as ``read_index`` and ``TokenReader``, or other bytes than the note's.
    """
    index, note = read_index(prefix), read_note(prefix) or {}
    known = note.get("vocab_size")
    vocab_size = vocab_size if vocab_size is not None or type(known) is not int else known
    crc = 0
    for window in _windows(TokenReader(prefix, vocab_size), index, 0, index.tokens):
        crc = zlib.crc32(window.data, crc)
    expected = note.get("crc32")
    compared = "no checksums in its note" if expected is None else "the bytes that were written"
    if expected not in (None, found := {".bin": f"{crc:08x}", ".idx": crc32_of(Path(f"{prefix}.idx"))}):
        raise UserError(f"{prefix}: checksums are {found}, and were {expected}; copy or prepare the corpus again")
    ids = "ids not compared, for lack of a vocabulary's size" if vocab_size is None else f"ids below {vocab_size:,}"
    return f"{prefix}: {index.documents:,} documents, {index.tokens:,} tokens, {ids}, {compared}"


def verify_once(prefix: str, vocab_size: int, cache: Path, report: Callable[[str], None] = print) -> None:
    """``verify`` unless ``cache``, a folder, records that it passed for files of these sizes and times."""
    record, place = cache / "verified.json", os.path.realpath(prefix)
    stats = [os.stat(prefix + suffix) for suffix in SUFFIXES]
    state = [vocab_size, *(number for stat in stats for number in (stat.st_size, stat.st_mtime_ns))]
    try:
        os.makedirs(cache, exist_ok=True)
        with lock(f"{record}.lock"):
            known: Row = {}
            with suppress(FileNotFoundError, UserError):  # a damaged record: verified anew
                known = read_json(record, "")
            if known.get(place) != state:
                report(verify(prefix, vocab_size))
                atomic_write(record, json.dumps(known | {place: state}, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--verify-data: {error}; name another --data-cache-path") from None


def _windows(
    reader: TokenReader, index: Index, begin: int, end: int, limit: int | None = None
) -> Iterator[npt.NDArray[np.integer]]:
    """Ids [begin, end) in windows; with ``limit`` at most that many, evenly spaced."""
    starts: Sequence[int] = range(begin, end, _WINDOW)
    if limit is not None and len(starts) > limit:
        starts = [starts[int(at)] for at in np.linspace(0, len(starts) - 1, limit).astype(int)]
    for start in starts:
        yield reader.read(index.dtype, min(_WINDOW, end - start), start * np.dtype(index.dtype).itemsize)


def check_ids(prefix: str, index: Index, vocab_size: int, limit: int | None = None) -> None:
    """Read the ids, or ``limit`` windows of them, and check that they lie below ``vocab_size``; UserError if not."""
    for _ in _windows(TokenReader(prefix, vocab_size), index, 0, index.tokens, limit):
        pass


def read_note(prefix: str) -> Row | None:
    """Content of ``PREFIX.json``; None without the file, UserError for a damaged one."""
    with suppress(FileNotFoundError):
        return read_json(Path(f"{prefix}.json"), "remove it to have the ids checked instead, or prepare it again")
    return None
