"""Every token of a text is scored once, after the context that the window's length and stride leave it."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.evaluation.windows import Text, Window, pack, windows

TEXTS = [Text(99, np.arange(10)), Text(98, np.arange(20, 23)), Text(97, np.arange(0))]


@pytest.mark.parametrize("stride", [1, 3, 4])
def test_every_token_once(stride: int) -> None:
    found = list(windows(TEXTS, 4, stride))
    for number, text in enumerate(TEXTS):
        scored = [i for w in found if w.text == number for i in range(w.begin, w.end)]
        assert scored == list(range(len(text.ids)))
    assert all(w.end - w.first <= 4 for w in found)


def test_contiguous_windows_are_lm_evaluation_harness_s() -> None:
    # Its disjoint rolling windows: each begins after one token of context, but the last one, which has two tokens left
    # to score, reaches back. tests/tools/test_lm_eval.py compares with its own function where it is installed.
    assert list(windows(TEXTS[:1], 4, 4)) == [Window(0, 0, 0, 4), Window(0, 4, 4, 8), Window(0, 6, 8, 10)]
    assert list(windows([Text(97, np.arange(3))], 4, 4)) == [Window(0, 0, 0, 3)]


def test_sliding_windows_keep_their_context() -> None:
    assert list(windows(TEXTS[:1], 4, 3)) == [Window(0, 0, 0, 4), Window(0, 3, 4, 7), Window(0, 6, 7, 10)]
    assert list(windows(TEXTS[:1], 4, 1))[-1] == Window(0, 6, 9, 10)
    assert list(windows([Text(97, np.arange(8))], 4, 3))[-1] == Window(0, 4, 7, 8)


def test_inputs_are_the_labels_one_later() -> None:
    inputs, labels, mask = pack(TEXTS, [Window(0, 0, 0, 4), Window(0, 3, 4, 7), Window(1, 0, 0, 3)], 4, 4, 55)
    assert inputs.tolist() == [[99, 0, 1, 2], [2, 3, 4, 5], [98, 20, 21, 55], [55] * 4]
    assert labels.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [20, 21, 22, 55], [55] * 4]
    assert mask.tolist() == [[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 0], [0] * 4]


@pytest.mark.parametrize("stride", [0, 5, -1])
def test_a_stride_that_skips_is_refused(stride: int) -> None:
    with pytest.raises(UserError, match="--stride"):
        list(windows(TEXTS, 4, stride))
