"""Transposed codes: the reference byte by byte."""

from itertools import product

import pytest
import torch

from megatron_lowprec.kernels.dispatch import transpose_codes, transpose_groups
from tests.kernels.transpose_codes_cases import DTYPES, codes_of


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "multiple", "columns"), [((16, 24), 1, 16), ((17, 16), 16, 32), ((0, 3), 16, 0)])
def test_every_byte_is_moved_and_the_padding_is_zero(
    size: tuple[int, int], multiple: int, columns: int, dtype: torch.dtype
) -> None:
    codes = codes_of(size)
    transposed = transpose_codes(codes.view(dtype), multiple)
    assert (transposed.dtype, transposed.shape) == (dtype, (size[1], columns))
    assert transposed.is_contiguous()
    moved = transposed.view(torch.uint8)
    for row, column in product(range(columns), range(size[1])):
        assert moved[column, row] == (codes[row, column] if row < size[0] else 0)


def test_a_group_is_each_of_its_matrices() -> None:
    several = [codes_of((17, 24)).roll(i) for i in range(3)]
    assert torch.equal(transpose_groups(several), torch.stack([transpose_codes(each) for each in several]))


@pytest.mark.gpu
def test_offsets_exceed_32_bits() -> None:
    codes = torch.zeros(2**17 + 1, 2**14 + 16, dtype=torch.uint8, device="cuda")
    codes[-1, -1] = 1
    codes[-1, 0] = 2
    codes[0, -1] = 3
    transposed = transpose_codes(codes, 16)
    assert (transposed[-1, 2**17], transposed[0, 2**17], transposed[-1, 0]) == (1, 2, 3)
    # of the whole, a count needs eight times its memory
    assert sum(int(rows.count_nonzero()) for rows in transposed.split(1024)) == 3
