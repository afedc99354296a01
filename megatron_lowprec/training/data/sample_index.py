"""One epoch of some documents of a corpus: Megatron-core's GPTDataset with complete, separate, checked indices on disk.

Megatron-core 0.16.1 names an index by --split only, not by the documents in the share, and writes its files in place.
A process killed meanwhile leaves a partial index, which later starts take for complete. Of runs that start together, as
in a sweep, one may read an index that another is writing. It also unpickles the files, so one from elsewhere could run
code: here they are mapped as plain arrays.
"""

from __future__ import annotations

import os
import tempfile
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.data.indexed_dataset import TokenReader, read_index
from megatron_lowprec.training.distributed.file_lock import lock

_FILES = ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy")
_DTYPES = (np.int32, np.int64, np.uint32)
_REMEDY = "remove it, and it is written again"

Index = np.ndarray[Any, np.dtype[np.integer]]


class Corpus(IndexedDataset):
    """Megatron-core's reader of a prefix, whose ids come from ``TokenReader``.

    Raises:
        UserError: as ``read_index``, or no modes in the index where ``multimodal`` asks for them.
    """

    def __init__(self, prefix: str, vocab_size: int, multimodal: bool = False) -> None:
        if multimodal and not read_index(prefix).has_modes:
            raise UserError(f"{prefix}.idx has no modes of its parts, as one of conversations has; prepare it again")
        super().__init__(prefix, multimodal, mmap=False)
        self._arguments = (prefix, vocab_size, multimodal)
        self.bin_reader = TokenReader(prefix, vocab_size)

    def __reduce__(self) -> tuple[type[Corpus], tuple[str, int, bool]]:
        return Corpus, self._arguments


@dataclass
class DocumentsConfig(GPTDatasetConfig):
    """Adds what else an index depends on: the range of documents (first, last + 1) and their tokens."""

    documents: tuple[int, int] = (0, 0)
    tokens: int = 0


class DocumentSamples(GPTDataset):
    """GPTDataset of ``config.documents``. Rank 0 builds it first and writes the index files that the others read.

    Raises:
        UserError: an index folder that cannot be written, or is not visible to other ranks; a file in it that is no
            index of these documents.
    """

    config: DocumentsConfig

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), "documents", "tokens"]

    def _build_document_sample_shuffle_indices(self) -> Any:
        cache = self.config.path_to_cache
        assert cache is not None
        try:
            name = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
            files = [Path(cache, f"{name}-{file}") for file in _FILES]
            if not dist.is_initialized() or dist.get_rank() == 0:
                self._write(Path(cache), name, files)
            return self._checked(files[1:])
        except OSError as error:
            raise UserError(
                f"indices of samples in {cache}: {error}; name a --data-cache-path that rank 0 can write and all read"
            ) from None

    def _checked(self, files: list[Path]) -> tuple[Index, ...]:
        """Each document once, where each sample begins in their order, and each sample once; all are checked.

        Samples begin at multiples of the sequence length in the concatenated documents, each in a document or at the
        end of one.
        """
        document, sample, shuffle = found = tuple(map(_read, files))
        first, last = self.config.documents
        length = self.config.sequence_length
        count = (self.config.tokens - 1) // length
        right = [_is_order(document, first, last), sample.shape == (count + 1, 2), _is_order(shuffle, 0, count)]
        if all(right):
            ends = np.cumsum(self.dataset.sequence_lengths[document], dtype=np.int64)
            lengths, at, offset = np.diff(ends, prepend=0), sample[:, 0], sample[:, 1]
            right[1] = not len(at) or bool(at.min() >= 0 and at.max() < len(document) and offset.min() >= 0)
            right[1] = right[1] and bool(
                (offset <= lengths[at]).all() and (ends[at] - lengths[at] + offset == length * np.arange(len(at))).all()
            )
        if not all(right):
            raise UserError(f"{files[right.index(False)]} is no index of these documents; {_REMEDY}")
        return found

    def _write(self, cache: Path, name: str, files: list[Path]) -> None:
        if all(file.is_file() for file in files):
            return
        cache.mkdir(parents=True, exist_ok=True)
        with lock(str(cache / f"{name}.lock")):
            if all(file.is_file() for file in files):
                return
            config = self.config
            with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}.") as place:
                self.config = copy(config)
                self.config.path_to_cache = place
                super()._build_document_sample_shuffle_indices()
                self.config = config
                for file in files:
                    os.replace(Path(place) / file.name, file)


def _read(path: Path) -> Index:
    """A file of ``numpy.save``, mapped; UserError for a damaged one, or one of pickled objects, which may run code."""
    try:
        found = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged header can raise anything
        raise UserError(f"{path} is no index: {error}; {_REMEDY}") from None
    if found.dtype not in _DTYPES:
        raise UserError(f"{path} is no index: it holds {found.dtype}; {_REMEDY}")
    return found


def _is_order(values: Index, first: int, end: int) -> bool:
    """Whether the values are those from ``first`` to ``end``, each once."""
    if values.shape != (end - first,) or not values.size:
        return values.shape == (end - first,)
    return bool(first <= values.min() and values.max() < end and (np.bincount(values - first) == 1).all())
