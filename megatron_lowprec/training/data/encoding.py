"""Tokenizes text batches with one or several processes, in input order."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.data import jsonl
from megatron_lowprec.training.data.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class EncodedBatch:
    """Token ids of one :class:`jsonl.Batch`.

    ``ids[k]`` are the concatenated ids of all documents under key k; ``lengths[k]`` counts the ids of each document
    that has any; ``empty[k]`` counts documents without ids, which are dropped.
    """

    ids: tuple[npt.NDArray[np.number], ...]
    lengths: tuple[tuple[int, ...], ...]
    empty: tuple[int, ...]
    bytes_read: int


@dataclass(frozen=True)
class Encoder:
    """Tokenizes a batch: the texts under ``keys``, each followed by eod if ``append_eod``, as ids of ``dtype``."""

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append_eod: bool
    dtype: type[np.number]

    def __call__(self, batch: jsonl.Batch) -> EncodedBatch:
        columns = list(zip(*jsonl.texts(batch, self.keys), strict=True)) or [()] * len(self.keys)
        ids, lengths, empty = [], [], []
        for texts in columns:
            documents = [document for document in self.tokenizer.tokenize_batch(texts) if document]
            empty.append(len(texts) - len(documents))
            if self.append_eod:
                documents = [[*document, self.tokenizer.eod] for document in documents]
            lengths.append(tuple(map(len, documents)))
            ids.append(np.fromiter((i for document in documents for i in document), self.dtype, count=sum(lengths[-1])))
        return EncodedBatch(tuple(ids), tuple(lengths), tuple(empty), batch.bytes_read)


def encode(encoder: Callable[[jsonl.Batch], T], batches: Iterable[jsonl.Batch], workers: int) -> Iterator[T]:
    """Apply a picklable ``encoder`` to the batches; results keep the batches' order for any number of workers.

    Raises:
        UserError: raised by ``encoder`` or by reading ``batches``, or for a worker process that died.
    """
    if workers <= 1:
        yield from map(encoder, batches)
        return
    # Not fork: the caller may have threads (torch, gloo), whose locks would stay locked in a forked copy.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_set_encoder, initargs=(encoder,)) as pool:
        pending: deque[Future[T]] = deque()
        try:
            for batch in batches:
                pending.append(pool.submit(_encode_in_worker, batch))
                if len(pending) > 2 * workers:  # keeps all workers busy and bounds memory
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
            pool.shutdown()
        except BrokenProcessPool:
            raise UserError(f"one of {workers} worker processes died, perhaps for want of memory; use fewer") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_encoder_of_worker: Callable[[jsonl.Batch], Any]


def _set_encoder(encoder: Callable[[jsonl.Batch], Any]) -> None:
    global _encoder_of_worker
    _encoder_of_worker = encoder


def _encode_in_worker(batch: jsonl.Batch) -> Any:
    return _encoder_of_worker(batch)
