"""``all_finite``: its answers, and the memory that it takes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lowprec.mcore.debug.finite import all_finite

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Results(TorchDispatchMode):
    """Keeps the values of the largest result of an op."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_anywhere_is_seen(device: str, dtype: torch.dtype, bad: float) -> None:
    for count in (1, 7, 4099):
        values = torch.full((count,), -torch.finfo(dtype).max, dtype=dtype, device=device)
        assert all_finite(values)
        for place in {0, count // 2, count - 1}:
            spoiled = values.clone()
            spoiled[place] = bad
            assert not all_finite(spoiled), (count, place)


@pytest.mark.parametrize("device", DEVICES)
def test_no_values_are_finite(device: str) -> None:
    assert all_finite(torch.empty(0, 5, device=device))


def test_no_op_has_a_result_of_more_than_a_value() -> None:
    values = torch.ones(64, 64, dtype=torch.bfloat16)
    with Results() as seen:
        all_finite(values)
    assert seen.largest == 1


@pytest.mark.gpu
def test_memory_on_a_gpu() -> None:
    values = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    all_finite(values)
    assert torch.cuda.max_memory_allocated() - before < values.nbytes / 100
