"""Tokenized corpora in Megatron's indexed format: written once from text, checked before every use.

A corpus is a prefix with three files: ``PREFIX.bin`` (token ids) and ``PREFIX.idx`` (document lengths), both as
``megatron.core.datasets.indexed_dataset`` defines them, and ``PREFIX.json``, our note of the vocabulary that the ids
belong to. The note is put in place last, so whoever sees it sees a whole corpus.
"""

import fcntl
import hashlib
import json
import math
import os
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_lowprec.errors import UserError
from megatron_lowprec.training import jsonl
from megatron_lowprec.training.encoding import Encoder, encode
from megatron_lowprec.training.tokenizer import Tokenizer

# Below this many (compressed) bytes, starting worker processes costs more than they save.
_PARALLEL_BYTES = 16 * 2**20

_WINDOW = 2**22  # ids looked at in one go
_MAX_WINDOWS = 64  # of a corpus without a note: all ids of a common one, evenly spread windows of a huge one

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
    """What ``PREFIX.json`` holds. ``empty`` counts documents without a token, which were left out."""

    tokenizer: str
    vocab_size: int
    fingerprint: str
    documents: int
    tokens: int
    empty: int
    json_key: str
    append_eod: bool
    source: tuple[str, ...]


@dataclass(frozen=True)
class Progress:
    """How far :func:`write` has come: (compressed) bytes read of all inputs; documents and tokens under all keys."""

    bytes_read: int
    bytes_total: int
    documents: int
    tokens: int


def prepare(
    path: str,
    tokenizer: Tokenizer,
    cache_dir: str,
    *,
    workers: int,
    json_key: str = "text",
    append_eod: bool = True,
    report: Callable[[str], None] = print,
) -> str:
    """The checked prefix that a ``--data-path`` entry stands for.

    Text (``*.jsonl``, also ``.gz``, ``.xz``, ``.zst``) is tokenized into ``cache_dir`` by up to ``workers`` processes,
    unless that was done before for the same file (path, size, time of change), vocabulary, key and ``append_eod``. Any
    number of processes may ask at once: one writes, the others wait. Anything else is taken for a prefix.

    Raises:
        UserError: whatever :func:`write` and :func:`check_prefix` find, or a folder that cannot be written.
    """
    if not jsonl.is_text_file(path):
        check_prefix(path, tokenizer)
        return path

    def written(prefix: str, count: int) -> Note:
        (note,) = write([path], {json_key: prefix}, tokenizer, workers=count, append_eod=append_eod)
        return note

    return cached(path, tokenizer, cache_dir, (json_key, append_eod), written, workers=workers, report=report)


def cached(
    path: str,
    tokenizer: Tokenizer,
    cache_dir: str,
    how: Sequence[object],
    written: Callable[[str, int], Note],
    *,
    workers: int,
    report: Callable[[str], None] = print,
) -> str:
    """The checked prefix in ``cache_dir`` that a text file is tokenized to, unless that was done before.

    Args:
        how: what the ids depend on beside file and vocabulary; plain values.
        written: writes a prefix with so many processes.
    """
    _require_files([path])
    stat = os.stat(path)
    identity = json.dumps([os.path.realpath(path), stat.st_size, stat.st_mtime_ns, *how])
    stem = Path(path).name.partition(".jsonl")[0]
    prefix = str(Path(cache_dir) / f"{stem}-{tokenizer.fingerprint}-{_digest(identity)}")
    try:
        os.makedirs(cache_dir, exist_ok=True)
        with lock(f"{prefix}.lock"):
            if not os.path.exists(f"{prefix}.json"):
                report(f"tokenizing {path} into {prefix}.bin")
                note = written(prefix, workers if stat.st_size >= _PARALLEL_BYTES else 1)
                report(f"tokenized {path}: {note.documents} documents, {note.tokens} tokens, {note.empty} empty")
    except OSError as error:
        raise UserError(f"cannot prepare {path} in {cache_dir}: {error}; name another --data-cache-path") from None
    check_prefix(prefix, tokenizer)
    return prefix


