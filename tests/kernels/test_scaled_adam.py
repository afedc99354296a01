"""Adam on narrow formats as two kernels takes the reference's steps."""

import pytest

from tests.kernels import scaled_adam_cases
from tests.kernels.interpreted import assert_no_differences


@pytest.mark.slow
def test_interpreted() -> None:
    assert "2832 compared" in assert_no_differences("tests.kernels.scaled_adam_cases")


@pytest.mark.gpu
def test_compiled() -> None:
    assert scaled_adam_cases.differences("cuda")[1] == []
