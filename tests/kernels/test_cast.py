"""The FP8 cast kernels give the reference's bits: interpreted here, compiled where there is a GPU."""

import pytest

from tests.kernels.cast_cases import Case, differences, gpu_cases, scale_differences, small_cases
from tests.kernels.interpreted import assert_no_differences


def test_interpreted_kernels_equal_the_reference() -> None:
    assert f"{len(small_cases())} cases compared" in assert_no_differences("tests.kernels.cast_cases")


@pytest.mark.gpu
@pytest.mark.parametrize("case", gpu_cases(), ids=str)
def test_compiled_kernels_equal_the_reference(case: Case) -> None:
    assert differences(case, "cuda") == []


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_scales_of_every_bf16_amax_equal_the_reference(fmt: str) -> None:
    assert scale_differences(fmt, "cuda") == []
