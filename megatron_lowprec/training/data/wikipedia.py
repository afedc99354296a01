"""Titled articles from the Hugging Face hub, JSON-lines or parquet files, in a resumable order."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lowprec.errors import UserError, type_of
from megatron_lowprec.training.data import jsonl

_INSTALL = "pip install 'megatron-lowprec[datasets]'"


@dataclass(frozen=True)
class Article:
    """``done`` of ``Source.total`` is the amount read so far, in the source's own unit."""

    title: str
    text: str
    done: int


class Source(ABC):
    """Articles in a fixed order.

    ``name`` identifies the source, so that a preparation recognizes it when resumed. ``total`` is its size, 0 if
    unknown.
    """

    name: str
    total: int = 0

    @abstractmethod
    def articles(self, state: Mapping[str, Any] | None) -> Iterator[Article]:
        """All articles, or those after a ``state``.

        Raises:
            UserError: unreadable data, or an article without title or text.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Position of the iteration, as plain JSON: after the last article returned."""


class Files(Source):
    """JSON lines, plain or compressed, and parquet, in the order given."""

    def __init__(self, paths: Sequence[str], title_key: str, text_key: str) -> None:
        for path in paths:
            if not os.path.isfile(path):
                raise UserError(f"--input {path}: no such file")
            if not jsonl.is_text_file(path) and not path.endswith(".parquet"):
                raise UserError(f"--input {path}: neither .jsonl (.gz, .xz, .zst) nor .parquet")
        self.name = " ".join(paths)
        self.total = sum(map(os.path.getsize, paths))
        self._paths, self._keys, self._read = list(paths), (title_key, text_key), 0

    def articles(self, state: Mapping[str, Any] | None) -> Iterator[Article]:
        """As ``Source.articles``; skips articles read before by reading them again."""
        before = int(state["rows"]) if state is not None else 0
        self._read = 0
        for article in self._rows():
            self._read += 1
            if self._read > before:
                yield article

    def state(self) -> dict[str, Any]:
        """Number of articles read."""
        return {"rows": self._read}

    def _rows(self) -> Iterator[Article]:
        bytes_before = 0
        for path in self._paths:
            rows = self._jsonl(path) if jsonl.is_text_file(path) else self._parquet(path)
            for title, text, done in rows:
                yield Article(title, text, bytes_before + done)
            bytes_before += os.path.getsize(path)

    def _jsonl(self, path: str) -> Iterator[tuple[str, str, int]]:
        for batch in jsonl.batches([path]):
            for title, text in jsonl.texts(batch, self._keys):
                yield title, text, batch.bytes_read

    def _parquet(self, path: str) -> Iterator[tuple[str, str, int]]:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            raise UserError(f"{path}: parquet needs the package pyarrow: {_INSTALL}") from None
        try:
            file, size, rows = parquet.ParquetFile(path), os.path.getsize(path), 0
            for batch in file.iter_batches(columns=list(self._keys)):
                for row in batch.to_pylist():
                    rows += 1
                    title, text = _titled(row, self._keys, f"{path}, row {rows}")
                    yield title, text, size * rows // file.metadata.num_rows
        except (ArrowException, OSError) as error:
            raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None


class Hub(Source):
    """A dataset of the Hugging Face hub, or a folder in its format, streamed: nothing is stored on disk."""

    def __init__(
        self, dataset: str, config: str | None, split: str, revision: str | None, title_key: str, text_key: str
    ) -> None:
        try:
            import datasets
        except ImportError:
            raise UserError(f"--dataset {dataset} needs the package datasets: {_INSTALL}, or give --input") from None
        self._keys = (title_key, text_key)
        self.name = "/".join(filter(None, (dataset, config, split))) + (f" at {revision}" if revision else "")
        try:
            self._stream = datasets.load_dataset(dataset, config, split=split, revision=revision, streaming=True)
        except Exception as error:  # noqa: BLE001 - the hub, the network and the loader raise their own
            raise UserError(f"--dataset {self.name}: {' '.join(str(error).split())[:300]}") from None
        about = self._stream.info.splits
        self.total = about[split].num_examples if about is not None and split in about else 0

    def articles(self, state: Mapping[str, Any] | None) -> Iterator[Article]:
        """As ``Source.articles``; a stream resumes at the file it had reached."""
        rows = 0
        if state is not None:
            rows = int(state["rows"])
            self._stream.load_state_dict(json.loads(state["stream"]))
        self._rows = rows
        stream = iter(self._stream)
        while True:
            try:
                row = next(stream)
            except StopIteration:
                return
            except Exception as error:  # noqa: BLE001 - as above
                what = " ".join(str(error).split())[:300]
                raise UserError(f"{self.name} broke off after {self._rows} articles ({what}); try again") from None
            self._rows += 1
            yield Article(*_titled(row, self._keys, f"{self.name}, row {self._rows}"), self._rows)

    def state(self) -> dict[str, Any]:
        """Number of rows read, and the stream's own position."""
        return {"rows": self._rows, "stream": json.dumps(self._stream.state_dict())}


def _titled(row: Mapping[str, Any], keys: tuple[str, str], where: str) -> tuple[str, str]:
    for key in keys:
        if not isinstance(row.get(key), str):
            found = type_of(row.get(key))
            raise UserError(f"{where}: {found} under {key!r}, found: {', '.join(row)}; name the keys of title and text")
    return row[keys[0]], row[keys[1]]
