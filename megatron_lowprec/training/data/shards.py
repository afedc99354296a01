"""A large corpus as shards: tokenized, with duplicate titles removed, resumable.

PREFIX has, for each shard, ``PREFIX-00000_text_document.{bin,idx,json}``, and at the end ``PREFIX.manifest.json`` with
counts and checksums. Until then ``PREFIX.partial.json`` records complete shards and the source's position, and
``PREFIX.titles`` the titles seen (8 bytes each). Both are written after each shard: after any interruption the same
call resumes after the last complete shard, and its bytes are those of an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lowprec.errors import UserError
from megatron_lowprec.files import Row, atomic_write, read_json
from megatron_lowprec.training.data import jsonl
from megatron_lowprec.training.data.corpus_writer import Progress, write_batches
from megatron_lowprec.training.data.tokenizer import Tokenizer
from megatron_lowprec.training.data.wikipedia import Article, Source
from megatron_lowprec.training.distributed.file_lock import lock

_KEY = "text"
_BATCH_BYTES = 512 * 1024
_REMEDY = "remove it to begin again"
_OLDER = {"title_key": "title", "text_key": "text"}  # settings that files of older versions lack
_COUNTS = ("documents", "tokens", "empty", "duplicates")


@dataclass(frozen=True)
class Shard:
    """One shard of the preparation; ``sha256`` of its .bin and .idx."""

    prefix: str
    documents: int
    tokens: int
    empty: int
    duplicates: int
    sha256: Mapping[str, str]


@dataclass(frozen=True)
class Settings:
    """Settings that determine the bytes of a preparation."""

    source: str
    source_size: int
    tokenizer: str
    fingerprint: str
    shard_documents: int
    append_eod: bool
    title_key: str
    text_key: str


def prepare(
    source: Source,
    prefix: str,
    tokenizer: Tokenizer,
    *,
    shard_documents: int,
    title_key: str = "title",
    text_key: str = "text",
    append_eod: bool = True,
    workers: int = 1,
    progress: Callable[[Progress], None] | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write all missing shards and the manifest; returns the manifest.

    Args:
        shard_documents: articles per shard; the last one may have fewer. Without any text in them there is no shard.
        title_key, text_key: the keys that the source reads, which another call with this prefix must have too.
        workers: processes that tokenize.
        progress: called with the progress of all shards, including earlier calls'.
        report: called with messages about the results of earlier calls.

    Raises:
        UserError: as the source, or for files of another preparation under ``prefix``.
        OSError: a folder that cannot be written.
    """
    settings = Settings(
        source.name,
        source.total,
        tokenizer.type_name,
        tokenizer.fingerprint,
        shard_documents,
        append_eod,
        title_key,
        text_key,
    )
    manifest = Path(f"{prefix}.manifest.json")

    def finished() -> dict[str, Any] | None:
        if not manifest.exists():
            return None
        found = _read(manifest, settings)
        report(f"{manifest} is there already: {found['documents']} documents, {found['tokens']} tokens")
        return found

    if found := finished():
        return found
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    with lock(f"{prefix}.lock"):  # another process with the same prefix waits
        if found := finished():
            return found
        for leftover in Path(prefix).parent.glob(f".{Path(prefix).name}-*_{_KEY}_document.*"):
            shutil.rmtree(leftover)  # an unfinished shard of a killed process
        work = _Work(prefix, settings)
        if work.shards:
            report(f"going on after {len(work.shards)} whole shards, {work.count('documents')} documents")
        dropped = _write_shards(source, prefix, tokenizer, work, shard_documents, append_eod, workers, progress)
        return work.finish(*dropped)


