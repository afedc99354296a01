"""The amaxes that kernels find, of what they write and of operands."""

import pytest

from tests.kernels import amax_cases
from tests.kernels.interpreted import assert_no_differences


@pytest.mark.slow
def test_interpreted() -> None:
    assert "84 compared" in assert_no_differences("tests.kernels.amax_cases")


@pytest.mark.gpu
def test_compiled() -> None:
    assert amax_cases.differences("cuda")[1] == []
