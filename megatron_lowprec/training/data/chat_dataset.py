"""Conversations as training samples: tokenized once, one conversation per sequence, loss on its answers only.

The tokenized file is Megatron's indexed format with modes: a conversation is a document, its parts are sequences, and
parts of mode 1 carry loss. With one conversation per sequence and padding after its end, the causal mask suffices: no
token attends to another conversation, and padding does not affect the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.data import corpus_writer, indexed_dataset, jsonl
from megatron_lowprec.training.data.chat import ChatEncoder
from megatron_lowprec.training.data.encoding import encode
from megatron_lowprec.training.data.sample_index import Corpus
from megatron_lowprec.training.data.tokenizer import Tokenizer

_TEMPLATE = ("messages", "tulu", 1)  # determines the cached ids; another template needs another value


def prepare_chats(
    path: str, tokenizer: Tokenizer, cache_dir: str, *, workers: int, report: Callable[[str], None] = print
) -> str:
    """Tokenize a file of conversations once; returns the prefix in ``cache_dir``, as ``prepare`` does for text.

    Raises:
        UserError: an invalid line, named by file and number, or as ``corpus_writer.cached``.
    """

    def written(prefix: str, count: int) -> indexed_dataset.Note:
        return _write(path, prefix, tokenizer, count)

    return corpus_writer.cached(path, tokenizer, cache_dir, _TEMPLATE, written, workers=workers, report=report)


def _write(path: str, prefix: str, tokenizer: Tokenizer, workers: int) -> indexed_dataset.Note:
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    conversations = tokens = 0
    with corpus_writer.staged([prefix]) as (place,):
        builder = IndexedDatasetBuilder(f"{place}.bin", dtype=dtype, multimodal=True)
        for batch in encode(ChatEncoder(tokenizer, dtype), jsonl.batches([path]), workers):
            start = 0
            for parts in batch.parts:
                builder.add_document(batch.ids[start : start + sum(parts)], parts, [0, 1] * (len(parts) // 2))
                start += sum(parts)
            conversations, tokens = conversations + len(batch.parts), tokens + start
        if not conversations:
            raise UserError(f"{path}: no line in it; each line must be one conversation")
        builder.finalize(f"{place}.idx")
        note = indexed_dataset.Note(
            tokenizer=tokenizer.type_name,
            vocab_size=tokenizer.vocab_size,
            fingerprint=tokenizer.fingerprint,
            documents=conversations,
            tokens=tokens,
            empty=0,
            json_key=_TEMPLATE[0],
            append_eod=True,
            source=(path,),
        )
        indexed_dataset.write_note(place, note)
    return note


class ChatSamples:
    """One epoch of the conversations in ``share`` of a file: int64 and mask [sequence] by name.

    A conversation longer than ``length`` + 1 tokens is truncated; if no answer token remains, it is dropped.
    ``summary`` reports both counts and the share of padding in one line.

    Args:
        prefix: of ``prepare_chats``.
        share: of the file's conversations, in their order, as --split divides documents.
        length: tokens of a sequence.
        tokenizer: its eod is padding.
        split, path: for messages.

    Raises:
        UserError: no sample in that share.
    """

    def __init__(
        self, prefix: str, share: tuple[float, float], length: int, tokenizer: Tokenizer, split: str, path: str
    ) -> None:
        self._indexed = Corpus(prefix, tokenizer.vocab_size, multimodal=True)
        self._length, self._filler = length, tokenizer.eod
        # First part of each conversation, and the end of the last.
        self._bounds: npt.NDArray[np.int64] = np.asarray(self._indexed.document_indices)
        if not (np.diff(self._bounds) > 0).all():
            raise UserError(
                f"{prefix}.idx has a conversation without parts; remove its files, and it is prepared again"
            )
        first, last = (round((len(self._bounds) - 1) * end) for end in share)
        tokens, answers, kept = _counts(self._indexed, self._bounds, first, last, length)
        self._chosen = first + np.flatnonzero(kept)
        if not len(self._chosen):
            raise UserError(
                f"{path}: its {split} part has {last - first} conversations, none with an answer in its first "
                f"{length} tokens; give more data, a longer --seq-length or another --split"
            )
        cut = tokens > length + 1
        seen = np.minimum(tokens, length + 1)[kept > 0]
        self.summary = (
            f"chat, {split}: {path}: {len(self._chosen):,} conversations of {seen.sum():,} tokens, {kept.sum():,} of "
            f"them in answers; one a sequence, {1 - (seen - 1).sum() / (len(seen) * length):.0%} padding"
        )
        if cut.any():
            self.summary += (
                f"; {cut.sum():,} longer than --seq-length {length} lost their ends ({answers.sum() - kept.sum():,} "
                f"tokens of answers), {(kept == 0).sum():,} of these are left out with no answer remaining"
            )

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        conversation = int(self._chosen[index])
        parts, modes = self._indexed[int(self._bounds[conversation]) : int(self._bounds[conversation + 1])]
        ids = np.concatenate(parts)[: self._length + 1].astype(np.int64)
        in_answer = np.repeat(modes, [len(part) for part in parts])[: self._length + 1]
        text = np.full(self._length + 1, self._filler, dtype=np.int64)
        text[: len(ids)] = ids
        mask = np.zeros(self._length, dtype=np.float32)
        mask[: len(ids) - 1] = in_answer[1:]
        return {
            "tokens": torch.from_numpy(text[:-1]),
            "labels": torch.from_numpy(text[1:]),
            "position_ids": torch.arange(self._length),
            "loss_mask": torch.from_numpy(mask),
        }


def _counts(
    indexed: Corpus, bounds: npt.NDArray[np.int64], first: int, last: int, length: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each conversation from ``first`` to ``last``: its tokens, its answer tokens, and those left by truncation."""
    if first == last:
        none = np.zeros(0, np.int64)
        return none, none, none
    parts = slice(bounds[first], bounds[last])
    starts = bounds[first:last] - bounds[first]
    sizes = indexed.sequence_lengths[parts].astype(np.int64)
    carries_loss = indexed.index.sequence_modes[parts] == 1
    tokens = np.add.reduceat(sizes, starts)
    # Start of each part within its conversation.
    begins = np.cumsum(sizes) - sizes
    begins -= np.repeat(begins[starts], np.diff([*starts, len(sizes)]))
    remain = np.clip(length + 1 - begins, 0, sizes)
    return tokens, np.add.reduceat(sizes * carries_loss, starts), np.add.reduceat(remain * carries_loss, starts)
