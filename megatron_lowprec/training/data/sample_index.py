"""One epoch of some documents of a corpus: Megatron-core's GPTDataset with complete, separate indices on disk.

Megatron-core 0.16.1 names an index by --split only, not by the documents in the share, and writes its files in place.
A process killed meanwhile leaves a partial index, which later starts take for complete. Of runs that start together, as
in a sweep, one may read an index that another is writing.
"""

from __future__ import annotations

import os
import tempfile
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.distributed.file_lock import lock

_FILES = ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy")


@dataclass
class DocumentsConfig(GPTDatasetConfig):
    """Adds what else an index depends on: the range of documents (first, last + 1) and their tokens."""

    documents: tuple[int, int] = (0, 0)
    tokens: int = 0


class DocumentSamples(GPTDataset):
    """GPTDataset of ``config.documents``. Rank 0 builds it first and writes the index files that the others read.

    Raises:
        UserError: an index folder that cannot be written, or is not visible to other ranks.
    """

    config: DocumentsConfig

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), "documents", "tokens"]

    def _build_document_sample_shuffle_indices(self) -> Any:
        cache = self.config.path_to_cache
        assert cache is not None
        try:
            if not dist.is_initialized() or dist.get_rank() == 0:
                self._write(Path(cache))
            return super()._build_document_sample_shuffle_indices()
        except OSError as error:
            raise UserError(
                f"indices of samples in {cache}: {error}; name a --data-cache-path that rank 0 can write and all read"
            ) from None

    def _write(self, cache: Path) -> None:
        name = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
        files = [cache / f"{name}-{file}" for file in _FILES]
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
