"""One pass over source, codes and scales gives the reference's statistics."""

import pytest

from tests.kernels import operand_stats_cases
from tests.kernels.interpreted import assert_no_differences


@pytest.mark.slow
def test_interpreted() -> None:
    assert "22 compared" in assert_no_differences("tests.kernels.operand_stats_cases")


@pytest.mark.gpu
def test_compiled() -> None:
    assert operand_stats_cases.differences("cuda")[1] == []
