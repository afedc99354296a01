"""Loss of a model over whole texts, computed in windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.utils import get_attr_wrapped_model

from megatron_lowprec.training.evaluation.windows import Text, Window, pack, windows
from megatron_lowprec.training.model import Model


@dataclass(frozen=True)
class Score:
    """Summed negative log likelihood in nats, and the number of tokens."""

    nats: float
    tokens: int

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Perplexity of a token."""
        return per(self.nats, self.tokens)


def per(nats: float, units: int) -> float:
    """Perplexity of a unit (token, word, byte); infinite if it overflows a float."""
    return math.exp(nats / units) if nats / units < 700 else math.inf


@torch.no_grad()
def score(
    model: Model,
    texts: Sequence[Text],
    *,
    length: int,
    stride: int,
    batch_size: int,
    filler: int,
    device: torch.device,
    vocab_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """Score every token of ``texts`` once, in windows over the data-parallel ranks; returns the result on every rank.

    Args:
        length, stride: of ``windows``.
        batch_size: windows of one forward pass.
        filler: token id that pads rows.
        vocab_size: likelihoods are over the first ``vocab_size`` ids; default all of the model's, including padding.
        progress: called with the number of forward passes done and in total.
    """
    (chunk,) = model.chunks
    chunk.eval()
    rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    places = list(windows(texts, length, stride))
    rounds = math.ceil(len(places) / (batch_size * ranks))
    total = torch.zeros(2, dtype=torch.float64, device=device)
    positions = torch.arange(length, device=device).expand(batch_size, length)
    with _without_padding(chunk, vocab_size):
        for number in range(rounds):
            # All ranks run the same number of passes, some without a window: experts exchange tokens in each.
            first = (number * ranks + rank) * batch_size
            total += _score_batch(chunk, texts, places[first : first + batch_size], positions, filler, device)
            if progress is not None:
                progress(number + 1, rounds)
    dist.all_reduce(total, group=mpu.get_data_parallel_group())
    nats, tokens = total.tolist()
    return Score(nats, int(tokens))


@contextmanager
def _without_padding(chunk: torch.nn.Module, vocab_size: int | None) -> Iterator[None]:
    """Mask logits of ids from ``vocab_size`` on with -inf."""
    if vocab_size is None:
        yield
        return

    def withhold(_layer: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, Any]) -> None:
        logits = output[0]  # [s, b, this rank's shard of the vocabulary]
        first = mpu.get_tensor_model_parallel_rank() * logits.shape[-1]
        logits[..., max(0, vocab_size - first) :] = -math.inf

    handle = get_attr_wrapped_model(chunk, "output_layer").register_forward_hook(withhold)
    try:
        yield
    finally:
        handle.remove()


def _score_batch(
    chunk: torch.nn.Module,
    texts: Sequence[Text],
    batch: Sequence[Window],
    positions: torch.Tensor,
    filler: int,
    device: torch.device,
) -> torch.Tensor:
    """[nats, tokens] of one forward pass."""
    size, length = positions.shape
    inputs, labels, mask = (torch.from_numpy(array).to(device) for array in pack(texts, batch, size, length, filler))
    losses = chunk(inputs, positions, None, labels=labels).float()
    return torch.stack([(losses * mask).sum(dtype=torch.float64), mask.sum(dtype=torch.float64)])
