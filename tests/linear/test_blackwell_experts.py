"""Experts on Blackwell's block-scaled units, one after the other and in grouped products, by the CPU's model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from megatron_lowprec.kernels.mx_gemm import reference
from megatron_lowprec.kernels.mx_gemm.operand import MxOperand
from megatron_lowprec.linear import grouped_gemms
from megatron_lowprec.linear.backends.blackwell_mx import grouped as blackwell_grouped
from megatron_lowprec.linear.backends.blackwell_mx.start_check import NativeCheckWarning
from megatron_lowprec.linear.backends.blackwell_mx.why_not import product_of
from megatron_lowprec.linear.grouped_gemms import GroupedLinearGemms
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.token_rows import pack_rows, unpack_rows
from tests.linear.blackwell_cases import (
    BLOCK_SCALED,
    IN,
    OUT,
    STEP,
    TOKENS,
    gemms_of,
    load,
    on_blackwell,
    pretended,
    same,
    unchecked,
)
from tests.weekly import also_weekly


@pytest.mark.parametrize("name", also_weekly(BLOCK_SCALED, ("mxfp4_rht_sr", "nvfp4_all")))
def test_experts_equal_emulated_ones_bit_for_bit(name: str) -> None:
    """One after the other; an expert without tokens is emulated."""
    want = of_experts(name)
    with pretended():
        same(of_experts(name), want)


def of_experts(name: str, main_grads: bool = True) -> dict[str, torch.Tensor]:
    """Passes of a group, with weight gradients added to fp32 ones or new ones."""
    experts = GroupedLinearGemms([gemms_of(name, expert) for expert in range(len(TOKENS))])
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(OUT, IN, generator=generator).bfloat16() for _ in TOKENS]
    x, dy = (torch.randn(sum(TOKENS), size, generator=generator).bfloat16() for size in (IN, OUT))
    y, saved = experts.forward(x, TOKENS, weights, STEP, save_input=True)
    dx, dw = experts.backward(dy, TOKENS, saved, STEP, [torch.ones(OUT, IN) if main_grads else None for _ in TOKENS])
    assert dx is not None
    return {"y": y, "dx": dx, "dw": torch.stack([each for each in dw if each is not None])}


@contextmanager
def grouped(arch: str = "sm100") -> Iterator[Mock]:
    """Experts on a pretended GPU with torch's grouped product, which is the CPU's model; its calls."""
    with (
        pretended(arch),
        patch.object(grouped_gemms, "fuses", lambda _: True),
        patch.object(blackwell_grouped, "arch_of", lambda _: arch),
        patch.object(reference, "mx_grouped_gemm", wraps=reference.mx_grouped_gemm) as product,
    ):
        yield product


# MXFP8 in blocks and squares, NVFP4 with squares, draws and tensor scales, four-over-six
_GROUPED = ("mxfp8", "mxfp8_2d", "nvfp4_all", "nvfp4_four_over_six")


# without those whose other GEMMs are emulated, by kernels for a GPU
_ALL_THREE = [name for name in BLOCK_SCALED if len(on_blackwell(load(name))) == 3]


@pytest.mark.parametrize("name", also_weekly(_ALL_THREE, _GROUPED))
@pytest.mark.parametrize("main_grads", [True, False], ids=["added", "new"])
def test_grouped_products_equal_those_of_expert_by_expert(name: str, main_grads: bool) -> None:
    """fprop and dgrad in one product each, where torch takes them; wgrad expert by expert."""
    want, gemms = of_experts(name, main_grads), load(name).gemms
    with grouped() as product:
        same(of_experts(name, main_grads), want)
    native = on_blackwell(load(name))
    taken = {gemm for gemm in native if product_of(gemm, gemms[gemm], "sm100") == "scaled_mm"}
    assert product.call_count == ("fprop" in taken) + ("dgrad" in taken and "wgrad" in native)
    assert product.call_count == 2 or name not in _GROUPED


def test_codes_of_a_dispatcher_in_a_grouped_product() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(TOKENS), IN, generator=generator).bfloat16()
    weights = [torch.randn(OUT, IN, generator=generator).bfloat16() for _ in TOKENS]
    with grouped() as product:
        experts = GroupedLinearGemms([gemms_of("mxfp8", expert) for expert in range(len(TOKENS))])
        codes = experts.experts[0].quantize_tokens("input", x, weights[0], STEP)
        assert codes.spec is not None
        arrived = unpack_rows(pack_rows(codes), IN, codes.spec, torch.bfloat16)
        found = [experts.forward(each, TOKENS, weights, STEP)[0] for each in (arrived, x)]
    assert torch.equal(*found)
    assert product.call_count == 2


@pytest.mark.parametrize(("caches", "copies"), [(True, 1), (False, 2)])
def test_codes_of_all_experts_are_stacked_once_a_step(caches: bool, copies: int) -> None:
    """Where quantized weights are cached; else in each microbatch, as x is."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(TOKENS), IN, generator=generator).bfloat16()
    weights = [torch.randn(OUT, IN, generator=generator).bfloat16() for _ in TOKENS]
    with grouped(), patch.object(blackwell_grouped, "of_experts", wraps=blackwell_grouped.of_experts) as stacked:
        experts = GroupedLinearGemms([gemms_of("mxfp8", expert, caches) for expert in range(len(TOKENS))])
        found = [experts.forward(x, TOKENS, weights, RngStep(7, microbatch))[0] for microbatch in range(2)]
    assert torch.equal(*found)
    assert stacked.call_count == 2 + copies