def write(
    sources: Sequence[str],
    prefixes: Mapping[str, str],
    tokenizer: Tokenizer,
    *,
    workers: int = 1,
    append_eod: bool = True,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[Note, ...]:
    """Tokenize JSON-lines files into one corpus for each entry of ``prefixes`` (JSON key -> prefix).

    Documents keep their order. Ids are uint16 where the vocabulary fits (below 65500), else int32. With ``workers`` of
    1 all happens in this process; with more, that many are started (by spawn: the caller's main module must be
    importable). The written bytes do not depend on ``workers``. Nothing appears under a prefix before all is written.

    Raises:
        UserError: an input that cannot be used (file and line are named), a key without any token, or a dead worker.
        OSError: an output folder that cannot be written.
    """
    _require_files(sources)
    return write_batches(
        jsonl.batches(sources),
        prefixes,
        tokenizer,
        sources=sources,
        bytes_total=sum(map(os.path.getsize, sources)),
        workers=workers,
        append_eod=append_eod,
        progress=progress,
    )


def write_batches(
    batches: Iterable[jsonl.Batch],
    prefixes: Mapping[str, str],
    tokenizer: Tokenizer,
    *,
    sources: Sequence[str],
    bytes_total: int = 0,
    workers: int = 1,
    append_eod: bool = True,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[Note, ...]:
    """As :func:`write`, from lines that are not in files: ``sources`` says where they are from."""
    with warnings.catch_warnings():
        # Said at import about optimizers, which nothing here uses.
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    encoder = Encoder(tokenizer, tuple(prefixes), append_eod, dtype)
    documents, tokens, empty = (np.zeros(len(prefixes), np.int64) for _ in range(3))
    with staged(list(prefixes.values())) as places:
        builders = [IndexedDatasetBuilder(f"{place}.bin", dtype=dtype) for place in places]
        for batch in encode(encoder, batches, workers):
            for builder, ids, lengths in zip(builders, batch.ids, batch.lengths, strict=True):
                for document in np.split(ids, np.cumsum(lengths)[:-1]) if lengths else ():
                    builder.add_document(document, [len(document)])
            documents += [len(lengths) for lengths in batch.lengths]
            tokens += [len(ids) for ids in batch.ids]
            empty += batch.empty
            if progress is not None:
                progress(Progress(batch.bytes_read, bytes_total, int(documents.sum()), int(tokens.sum())))
        notes = []
        for column, (key, place) in enumerate(zip(prefixes, places, strict=True)):
            if not tokens[column]:
                raise UserError(f"{', '.join(sources)}: no text under {key!r} in any line; nothing was written")
            builders[column].finalize(f"{place}.idx")
            note = Note(
                tokenizer=tokenizer.type_name,
                vocab_size=tokenizer.vocab_size,
                fingerprint=tokenizer.fingerprint,
                documents=int(documents[column]),
                tokens=int(tokens[column]),
                empty=int(empty[column]),
                json_key=key,
                append_eod=append_eod,
                source=tuple(sources),
            )
            write_note(place, note)
            notes.append(note)
    return tuple(notes)


def write_note(prefix: str, note: Note) -> None:
    """``PREFIX.json``: the last file of a corpus."""
    Path(f"{prefix}.json").write_text(json.dumps(asdict(note), indent=2) + "\n", encoding="utf-8")


def check_prefix(prefix: str, tokenizer: Tokenizer) -> None:
    """Make sure that ``prefix`` is a whole corpus whose ids ``tokenizer`` can mean.

    With a note its fingerprint decides. Without one (another tool wrote the corpus) the ids must lie below
    ``vocab_size``: all are looked at up to 2**28, evenly spread windows of that many beyond.

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
    """What ``PREFIX.idx`` says of ``PREFIX.bin``."""

    dtype: type[np.integer]
    documents: int
    tokens: int


def read_index(prefix: str) -> Index:
    """Read ``PREFIX.idx`` and make sure that it and ``PREFIX.bin`` are whole.

    Raises:
        UserError: a missing file, one that is no index, or sizes that do not agree.
    """
    for suffix in (".bin", ".idx"):
        if not os.path.isfile(prefix + suffix):
            stem, extension = os.path.splitext(prefix)
            hint = f"name the prefix alone: {stem}" if extension in (".bin", ".idx") else "prepare the text first"
            raise UserError(f"--data-path {prefix}: no file {prefix}{suffix}; {hint} (tools/preprocess_data.py)")
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
    """The ids of the documents in ``share`` of a corpus, one after the other, mapped from the file.

    ``share`` cuts the documents as --split does.

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
    """The ids in pieces; with ``limit`` at most that many pieces, evenly spread."""
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


def _require_files(paths: Sequence[str]) -> None:
    for path in paths:
        if not os.path.isfile(path):
            raise UserError(f"{path}: no such file; check the path (relative ones start at the current folder)")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@contextmanager
def staged(prefixes: Sequence[str]) -> Iterator[list[str]]:
    """Places to write, one a prefix, on the same file system; moved to the prefixes at the end, unless it raised."""
    folders = []
    try:
        for prefix in prefixes:
            parent = Path(prefix).parent
            parent.mkdir(parents=True, exist_ok=True)
            folders.append(tempfile.TemporaryDirectory(dir=parent, prefix=f".{Path(prefix).name}."))
        places = [f"{folder.name}/corpus" for folder in folders]
        yield places
        for place, prefix in zip(places, prefixes, strict=True):
            # An old note must not stand beside new ids, not for a moment.
            Path(f"{prefix}.json").unlink(missing_ok=True)
            for suffix in (".bin", ".idx", ".json"):
                os.replace(place + suffix, prefix + suffix)
    finally:
        for folder in folders:
            folder.cleanup()


@contextmanager
def lock(path: str) -> Iterator[None]:
    """Only one process at a time; freed by the system if it dies.

    It only saves work: where a file system has no locks all processes write, each the same bytes, each by renaming.
    """
    with open(path, "w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
