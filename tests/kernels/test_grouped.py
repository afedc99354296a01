"""Grouped kernels give the bits of their references: interpreted here, compiled where there is a GPU."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.grouped_casts import cast_differences
from tests.kernels.grouped_operands import CASES, Case, operand_differences
from tests.kernels.grouped_products import (
    fp8_differences,
    fp8_tiling_differences,
    product_differences,
    tiling_differences,
)
from tests.kernels.interpreted import assert_no_differences


@pytest.mark.slow
def test_interpreted_kernels_equal_the_references() -> None:
    assert_no_differences("tests.kernels.grouped_cases")


def test_tuning_keeps_its_scratch_until_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the allocator gives the scratch memory to the launch's table of addresses, which the kernel overwrites."""
    grouped = pytest.importorskip("megatron_lowprec.kernels.grouped_gemm.triton", reason="triton is not installed")
    made: list[weakref.ref[torch.Tensor]] = []
    addresses: list[list[int]] = []
    alive: list[bool] = []
    empty_like = torch.empty_like

    def scratch_like(tensor: torch.Tensor) -> torch.Tensor:
        scratch = empty_like(tensor)
        made.append(weakref.ref(scratch))
        return scratch

    def launch(kernel: Any, programs: int, arguments: tuple[Any, ...], *_: Any, **__: Any) -> None:
        addresses.append(arguments[2][0].tolist())
        alive.append(made[0]() is not None)

    def measured(entries: int, run: Any, device: torch.device) -> Any:
        run(grouped.TILINGS[torch.bfloat16][1])
        return grouped.TILINGS[torch.bfloat16][0]

    monkeypatch.setattr(torch, "empty_like", scratch_like)
    monkeypatch.setattr(grouped, "launch", launch)
    monkeypatch.setattr(grouped, "_tuned", lambda *_: SimpleNamespace(choose=measured))
    totals = [torch.zeros(128, 128) for _ in range(2)]
    rows = torch.zeros(64, 128, dtype=torch.bfloat16)
    grouped.grouped_wgrad_(rows, rows, [32, 32], totals, alpha=1.0, overwrite=[False, False])
    measuring, final = addresses
    assert alive[0]
    assert final == [total.data_ptr() for total in totals]
    assert not set(measuring) & set(final)


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
def test_compiled_fp8_products_of_every_tiling_equal_the_reference() -> None:
    assert fp8_tiling_differences("cuda") == []


@pytest.mark.gpu
def test_compiled_fp8_casts_equal_the_reference() -> None:
    assert cast_differences("cuda") == []
