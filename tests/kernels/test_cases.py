"""Kernels give what their references give, or float64: interpreted here, compiled where there is a GPU."""

import pytest

from tests.kernels.cases import COMPARED, faults
from tests.kernels.interpreted import assert_no_differences


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])  # of two workers
def test_interpreted(half: int) -> None:
    names = list(COMPARED)[half::2]
    assert f"{len(names)} modules compared" in assert_no_differences("tests.kernels.cases", *names)


@pytest.mark.gpu
@pytest.mark.parametrize("name", COMPARED)
def test_compiled(name: str) -> None:
    assert faults(name, "cuda") == []
