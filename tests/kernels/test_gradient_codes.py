"""Gradients in FP8 codes: saturated ones, and the parts of a rank."""

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.gradient_codes.reference import count_saturated, parts_between


def test_saturated_codes_have_either_sign() -> None:
    codes = torch.tensor([0x7E, 0xFE, 0x7D, 0x7F, 0], dtype=torch.uint8)  # 448, -448, 416, NaN, 0
    assert count_saturated(codes, FORMATS["e4m3"]) == 2


def test_a_tensor_outside_of_a_rank_s_part_is_empty() -> None:
    tensors = [(0, 3), (3, 9), (9, 12)]
    assert parts_between(tensors, 4, 8) == [(0, 0), (0, 4), (4, 4)]
    assert parts_between(tensors, 8, 12) == [(0, 0), (0, 1), (1, 4)]