@pytest.mark.parametrize(
    ("arch", "name", "reason"),
    [
        ("sm90", "mxfp8", "torch's grouped product of blocks needs one of sm100, sm103, this is sm90"),
        ("sm120", "mxfp8", "torch's grouped product of blocks needs one of sm100, sm103, this is sm120"),
        ("sm100", "mxfp4_rht_sr", "torch's grouped product takes MXFP8 of E4M3 without headroom, and NVFP4"),
        ("sm103", "nvfp4_all", None),
    ],
)
def test_experts_are_multiplied_in_a_loop_elsewhere(arch: str, name: str, reason: str | None) -> None:
    """On Hopper torch's product takes the CUDA context with it; GEMMs resolve to the row there only if pretended."""
    with grouped(), patch.object(blackwell_grouped, "arch_of", lambda _: arch):
        experts = GroupedLinearGemms([gemms_of(name, expert) for expert in range(2)])
        found = experts.why_in_a_loop("dgrad", torch.zeros(OUT, IN).bfloat16())
    assert found == (None if reason is None else f"blackwell_mx: {reason}")


@pytest.mark.parametrize("wrong", ["zeros", "refused", "order"])
def test_a_wrong_grouped_product_is_replaced_by_the_loop(wrong: str) -> None:
    """Products of single experts are checked on their own and stay native, also where they are required."""
    model = reference.mx_grouped_gemm

    def product(a: MxOperand, b: MxOperand, ends: torch.Tensor, **options: Any) -> torch.Tensor:
        if wrong == "refused":
            raise NotImplementedError("grouped gemm requires compile with a library")
        if wrong == "order":
            return model(a, b._replace(codes=b.codes.flip(0)), ends, **options)
        return torch.zeros_like(model(a, b, ends, **options))

    want = of_experts("nvfp4_all")
    with (
        unchecked(required=True) as start,
        grouped(),
        patch.object(blackwell_grouped, "CHECKS", start),
        patch.object(blackwell_grouped, "_product", lambda _: product),
        pytest.warns(NativeCheckWarning, match="a grouped native product failed its check"),
    ):
        same(of_experts("nvfp4_all"), want)
    assert not start.fault
    assert start.experts_fault.startswith("fprop of 3 experts (256, 64) of E2M1 on sm100: ")
    assert "experts run one after the other" in start.summary()
    assert len([key for key in start.results if key[0] == "experts"]) == 1


def test_right_grouped_products_are_checked() -> None:
    with unchecked() as start, grouped(), patch.object(blackwell_grouped, "CHECKS", start):
        of_experts("nvfp4_all")
    assert not start.experts_fault
    assert [key[1] for key in start.results if key[0] == "experts"] == ["fprop", "dgrad"]
