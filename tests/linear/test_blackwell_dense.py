"""Products of dense layers on Blackwell's block-scaled units, on a CPU by the model that reads their bytes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_lowprec.kernels.mx_gemm import reference
from megatron_lowprec.kernels.mx_gemm.operand import aligned_codes
from megatron_lowprec.kernels.quantize.reference import encode
from megatron_lowprec.kernels.quantize.rule import Direction, MxCast, MxRule
from megatron_lowprec.linear.backends.blackwell_mx import dense, sampled
from megatron_lowprec.linear.backends.blackwell_mx.operands import operand_of
from megatron_lowprec.linear.backends.emulated import cast_plan
from megatron_lowprec.linear.backends.protocol import BOTH, COLUMNWISE, ROWWISE, GemmBackend
from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.quantization.quantizer import quantize_by_reference
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.token_rows import pack_rows, unpack_rows
from tests.linear.blackwell_cases import (
    BLOCK_SCALED,
    IN,
    OUT,
    STEP,
    gemms_of,
    load,
    on_blackwell,
    passes,
    pretended,
    same,
)
from tests.weekly import also_weekly

# a kind of operand each: scale rules, both gradients' formats, square blocks, transforms, headroom, tensor scales,
# four-over-six, corrections, operands of fprop quantized again
_EACH = ("mxfp8_e5m2_grad", "mxfp8_2d", "mxfp4", "mxfp4_rht_sr", "nvfp4_all", "nvfp4_four_over_six", "quartet2")


@pytest.mark.parametrize("name", also_weekly(BLOCK_SCALED, _EACH))
def test_products_equal_emulated_ones_bit_for_bit(name: str) -> None:
    """The model multiplies what it reads from the native operands' bytes, in the emulated backend's order."""
    want = passes(name)
    with pretended():
        spied = patch.object(reference, "values", wraps=reference.values)
        with spied as values:
            got = passes(name)
    assert values.call_count == 2 * 2 * len(on_blackwell(load(name)))
    same(got, want)


def test_cached_weights_and_both_gradients_formats() -> None:
    want = passes("nvfp4_all", cache_weights=True)
    with pretended("sm120"):
        same(passes("nvfp4_all", cache_weights=True), want)


@pytest.mark.parametrize("name", ["mxfp8_2d", "mxfp4_rht_sr", "nvfp4_all"])
def test_operands_are_those_of_the_emulated_backend(name: str) -> None:
    """Decoded operands, in each direction, are the emulated backend's: both validate, and dequantize alike."""
    gemms, generator = gemms_of(name), torch.Generator().manual_seed(1)
    native, emulated = (gemms.backends.built(row) for row in ("blackwell_mx", "emulated"))
    for tensor, size in (("input", (100, IN)), ("weight", (OUT, IN)), ("grad_output", (100, OUT))):
        matrix = torch.randn(size, generator=generator).bfloat16()
        for columnwise, request in enumerate((ROWWISE[0], COLUMNWISE[0])):
            if getattr(load(name).gemms[SIDES[tensor][columnwise]], tensor) is None:
                continue
            mine = native.quantize(tensor, matrix, STEP, request)[0].validate()
            theirs = emulated.quantize(tensor, matrix, STEP, request)[0].validate()
            operand = operand_of(mine, bool(columnwise))
            same_sizes(dense_of(native).empty(tensor, matrix, request), mine)
            want = theirs.columnwise_data if columnwise else theirs.rowwise_data
            assert want is not None
            assert torch.equal(reference.values(operand).bfloat16(), want)
            if name == "mxfp8_2d" or (tensor, columnwise) == ("input", 0):
                of_codes = request._replace(codes=True, rowwise=True, columnwise=False)
                same_values = theirs if columnwise else emulated.quantize(tensor, matrix, STEP, of_codes)[0]
                assert torch.equal(mine.dequantize(), same_values.dequantize())


def dense_of(backend: GemmBackend) -> dense.BlackwellMxGemms:
    assert isinstance(backend, dense.BlackwellMxGemms)
    return backend


def same_sizes(empty: QuantizedTensor | None, made: QuantizedTensor) -> None:
    """A compiler's sizes are those of the operand."""
    for name in QuantizedTensor.__slots__:
        mine, theirs = getattr(empty, name), getattr(made, name)
        if isinstance(theirs, torch.Tensor):
            assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype), name
        else:
            assert mine == theirs, name


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_all"])
def test_stored_weights_are_multiplied_as_codes(name: str) -> None:
    """A weight that is kept as values of the grid and scales gives the operand of a cast."""
    native, w = gemms_of(name).backends.built("blackwell_mx"), torch.randn(OUT, IN).bfloat16()
    for gemm, request in (("fprop", ROWWISE[0]), ("dgrad", COLUMNWISE[0])):
        columnwise = gemm == "dgrad"

        class Stored:
            def quantized(self, *, columnwise: bool, codes: bool, on_grid: bool) -> QuantizedTensor:
                assert on_grid
                assert not codes
                spec = load(name).gemms["dgrad" if columnwise else "fprop"].weight
                found = quantize_by_reference(w.t() if columnwise else w, spec)
                data = found.data.bfloat16(), found.scale
                ways = {"columnwise_data": data[0], "columnwise_scale": data[1]}
                ways = ways if columnwise else {"rowwise_data": data[0], "rowwise_scale": data[1]}
                ways["columnwise_tensor_scale" if columnwise else "rowwise_tensor_scale"] = found.tensor_scale
                return QuantizedTensor(w.shape, w.dtype, spec, **ways)

        mine = operand_of(native.primary_weight(gemm, Stored()).validate(), columnwise)
        want = operand_of(native.quantize("weight", w, STEP, request)[0], columnwise)
        assert torch.equal(mine.codes, want.codes)
        assert torch.equal(mine.scales, want.scales)
        assert mine.tensor_scale == want.tensor_scale


