"""Which tokens are scored after which: a text of any length in windows that a model can take.

Token i of a text is scored after the tokens before it. ``prefix`` stands before token 0, so that every token of the
text is scored, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_lowprec.errors import UserError


@dataclass(frozen=True)
class Text:
    """Token ids to score, and the id that stands before them."""

    prefix: int
    ids: npt.NDArray[np.integer]


def check_stride(stride: int, length: int) -> None:
    """UserError unless windows of ``length`` that are ``stride`` apart cover a text."""
    if not 1 <= stride <= length:
        raise UserError(f"--stride {stride}: wants a number from 1 to the window's {length} tokens")


@dataclass(frozen=True)
class Window:
    """Tokens [begin, end) of a text, scored with the context from token ``first`` on."""

    text: int
    first: int
    begin: int
    end: int


def windows(texts: Sequence[Text], length: int, stride: int) -> Iterator[Window]:
    """Windows of ``length`` tokens that score ``stride`` new ones each; the first scores all of its tokens.

    ``stride == length`` makes them contiguous: the first token of each is scored after one token, its last one after
    ``length``. A smaller stride makes windows slide: after the first one every token has more than ``length - stride``
    tokens of context.

    The last window of a text has fewer tokens left to score, and reaches back for context until it is whole, as
    lm-evaluation-harness's rolling windows do; only a text shorter than ``length`` makes a shorter window.

    Raises:
        UserError: a stride outside of 1 .. length.
    """
    check_stride(stride, length)
    for number, text in enumerate(texts):
        end = 0
        while end < len(text.ids):
            begin, end = end, min(end + (stride if end else length), len(text.ids))
            yield Window(number, max(0, end - length), begin, end)


def pack(
    texts: Sequence[Text], batch: Sequence[Window], size: int, length: int, filler: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Inputs, labels and mask of what is scored, each [size, length]; rows without a window are masked whole."""
    inputs = np.full((size, length), filler, np.int64)
    labels = np.full((size, length), filler, np.int64)
    mask = np.zeros((size, length), np.float32)
    for row, window in enumerate(batch):
        text, count = texts[window.text], window.end - window.first
        before = text.prefix if window.first == 0 else text.ids[window.first - 1]
        inputs[row, 0], inputs[row, 1:count] = before, text.ids[window.first : window.end - 1]
        labels[row, :count] = text.ids[window.first : window.end]
        mask[row, window.begin - window.first : count] = 1
    return inputs, labels, mask
