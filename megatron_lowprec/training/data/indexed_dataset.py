"""Tokenized corpora in Megatron's indexed format, checked before every use.

A corpus is a prefix with three files: ``PREFIX.bin`` (token ids) and ``PREFIX.idx`` (document lengths), both as
``megatron.core.datasets.indexed_dataset`` defines them, and ``PREFIX.json``, this project's note of the ids'
vocabulary. ``corpus_writer`` publishes the note last: a corpus with a note is complete.
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.data.tokenizer import Tokenizer

_WINDOW = 2**22  # ids read at once
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
    """Write ``PREFIX.json``, the last file of a corpus."""
    Path(f"{prefix}.json").write_text(json.dumps(asdict(note), indent=2) + "\n", encoding="utf-8")


def check_prefix(prefix: str, tokenizer: Tokenizer) -> None:
    """Check that ``prefix`` is a complete corpus of ``tokenizer``'s ids.

    With a note, the vocabulary's fingerprint must match. Without one (another tool wrote the corpus) ids must lie below
    ``vocab_size``: all are checked up to 2**28, evenly spaced windows of that many beyond.

    Raises:
        UserError: a missing, damaged or truncated file, or another vocabulary.
    """
    index = read_index(prefix)
    note = _read_note(prefix)
    if note is None:
        _check_ids(prefix, index, tokenizer)
        return
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


@dataclass(frozen=True)
class Index:
    """Properties of ``PREFIX.bin`` according to ``PREFIX.idx``."""

    dtype: type[np.integer]
    documents: int
    tokens: int


def read_index(prefix: str) -> Index:
    """Read ``PREFIX.idx`` and check that it and ``PREFIX.bin`` are complete.

    Raises:
        UserError: a missing file, an invalid index, or inconsistent sizes.
    """
    for suffix in (".bin", ".idx"):
        if not os.path.isfile(prefix + suffix):
            stem, extension = os.path.splitext(prefix)
            hint = f"name the prefix alone: {stem}" if extension in (".bin", ".idx") else "prepare the text first"
            raise UserError(f"data {prefix}: no file {prefix}{suffix}; {hint} (tools/preprocess_data.py)")
    with open(f"{prefix}.idx", "rb") as file:
        head = file.read(_INDEX_HEADER.size)
    if len(head) < _INDEX_HEADER.size or not head.startswith(_INDEX_MAGIC):
        raise UserError(f"{prefix}.idx is not an index in Megatron's format; prepare the corpus again")
    _, version, code, parts, boundaries = _INDEX_HEADER.unpack(head)
    if version != 1 or code not in _INDEX_DTYPES:
        raise UserError(f"{prefix}.idx has version {version} and type code {code}, unknown here; prepare it again")
    # An int32 length and an int64 offset for each part, an int64 for each boundary.
    expected = _INDEX_HEADER.size + 12 * parts + 8 * boundaries
    found = os.path.getsize(f"{prefix}.idx")
    if found < expected:
        raise UserError(f"{prefix}.idx is truncated: {found} bytes of {expected}; copy or prepare it again")
    dtype = _INDEX_DTYPES[code]
    lengths: npt.NDArray[np.int32] = np.fromfile(f"{prefix}.idx", np.int32, parts, offset=_INDEX_HEADER.size)
    tokens = int(lengths.sum(dtype=np.int64))
    expected = tokens * np.dtype(dtype).itemsize
    found = os.path.getsize(f"{prefix}.bin")
    if found != expected:
        state = "truncated" if found < expected else "too long"
        raise UserError(
            f"{prefix}.bin is {state}: {found} bytes, but {prefix}.idx describes {expected}; copy or prepare both again"
        )
    return Index(dtype, boundaries - 1, tokens)


def tokens_of(prefix: str, share: tuple[float, float] = (0.0, 1.0)) -> npt.NDArray[np.integer]:
    """Concatenated ids of the documents in ``share`` of a corpus, memory-mapped.

    ``share`` divides the documents as --split does.

    Raises:
        UserError: as :func:`read_index`, or no token in that share.
    """
    index = read_index(prefix)
    with open(f"{prefix}.idx", "rb") as file:
        parts = _INDEX_HEADER.unpack(file.read(_INDEX_HEADER.size))[3]
    lengths: npt.NDArray[np.int32] = np.fromfile(f"{prefix}.idx", np.int32, parts, offset=_INDEX_HEADER.size)
    first, last = (round(len(lengths) * end) for end in share)
    begin, end = (int(lengths[:cut].sum(dtype=np.int64)) for cut in (first, last))
    if begin == end:
        raise UserError(f"{prefix}: no token in its documents {first} to {last}; choose another --split")
    return np.memmap(f"{prefix}.bin", index.dtype, "r")[begin:end]


def unigram_entropy(prefix: str) -> float:
    """Entropy of a corpus's token frequencies, in nats a token: the lowest loss of a model that ignores the context.

    Raises:
        UserError: as :func:`read_index`.
    """
    index = read_index(prefix)
    counts = np.zeros(0, np.int64)
    for window in _windows(prefix, index):
        added = np.bincount(window, minlength=len(counts))
        added[: len(counts)] += counts
        counts = added
    counts = counts[counts > 0]
    return float(math.log(index.tokens) - (counts * np.log(counts)).sum() / index.tokens)


def _windows(prefix: str, index: Index, limit: int | None = None) -> Iterator[npt.NDArray[np.integer]]:
    """The ids in windows; with ``limit`` at most that many, evenly spaced."""
    if not index.tokens:
        return
    ids = np.memmap(f"{prefix}.bin", index.dtype, "r")
    starts = np.arange(0, index.tokens, _WINDOW)
    if limit is not None and len(starts) > limit:
        starts = starts[np.linspace(0, len(starts) - 1, limit).astype(int)]
    for start in starts:
        yield ids[start : start + _WINDOW]


def _check_ids(prefix: str, index: Index, tokenizer: Tokenizer) -> None:
    highest = max((int(window.max()) for window in _windows(prefix, index, _MAX_WINDOWS)), default=0)
    if highest >= tokenizer.vocab_size:
        raise UserError(
            f"{prefix}.bin holds id {highest}, but the {tokenizer.type_name} has {tokenizer.vocab_size} ids; "
            "give the vocabulary that it was written with"
        )


def _read_note(prefix: str) -> dict[str, object] | None:
    try:
        note = json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        note = None
    if not isinstance(note, dict):
        raise UserError(f"{prefix}.json is damaged; remove it to have the ids checked instead, or prepare it again")
    return note
