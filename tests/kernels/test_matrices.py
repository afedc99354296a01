"""Matrices of a group have the addresses of their views, whichever tensors hold them."""

from collections.abc import Callable

import pytest
import torch

from megatron_lowprec.kernels.matrices import Matrices, addresses_of, units_of

STACK = torch.arange(2 * 6 * 8).view(2, 6, 8)
ROWS = (3, 0, 8, 1)
SPLIT = torch.arange(12 * 8).view(12, 8)


@pytest.mark.parametrize(
    ("make", "views"),
    [
        (lambda: Matrices(STACK), STACK.unbind()),
        (lambda: Matrices(STACK[:, 2:4]), [one[2:4] for one in STACK]),
        (lambda: Matrices(SPLIT, ROWS), SPLIT.split(ROWS)),
        (lambda: Matrices(STACK.unbind()), STACK.unbind()),
        (lambda: Matrices(STACK).transposed(), [one.t() for one in STACK]),
        (lambda: Matrices(STACK.unbind()).transposed(), [one.t() for one in STACK]),
    ],
)
def test_matrices_are_their_views(make: Callable[[], Matrices], views: list[torch.Tensor]) -> None:
    matrices = make()
    found = [list(matrices), [matrices[i] for i in range(len(matrices))], list(matrices[:])]
    for each in found:
        assert [(one.data_ptr(), one.shape, one.stride()) for one in each] == [
            (one.data_ptr(), one.shape, one.stride()) for one in views
        ]
    assert matrices.rows == tuple(map(len, views))
    assert matrices.columns == views[0].shape[1]
    assert torch.equal(matrices.joined(), torch.cat(list(views)))
    # an empty matrix has no address of its own
    assert [int(at) for at, one in zip(matrices.addresses, views, strict=True) if len(one)] == [
        one.data_ptr() for one in views if len(one)
    ]
    assert Matrices.of(matrices) is matrices
    assert {(one.dtype, one.stride()) for one in matrices.kinds} == {(one.dtype, one.stride()) for one in views}


def test_addresses_of_the_cells_of_one_tensor() -> None:
    cells = torch.zeros(5, 3)
    assert addresses_of(cells).tolist() == addresses_of(cells.unbind()).tolist() == [row.data_ptr() for row in cells]
    assert addresses_of(cells[:, 0]).tolist() == [row.data_ptr() for row in cells]


def test_units_of_rows() -> None:
    for size, units, before in ((1, ROWS, [0, 3, 3, 11]), (4, [1, 0, 2, 1], [0, 1, 1, 3])):
        found = units_of(ROWS, size)
        assert [each.tolist() for each in found[:2]] == [list(units), before]
        assert found[2] == sum(units)
    with pytest.raises(ValueError, match="read-only"):  # all callers have these arrays
        found[0][0] = 5
