"""Check at start of larger operands: the compared tiles show each fault, and no more than they are decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from megatron_lowprec.kernels.mx_gemm import reference
from megatron_lowprec.kernels.mx_gemm.operand import MxOperand, from_tiles
from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.linear.backends.blackwell_mx.dense import BlackwellMxGemms
from megatron_lowprec.linear.backends.blackwell_mx.operands import operand_of
from megatron_lowprec.linear.backends.blackwell_mx.sampled import _moved, product_check, sampled_product, sampled_rows
from megatron_lowprec.linear.backends.blackwell_mx.start_check import Check
from megatron_lowprec.linear.backends.protocol import COLUMNWISE, ROWWISE
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import SIDES, LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RandomStream, RngStep
from megatron_lowprec.recipe.registry import get_recipe
from tests.kernels.mx_gemm_cases import KINDS, operand

ROWS, COLUMNS, K = 552, 648, 320  # 5 and 6 tiles, of which 3 each are compared; the last are ragged
STEP = RngStep(7, 0)
ALPHA = 16 / 9

Product = Callable[[MxOperand, MxOperand], torch.Tensor]


def right(a: MxOperand, b: MxOperand, alpha: float = ALPHA) -> torch.Tensor:
    return reference.mx_gemm(a, b, alpha=alpha, out_dtype=torch.float32)


def of_scales(change: Callable[[torch.Tensor, MxOperand], torch.Tensor]) -> Product:
    return lambda a, b: right(a._replace(scales=change(a.scales, a)), b)


def in_rows(scales: torch.Tensor, a: MxOperand) -> torch.Tensor:
    rows, blocks = a.codes.shape[0], -(-a.columns // a.block)
    plain = from_tiles(scales, rows, blocks).flatten()
    return torch.cat((plain, plain.new_zeros(scales.numel() - plain.numel())))


def tiles_down_first(scales: torch.Tensor, a: MxOperand) -> torch.Tensor:
    return scales.view(-(-a.codes.shape[0] // 128), -1, 512).transpose(0, 1).reshape(-1)


def of_codes(change: Callable[[torch.Tensor], torch.Tensor]) -> Product:
    return lambda a, b: right(a._replace(codes=change(a.codes)), b)


def in_columns(codes: torch.Tensor) -> torch.Tensor:
    """As a unit that reads codes that lie in columns."""
    return codes.t().reshape(codes.shape)


def without_last_row(a: MxOperand, b: MxOperand) -> torch.Tensor:
    product = right(a, b)
    product[-1] = 0.0
    return product


def without_last_terms(codes: torch.Tensor) -> torch.Tensor:
    return torch.cat((codes[:, :-8], torch.zeros_like(codes[:, -8:])), 1)


FAULTS: dict[str, Product] = {
    "zeros": lambda a, b: torch.zeros_like(right(a, b)),
    "scales in rows": of_scales(in_rows),
    "tiles of scales in another order": of_scales(tiles_down_first),
    "no scales": of_scales(lambda scales, a: torch.full_like(scales, 127 if a.block == 32 else 0x38)),
    "swapped nibbles": of_codes(lambda codes: codes >> 4 | codes << 4),
    "transposed codes": of_codes(in_columns),
    "no last terms": of_codes(without_last_terms),
    "no tensor scale": lambda a, b: right(a._replace(tensor_scale=None), b),
    "no alpha": lambda a, b: right(a, b, alpha=1.0),
    "operands of each other": lambda a, b: right(b, a).t().flip(0),
    "no last row": without_last_row,
}


@contextmanager
def few_rows() -> Iterator[None]:
    """Fails if more than the rows of three tiles are decoded."""
    values = reference.values

    def counted(one: MxOperand) -> torch.Tensor:
        assert one.codes.shape[0] <= 3 * 128
        return values(one)

    with patch.object(reference, "values", counted):
        yield


def checked(product: Product, kind: tuple[str, str, int]) -> Check:
    a, b = operand(ROWS, K, kind[0], kind[2], 1, 0.375), operand(COLUMNS, K, kind[1], kind[2], 2)
    got = product(a, b)
    with few_rows():
        return product_check("fprop", got, (a, b), ALPHA, None)


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_is_in_the_compared_tiles(kind: tuple[str, str, int]) -> None:
    assert not checked(right, kind).fault
    nibbles = () if kind[0] == "e2m1" else ("swapped nibbles",)
    missed = [what for what, wrong in FAULTS.items() if what not in nibbles and not checked(wrong, kind).fault]
    assert not missed


def test_compared_rows() -> None:
    assert sampled_rows(5) == [slice(0, 5)]
    assert sampled_rows(129) == [slice(0, 128), slice(128, 129)]
    assert sampled_rows(ROWS) == [slice(0, 128), slice(256, 384), slice(512, 552)]
    matrix = torch.arange(300 * 130).view(300, 130)
    assert torch.equal(sampled_product(matrix), matrix)


def test_what_is_added_to_is_compared() -> None:
    a, b = operand(ROWS, K, "e4m3", 32, 1), operand(COLUMNS, K, "e4m3", 32, 2)
    before = torch.full((ROWS, COLUMNS), 1e6)
    added = sampled_product(before)
    assert not product_check("wgrad", before + right(a, b), (a, b), ALPHA, added.clone()).fault
    assert product_check("wgrad", right(a, b), (a, b), ALPHA, added.clone()).fault


# ---- operands


def backend_of(name: str) -> BlackwellMxGemms:
    backend = LinearGemms(get_recipe(name), LinearId(3, "fc1"), 1, AmaxHistory).backends.built("blackwell_mx")
    assert isinstance(backend, BlackwellMxGemms)
    return backend


def operand_checked(
    backend: BlackwellMxGemms, tensor: str, columnwise: bool, change: Callable[[MxOperand], MxOperand] | None = None
) -> Check:
    matrix = torch.randn(ROWS, COLUMNS - 4, generator=torch.Generator().manual_seed(5)).bfloat16()
    name = SIDES[tensor][columnwise]
    spec = backend.specs[name, tensor]
    assert spec is not None
    made = operand_of(backend.quantize(tensor, matrix, STEP, (ROWWISE, COLUMNWISE)[columnwise][0])[0], columnwise)
    last = matrix.t() if columnwise else matrix
    with few_rows():
        return backend._check_operand(name, tensor, last, spec, STEP, made if change is None else change(made))


@pytest.mark.parametrize("name", ["mxfp8_2d", "mxfp4_rht_sr", "nvfp4_all", "nvfp4_four_over_six", "quartet2"])
def test_right_operands_pass(name: str) -> None:
    """Square blocks, draws, transforms, tensor scales, corrections, in both directions."""
    backend = backend_of(name)
    for tensor, names in SIDES.items():
        for columnwise, gemm in enumerate(names):
            spec = backend.specs[gemm, tensor]
            if spec is not None and spec.source == "original":
                check = operand_checked(backend, tensor, bool(columnwise))
                assert not check.fault, check


def test_wrong_operands_are_found() -> None:
    backend = backend_of("nvfp4_all")
    above = torch.full((1, 1), 0.25)
    for change, fault in (
        (lambda one: one._replace(codes=torch.zeros_like(one.codes)), "all of it is 0"),
        (lambda one: one._replace(codes=in_columns(one.codes)), "entries differ"),
        (lambda one: one._replace(codes=one.codes >> 4 | one.codes << 4), "entries differ"),
        (lambda one: one._replace(scales=tiles_down_first(one.scales, one)), "entries differ"),
        (lambda one: one._replace(tensor_scale=above), "1 of 1 entries differ"),
    ):
        assert fault in operand_checked(backend, "grad_output", True, change).fault


def test_draws_of_later_rows() -> None:
    """Across the halves of a gated shard."""
    whole = RandomStream((1, 2), STEP, ShardSlice(8, 200, 500), ShardSlice(16))
    draws = [each.uniform(32, 16, torch.device("cpu")) for each in (whole, _moved(whole, 128))]
    assert torch.equal(draws[0](slice(128, 256)), draws[1](slice(0, 128)))