def test_codes_of_a_dispatcher_are_multiplied() -> None:
    """Tokens that arrive as codes give the products of tokens quantized here."""
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(40, IN, generator=generator).bfloat16(), torch.randn(OUT, IN, generator=generator).bfloat16()
    for name in ("mxfp8", "mxfp8_e5m2_act"):
        with pretended():
            gemms = gemms_of(name)
            codes = gemms.quantize_tokens("input", x, w, STEP)
            assert codes.spec is not None
            arrived = unpack_rows(pack_rows(codes), IN, codes.spec, torch.bfloat16)
            assert torch.equal(gemms.forward(arrived, w, STEP)[0], gemms.fprop(x, w, STEP))


def test_statistics_are_those_of_the_emulated_backend() -> None:
    x = torch.randn(64, IN, generator=torch.Generator().manual_seed(1)).bfloat16()
    for name, gemm in (("mxfp8", "fprop"), ("quartet2", "wgrad")):
        gemms = gemms_of(name)
        mine, theirs = (
            gemms.backends.built(row).error_stats(gemm, "input", x, STEP) for row in ("blackwell_mx", "emulated")
        )
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["nvfp4_all", "mxfp8_2d", "nvfp4_four_over_six"])
def test_square_blocks_by_the_kernel_are_those_by_the_reference(name: str) -> None:
    """The kernel's outputs along columns, which a test compares interpreted, become both directions."""
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    gemms = gemms_of(name)
    native = gemms.backends.built("blackwell_mx")
    want = [native.quantize("weight", weight, STEP, request)[0] for request in (ROWWISE[0], COLUMNWISE[0])]

    class Kernel:
        @staticmethod
        def quantize_mx(x: torch.Tensor, rule: MxRule, columns: Direction, codes: bool, **_: Any) -> MxCast:
            assert codes
            spec = load(name).gemms["fprop"].weight
            made = quantize_by_reference(x.t(), spec)
            columnwise = aligned_codes(encode(made.data, rule.fmt), rule.fmt.bits)
            scale = made.scale.repeat_interleave(rule.block_rows, 0)
            return MxCast(columnwise_data=columnwise, columnwise_scale=scale, columnwise_tensor_scale=made.tensor_scale)

    with (
        patch.object(dense, "fuses_mx", lambda *_, **__: True),
        patch.object(cast_plan, "with_amaxes", lambda _, __, rows, columns, *___: {"rows": rows, "columns": columns}),
        patch.object(cast_plan, "load", lambda _: Kernel),
    ):
        for request in (ROWWISE[0], COLUMNWISE[0], BOTH[0]):
            made = native.quantize("weight", weight, STEP, request)[0].validate()
            for columnwise, wanted in enumerate((request.rowwise, request.columnwise)):
                if wanted:
                    mine, theirs = operand_of(made, bool(columnwise)), operand_of(want[columnwise], bool(columnwise))
                    assert torch.equal(mine.codes, theirs.codes)
                    assert torch.equal(mine.scales, theirs.scales)
                    assert mine.tensor_scale == theirs.tensor_scale
                    # equal tensors may lie in memory otherwise, and a product has addresses
                    assert mine.codes.is_contiguous()
                    assert torch.equal(reference.values(mine), reference.values(theirs))


def test_operands_of_a_compiled_graph_have_no_shape() -> None:
    """Its operators pass data and scales on: the product is that of the padded operand."""
    gemms, generator = gemms_of("nvfp4_all"), torch.Generator().manual_seed(1)
    native = gemms.backends.built("blackwell_mx")
    dy, x = (torch.randn(104, size, generator=generator).bfloat16() for size in (OUT, IN))
    sides = [native.quantize(name, of, STEP, COLUMNWISE[0])[0] for name, of in (("grad_output", dy), ("input", x))]
    bare = [
        QuantizedTensor(
            torch.Size((OUT, OUT)),
            torch.uint8,
            one.spec,
            columnwise_data=one.columnwise_data,
            columnwise_scale=one.columnwise_scale,
            columnwise_tensor_scale=one.columnwise_tensor_scale,
        )
        for one in sides
    ]
    want, got = (native.gemm("wgrad", *each, torch.float32) for each in (sides, bare))
    assert operand_of(bare[0], True).columns == 128  # 104 tokens, 112 with the transform's zeros
    magnitudes = (sampled.magnitudes(operand_of(one, True)) for one in sides)
    bound = 2 * 128 * 2.0**-24 * reference.mx_gemm(*magnitudes, out_dtype=torch.float32)  # of sums in two orders
    assert ((got - want).abs() <= bound).all()