def _write_shards(
    source: Source,
    prefix: str,
    tokenizer: Tokenizer,
    work: _Work,
    shard_documents: int,
    append_eod: bool,
    workers: int,
    progress: Callable[[Progress], None] | None,
) -> tuple[int, int]:
    """Write all missing shards; returns the numbers of empty articles and of duplicate titles after the last one."""
    articles = source.articles(work.state)
    empty = duplicates = 0  # since the last shard
    while True:
        unseen = _Unseen(articles, work.titles, shard_documents, source.name, tokenizer)
        batches, leading = iter(unseen), list[jsonl.Batch]()
        while not unseen.has_text and (batch := next(batches, None)) is not None:
            leading.append(batch)
        if not unseen.has_text:  # a corpus without tokens cannot be written
            empty, duplicates = empty + unseen.count, duplicates + unseen.duplicates
            if not unseen.count:
                return empty, duplicates
            continue
        place = f"{prefix}-{len(work.shards):05d}_{_KEY}_document"
        (note,) = write_batches(
            chain(leading, batches),
            {_KEY: place},
            tokenizer,
            sources=[source.name],
            workers=workers,
            append_eod=append_eod,
            progress=_on_top(progress, work, source.total),
        )
        sums = {suffix: _sha256(place + suffix) for suffix in (".bin", ".idx")}
        counts = (note.documents, note.tokens, note.empty + empty, unseen.duplicates + duplicates)
        work.add(Shard(place, *counts, sums), source.state())
        empty = duplicates = 0


def verify(manifest: Path) -> list[str]:
    """Mismatches between a manifest and its shards; empty if there are none."""
    faults = []
    for shard in _load(manifest)["shards"]:
        for suffix, checksum in shard["sha256"].items():
            path = _beside(manifest, shard["prefix"]) + suffix
            if not os.path.isfile(path):
                faults.append(f"{path}: missing")
            elif _sha256(path) != checksum:
                faults.append(f"{path}: other bytes than the manifest's")
    return faults


class _Unseen:
    """The next articles of a source with unseen titles, up to a limit, as batches of JSON lines.

    ``count`` of them were read so far, and ``has_text`` says whether any has tokens.
    """

    def __init__(
        self, articles: Iterator[Article], titles: _Titles, limit: int, source: str, tokenizer: Tokenizer
    ) -> None:
        self._articles, self._titles, self._limit, self._source = articles, titles, limit, source
        self._tokenizer = tokenizer
        self.count = self.duplicates = 0
        self.has_text = False
        self._lines_before = 0

    def __iter__(self) -> Iterator[jsonl.Batch]:
        lines: list[bytes] = []
        size = done = 0
        while self.count < self._limit:
            article = next(self._articles, None)
            if article is None:
                break
            if not self._titles.add(article.title):
                self.duplicates += 1
                continue
            self.count += 1
            self.has_text = self.has_text or bool(self._tokenizer.tokenize(article.text))
            lines.append(json.dumps({_KEY: article.text}).encode())
            size, done = size + len(lines[-1]), article.done
            if size >= _BATCH_BYTES:
                yield self._batch(lines, done)
                lines, size = [], 0
        if lines:
            yield self._batch(lines, done)

    def _batch(self, lines: list[bytes], done: int) -> jsonl.Batch:
        batch = jsonl.Batch(self._source, self._lines_before + 1, tuple(lines), done)
        self._lines_before += len(lines)
        return batch


class _Titles:
    """Titles seen, as 8 bytes each, and a file to which they are appended when a shard is complete."""

    def __init__(self, path: Path, kept: int) -> None:
        self._path, self.kept = path, kept
        found = np.fromfile(path, np.uint64, kept) if kept and path.exists() else np.zeros(0, np.uint64)
        if len(found) != kept:
            raise UserError(f"{path} has {len(found)} titles of {kept}; begin under another --output-prefix")
        self._seen: set[int] = set(found.tolist())
        self._new: list[int] = []

    def add(self, title: str) -> bool:
        """Add a title; returns whether it is new, ignoring surrounding space."""
        key = int.from_bytes(hashlib.blake2b(title.strip().encode(), digest_size=8).digest(), "little")
        if key in self._seen:
            return False
        self._seen.add(key)
        self._new.append(key)
        return True

    def keep(self) -> None:
        """Append the new titles after the valid ones; overwrites leftovers of an interrupted call."""
        self._path.touch()
        with open(self._path, "r+b") as file:
            file.truncate(8 * self.kept)
            file.seek(0, os.SEEK_END)
            file.write(np.asarray(self._new, np.uint64).tobytes())
            file.flush()
            os.fsync(file.fileno())
        self.kept, self._new = self.kept + len(self._new), []


