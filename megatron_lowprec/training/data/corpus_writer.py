"""Tokenizes text to a corpus once, and publishes it only when complete."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.data import indexed_dataset, jsonl
from megatron_lowprec.training.data.encoding import Encoder, encode
from megatron_lowprec.training.data.tokenizer import Tokenizer
from megatron_lowprec.training.distributed.file_lock import lock

# Below this many (compressed) bytes, starting worker processes costs more time than it saves.
_PARALLEL_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Progress:
    """Progress of :func:`write`: (compressed) bytes read of all inputs; documents and tokens under all keys."""

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
    """The checked prefix of a ``--data-path`` entry.

    Text (``*.jsonl``, also ``.gz``, ``.xz``, ``.zst``) is tokenized into ``cache_dir`` by up to ``workers`` processes,
    unless cached for the same file (path, size, modification time), vocabulary, key and ``append_eod``. Concurrent
    calls are safe: one process writes, the others wait. Any other entry is a prefix.

    Raises:
        UserError: as :func:`write` and :func:`corpus.check_prefix`, or a folder that cannot be written.
    """
    if not jsonl.is_text_file(path):
        indexed_dataset.check_prefix(path, tokenizer)
        return path

    def written(prefix: str, count: int) -> indexed_dataset.Note:
        (note,) = write([path], {json_key: prefix}, tokenizer, workers=count, append_eod=append_eod)
        return note

    return cached(path, tokenizer, cache_dir, (json_key, append_eod), written, workers=workers, report=report)


def cached(
    path: str,
    tokenizer: Tokenizer,
    cache_dir: str,
    how: Sequence[object],
    written: Callable[[str, int], indexed_dataset.Note],
    *,
    workers: int,
    report: Callable[[str], None] = print,
) -> str:
    """The checked prefix in ``cache_dir`` of a tokenized text file; tokenizes it unless cached.

    Args:
        how: plain values that determine the ids besides file and vocabulary.
        written: writes a prefix with the given number of processes.
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
    indexed_dataset.check_prefix(prefix, tokenizer)
    return prefix


def write(
    sources: Sequence[str],
    prefixes: Mapping[str, str],
    tokenizer: Tokenizer,
    *,
    workers: int = 1,
    append_eod: bool = True,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[indexed_dataset.Note, ...]:
    """Tokenize JSON-lines files into one corpus for each entry of ``prefixes`` (JSON key -> prefix).

    Documents keep their order. Ids are uint16 if the vocabulary fits (below 65500), else int32. With ``workers`` of 1
    all work runs in this process; with more, that many processes are spawned (the caller's main module must be
    importable). The written bytes do not depend on ``workers``. A prefix appears only after all files are written.

    Raises:
        UserError: an unusable input (file and line are named), a key without any token, or a dead worker.
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
) -> tuple[indexed_dataset.Note, ...]:
    """As :func:`write`, from lines that are not in files; ``sources`` names their origin."""
    import megatron_lowprec.mcore  # noqa: F401, I001 - first: it filters warnings about optimizers, not used here
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
            note = indexed_dataset.Note(
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
            indexed_dataset.write_note(place, note)
            notes.append(note)
    return tuple(notes)


@contextmanager
def staged(prefixes: Sequence[str]) -> Iterator[list[str]]:
    """Temporary prefixes on the same file system, one per prefix; renamed to the prefixes on success."""
    folders = []
    try:
        for prefix in prefixes:
            parent = Path(prefix).parent
            parent.mkdir(parents=True, exist_ok=True)
            folders.append(tempfile.TemporaryDirectory(dir=parent, prefix=f".{Path(prefix).name}."))
        places = [f"{folder.name}/corpus" for folder in folders]
        yield places
        for place, prefix in zip(places, prefixes, strict=True):
            # An old note must never exist beside new ids.
            Path(f"{prefix}.json").unlink(missing_ok=True)
            for suffix in (".bin", ".idx", ".json"):
                os.replace(place + suffix, prefix + suffix)
    finally:
        for folder in folders:
            folder.cleanup()


def _require_files(paths: Sequence[str]) -> None:
    for path in paths:
        if not os.path.isfile(path):
            raise UserError(f"{path}: no such file; check the path (relative ones start at the current folder)")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
