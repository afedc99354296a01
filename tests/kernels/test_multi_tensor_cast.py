"""Many tensors become FP8 codes by one kernel as they do by the reference."""

import pytest

from tests.kernels import multi_tensor_cast_cases
from tests.kernels.interpreted import assert_no_differences


@pytest.mark.slow
def test_interpreted() -> None:
    assert "67 compared" in assert_no_differences("tests.kernels.multi_tensor_cast_cases")


@pytest.mark.gpu
def test_compiled() -> None:
    assert multi_tensor_cast_cases.differences("cuda")[1] == []