def _on_top(progress: Callable[[Progress], None] | None, work: _Work, total: int) -> Callable[[Progress], None] | None:
    if progress is None:
        return None
    documents, tokens = work.count("documents"), work.count("tokens")
    tell = progress
    return lambda now: tell(Progress(now.bytes_read, total, documents + now.documents, tokens + now.tokens))


class _Work:
    """Results of earlier calls and of this one."""

    def __init__(self, prefix: str, settings: Settings) -> None:
        self._prefix, self._settings = prefix, settings
        self._partial, self._titles_file = Path(f"{prefix}.partial.json"), Path(f"{prefix}.titles")
        self.shards: list[Shard] = []
        self.state: dict[str, Any] | None = None
        kept = 0
        if self._partial.exists():
            content = _read(self._partial, settings)
            self.shards = [Shard(**shard) for shard in content["shards"]]
            if not {"state", "titles"} <= content.keys():
                raise UserError(f"{self._partial}: damaged (no state or titles); {_REMEDY}")
            self.state, kept = content["state"], content["titles"]
        self.titles = _Titles(self._titles_file, kept)

    def count(self, what: str) -> int:
        """Sum of a field over all shards."""
        return sum(getattr(shard, what) for shard in self.shards)

    def add(self, shard: Shard, state: dict[str, Any]) -> None:
        """Record a complete shard, the titles up to its end, and the source's position."""
        self.shards.append(shard)
        self.titles.keep()
        content = {"state": state, "titles": self.titles.kept, **self._content()}
        atomic_write(self._partial, json.dumps(content, indent=1) + "\n")

    def finish(self, last_empty: int, last_duplicates: int) -> dict[str, Any]:
        """Write the manifest and remove the files of an unfinished preparation."""
        totals = {name: self.count(name) for name in _COUNTS}
        totals["empty"] += last_empty
        totals["duplicates"] += last_duplicates
        if not self.shards:
            raise UserError(
                f"{self._settings.source}: no article with text under {self._settings.text_key!r}; nothing was written"
            )
        prefixes = [os.path.basename(shard.prefix) for shard in self.shards]
        content = {**totals, "data_path": prefixes, **self._content()}
        atomic_write(Path(f"{self._prefix}.manifest.json"), json.dumps(content, indent=1) + "\n")
        for path in (self._partial, self._titles_file, Path(f"{self._prefix}.lock")):
            path.unlink(missing_ok=True)
        return content

    def _content(self) -> dict[str, Any]:
        return {"settings": asdict(self._settings), "shards": [asdict(shard) for shard in self.shards]}


def _load(path: Path) -> Row:
    """Settings and shards of a manifest or of a preparation that is under way, of their types."""
    try:
        content = read_json(path, _REMEDY)
        settings, shards = content["settings"], [Shard(**shard) for shard in content["shards"]]
        texts = [text for shard in shards for text in (shard.prefix, *shard.sha256, *shard.sha256.values())]
        counts = [getattr(shard, name) for shard in shards for name in _COUNTS] + [content.get("titles", 0)]
        rows = (content.get("state") or {"rows": 0})["rows"]
        counts.append(rows)
        valid = type(settings) is dict and all(type(text) is str for text in texts)
        if not valid or any(type(count) is not int or count < 0 for count in counts):
            raise ValueError("a value of another type")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); {_REMEDY}") from None
    return content


def _read(path: Path, settings: Settings) -> Row:
    content = _load(path)
    there = _OLDER | content["settings"]
    differing = [
        f"{name.replace('_', ' ')} {value!r} (there: {there.get(name)!r})"
        for name, value in asdict(settings).items()
        if there.get(name) != value
    ]
    if differing:
        raise UserError(f"{path} is of another preparation: {', '.join(differing)}; choose another --output-prefix")
    return content


def _beside(manifest: Path, prefix: str) -> str:
    """A shard's prefix in the manifest's folder, even if both were moved."""
    return str(manifest.parent / os.path.basename(prefix))


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
