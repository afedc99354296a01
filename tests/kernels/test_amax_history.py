"""Delayed scaling's windows move on by one kernel as they do by the reference."""

import pytest

from tests.kernels import amax_history_cases
from tests.kernels.interpreted import assert_no_differences


@pytest.mark.slow
def test_interpreted() -> None:
    assert "288 compared" in assert_no_differences("tests.kernels.amax_history_cases")


@pytest.mark.gpu
def test_compiled() -> None:
    assert amax_history_cases.differences("cuda")[1] == []
