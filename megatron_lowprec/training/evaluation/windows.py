"""Splits a text of any length into windows that a model can process.

Token i of a text is scored given the tokens before it. ``prefix`` precedes token 0, so that every token of the text is
scored exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_lowprec.errors import UserError


@dataclass(frozen=True)
class Text:
    """Token ids to score, and the id that precedes them."""

    prefix: int
    ids: npt.NDArray[np.integer]


def check_stride(stride: int, length: int) -> None:
    """Raise a UserError unless windows of ``length`` at distance ``stride`` cover a text."""
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

    With ``stride == length`` windows are contiguous: the first token of each has one token of context, its last has
    ``length``. With a smaller stride windows slide: after the first one every token has more than ``length - stride``
    tokens of context.

    The last window of a text has fewer tokens left to score and extends back for context to full length, as
    lm-evaluation-harness's rolling windows do. A window is shorter only if the text is shorter than ``length``.

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
    """Inputs, labels and mask of scored tokens, each [size, length]; rows without a window are masked."""
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
