"""Gradients become FP8 codes, and codes sums, by the kernels as they do by the reference."""

import pytest
import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.gradient_codes.reference import count_saturated, parts_between
from tests.kernels import gradient_codes_cases
from tests.kernels.interpreted import assert_no_differences


@pytest.mark.slow
def test_interpreted() -> None:
    assert "167 compared" in assert_no_differences("tests.kernels.gradient_codes_cases")


@pytest.mark.gpu
def test_compiled() -> None:
    assert gradient_codes_cases.differences("cuda")[1] == []


def test_saturated_codes_have_either_sign() -> None:
    codes = torch.tensor([0x7E, 0xFE, 0x7D, 0x7F, 0], dtype=torch.uint8)  # 448, -448, 416, NaN, 0
    assert count_saturated(codes, FORMATS["e4m3"]) == 2


def test_a_tensor_outside_of_a_rank_s_part_is_empty() -> None:
    tensors = [(0, 3), (3, 9), (9, 12)]
    assert parts_between(tensors, 4, 8) == [(0, 0), (0, 4), (4, 4)]
    assert parts_between(tensors, 8, 12) == [(0, 0), (0, 1), (1, 4)]
