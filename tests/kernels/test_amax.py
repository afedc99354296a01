"""The amaxes that kernels find, of what they write and of operands."""

import pytest

from megatron_lowprec.recipe.schema import HADAMARD_BLOCKS


@pytest.mark.parametrize("group", HADAMARD_BLOCKS)
def test_a_thread_holds_one_long_group_at_most(group: int) -> None:
    """Several spill their registers."""
    pytest.importorskip("triton", reason="triton is not installed")
    from megatron_lowprec.kernels.amax.triton import _specialized

    _, height, width, warps = _specialized(rows=0, columns=2, rounds=False, group=group)
    assert height * width <= max(128, group) * 32 * warps
