"""Grouped kernels give the bits of their references: interpreted here, compiled where there is a GPU."""

import pytest
import torch

from tests.kernels.grouped_cases import (
    CASES,
    Case,
    cast_differences,
    fp8_differences,
    operand_differences,
    product_differences,
    tiling_differences,
)
from tests.kernels.interpreted import assert_no_differences


@pytest.mark.slow
def test_interpreted_kernels_equal_the_references() -> None:
    assert_no_differences("tests.kernels.grouped_cases")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_quantizer_equals_the_reference(case: Case) -> None:
    assert operand_differences(case, "cuda") == []


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 16])
def test_compiled_products_equal_the_reference(size: int) -> None:
    assert product_differences("cuda", size, torch.bfloat16) == []


@pytest.mark.gpu
def test_compiled_products_of_every_tiling_equal_the_reference() -> None:
    assert tiling_differences("cuda", torch.bfloat16) == []


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 8])
def test_compiled_fp8_products_equal_the_reference(size: int) -> None:
    assert fp8_differences("cuda", size) == []


@pytest.mark.gpu
def test_compiled_fp8_casts_equal_the_reference() -> None:
    assert cast_differences("cuda") == []
