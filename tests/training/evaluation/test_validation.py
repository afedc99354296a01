"""The perplexity of a validation is bounded, and not a number if the loss is none."""

import math

import pytest

from megatron_lowprec.training.evaluation.validation import Evaluation


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(3.0, math.exp(3.0)), (1e3, math.exp(20.0)), (math.inf, math.exp(20.0)), (math.nan, math.nan)],
)
def test_perplexity(loss: float, expected: float) -> None:
    assert Evaluation(loss).perplexity == pytest.approx(expected, nan_ok=True)
