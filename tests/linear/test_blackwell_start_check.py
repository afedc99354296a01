"""The check of native products at the start of a run: what passes, and that a wrong product is emulated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from megatron_lowprec import KeepBf16, convert
from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.mx_gemm import reference
from megatron_lowprec.kernels.mx_gemm.operand import MxOperand, from_tiles
from megatron_lowprec.linear.backends import resolved
from megatron_lowprec.linear.backends.blackwell_mx import dense
from megatron_lowprec.linear.backends.blackwell_mx.start_check import NativeCheckWarning, StartChecks, of_frequencies
from megatron_lowprec.linear.backends.blackwell_mx.why_not import WITH_BLOCK_SCALES
from megatron_lowprec.linear.backends.emulated.dense import EmulatedGemms
from megatron_lowprec.linear.backends.traced import backends_of
from megatron_lowprec.linear.compiled import traced_gemms
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from tests.linear import blackwell_cases
from tests.linear.blackwell_cases import BLOCK_SCALED, IN, OUT, load, on_blackwell, passes, pretended, same, unchecked


def zeros(a: MxOperand, b: MxOperand, **options: Any) -> torch.Tensor:
    return torch.zeros_like(reference.mx_gemm(a, b, **options))


def scales_in_rows(a: MxOperand, b: MxOperand, **options: Any) -> torch.Tensor:
    """As a unit that takes scales for row-major ones."""
    rows, blocks = a.codes.shape[0], -(-a.columns // a.block)
    plain = from_tiles(a.scales, rows, blocks).flatten()
    wrong = torch.cat((plain, plain.new_zeros(a.scales.numel() - plain.numel())))
    return reference.mx_gemm(a._replace(scales=wrong), b, **options)


def swapped_nibbles(a: MxOperand, b: MxOperand, **options: Any) -> torch.Tensor:
    return reference.mx_gemm(a._replace(codes=a.codes >> 4 | a.codes << 4), b, **options)


def without_last_terms(a: MxOperand, b: MxOperand, **options: Any) -> torch.Tensor:
    codes = a.codes.clone()
    codes[:, -8:] = 0
    return reference.mx_gemm(a._replace(codes=codes), b, **options)


@contextmanager
def product(wrong: Callable[..., torch.Tensor]) -> Iterator[None]:
    """The native product of the pretended GPU."""
    with patch.object(dense.BlackwellMxGemms, "_product", lambda self, *_: wrong):
        yield


@pytest.mark.parametrize("name", ["mxfp8_2d", "mxfp4_rht_sr", "nvfp4_all"])
def test_right_products_are_checked_once_a_size(name: str) -> None:
    with unchecked() as start:
        got = passes(name, finite=True)
        checks = dict(start.results)
        passes(name, finite=True)
        assert start.results == checks
    same(got, passes(name, finite=True))
    # each GEMM, with and without accumulation for wgrad, and each operand in each direction
    gemms = on_blackwell(load(name))
    assert len(checks) == 3 * len(gemms) + ("wgrad" in gemms)
    assert all(check.error <= 1.0 and not check.fault for check in checks.values())
    assert start.summary().startswith(f"native products checked at start: {len(checks)} comparisons, the worst at ")
    assert json.loads(json.dumps(start.as_json())) == start.as_json()


def test_an_inf_that_is_lost_is_found() -> None:
    def clamped(*operands: MxOperand, **options: Any) -> torch.Tensor:
        return reference.mx_gemm(*operands, **options).nan_to_num(nan=0.0)

    with unchecked(), product(clamped), pytest.warns(NativeCheckWarning, match="an Inf or a NaN .* is missing"):
        passes("mxfp8")


def test_sums_of_another_order_pass() -> None:
    """A product that adds halves of K, and truncates each half to 23 bits of fraction, is within the bound."""

    def halves(a: MxOperand, b: MxOperand, out_dtype: torch.dtype, alpha: float, **options: Any) -> torch.Tensor:
        x, w = reference.values(a), reference.values(b)
        half = x.shape[1] // 2
        parts = (x[:, :half] @ w[:, :half].t(), x[:, half:] @ w[:, half:].t())
        total = sum((part.view(torch.int32) & ~1).view(torch.float32) for part in parts) * alpha
        total = total if options["accumulate_into"] is None else options["accumulate_into"] + total
        return total.to(out_dtype if options["accumulate_into"] is None else torch.float32)

    with unchecked() as start, product(halves):
        passes("mxfp8", finite=True)
    assert not start.fault
    assert 0.0 < max(check.error for check in start.results.values()) <= 1.0


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (zeros, "mxfp8"),
        (scales_in_rows, "mxfp8"),
        (without_last_terms, "mxfp8"),
        (zeros, "nvfp4_all"),
        (scales_in_rows, "nvfp4_all"),
        (swapped_nibbles, "nvfp4_all"),
        (swapped_nibbles, "mxfp4_rht_sr"),
        (without_last_terms, "mxfp4_rht_sr"),
    ],
)
def test_wrong_products_are_emulated_or_end_the_run(wrong: Callable[..., torch.Tensor], name: str) -> None:
    """A fault of the hardware is found by the first product, whose result and all later ones are the emulated ones."""
    want = passes(name, finite=True)
    with unchecked() as start, product(wrong):
        with pytest.warns(NativeCheckWarning, match="NATIVE PRODUCTS FAILED THEIR CHECK, .* out of its bound"):
            got = passes(name, finite=True)
        assert len([check for check in start.results.values() if check.fault]) == 1
        assert start.summary().startswith("native products FAILED their check, and GEMMs are emulated: ")
        assert ("all of it is 0" in start.fault) == (wrong is zeros)
    same(got, want)
    with unchecked(required=True), product(wrong), pytest.raises(UserError, match="native products failed their check"):
        passes(name, finite=True)


def test_a_refused_product_is_a_fault() -> None:
    def refuses(*_: MxOperand, **__: Any) -> torch.Tensor:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul\nand more")

    want = passes("mxfp8", finite=True)
    with unchecked() as start, product(refuses), pytest.warns(NativeCheckWarning, match="NOT_SUPPORTED"):
        same(passes("mxfp8", finite=True), want)
    assert json.loads(json.dumps(start.as_json(), allow_nan=False))["fault"].endswith("calling cublasLtMatmul")


def test_a_full_memory_says_nothing_about_a_product() -> None:
    def fills(*_: MxOperand, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with unchecked() as start, product(fills), pytest.raises(torch.OutOfMemoryError):
        passes("mxfp8", finite=True)
    assert not start.fault


def test_operands_and_products_of_other_specs_are_checked() -> None:
    """Headroom multiplies operands and sums, and chooses another product."""
    recipe = load("mxfp8")
    fprop = replace(recipe.fprop, input=replace(recipe.fprop.input, headroom=0.75))  # type: ignore[type-var]
    with unchecked() as start:
        passes("mxfp8", finite=True)
        before = set(start.results)
        with patch.object(blackwell_cases, "load", lambda _: replace(recipe, fprop=fprop)):
            passes("mxfp8", finite=True)
    assert {key[:2] for key in start.results.keys() - before} >= {("fprop", "input")}
    assert sum(key[0] == "fprop" for key in start.results.keys() - before) == 2


def test_rounding_that_returns_zeros_is_found() -> None:
    """As a stochastic rounding on consumer Blackwell once did: codes are 0, and products of them are right."""
    want = passes("nvfp4_all", finite=True)
    quantize = EmulatedGemms.quantize

    def faulty(self: EmulatedGemms, *arguments: Any) -> Any:
        made, sums = quantize(self, *arguments)
        if self.packs and self.by_kernel and arguments[0] == "grad_output":
            for data in (made.rowwise_data, made.columnwise_data):
                if data is not None:
                    data.zero_()
        return made, sums

    with unchecked() as start, patch.object(EmulatedGemms, "quantize", faulty):
        with pytest.warns(NativeCheckWarning, match="dgrad's grad_output .* entries differ .* all of it is 0"):
            same(passes("nvfp4_all", finite=True), want)
        assert start.fault


@pytest.mark.slow
@pytest.mark.parametrize(("name", "first"), [("mxfp8", 0), ("nvfp4_all", 1)])
def test_a_compiled_layer_goes_on_by_emulation(name: str, first: int) -> None:
    """A graph is traced for native operands: casts keep their layout after a fault in step ``first``."""

    def losses(start: StartChecks | None) -> list[float]:
        torch.manual_seed(0)
        recipe = replace(get_recipe(name), keep_bf16=KeepBf16(), rules=())
        model = convert(nn.Linear(IN, OUT).bfloat16(), recipe)
        if start is not None:
            model.compile(backend="aot_eager", fullgraph=True)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), list[float]()
        for step, tokens in enumerate((64, 64, 96)):
            with ExitStack() as stack:
                if start is not None and step >= first:
                    stack.enter_context(product(zeros))
                if start is not None and step == first:
                    start.reset()  # else the size is known
                    stack.enter_context(pytest.warns(NativeCheckWarning, match="all of it is 0"))
                optimizer.zero_grad()
                loss = model(torch.randn(tokens, IN).bfloat16()).float().square().mean()
                loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    want = losses(None)
    caches = traced_gemms, backends_of
    for cache in caches:
        cache.cache_clear()
    torch._dynamo.reset()
    try:
        with unchecked() as start:
            assert losses(start) == want
    finally:
        for cache in caches:
            cache.cache_clear()
        torch._dynamo.reset()


def test_frequencies_of_stochastic_rounding() -> None:
    """A fair rounding passes; one to nearest of fractions below a half, and one by two steps, do not."""
    generator = torch.Generator().manual_seed(0)
    exact, step = torch.rand(1 << 16, generator=generator) * 0.4 + 3.0, torch.ones(1 << 16)
    fair = 3.0 + (torch.rand(1 << 16, generator=generator) < exact - 3.0).float()
    assert not of_frequencies("fair", fair, exact, step, 16).fault
    assert "is biased" in of_frequencies("nearest", torch.full_like(exact, 3.0), exact, step, 16).fault
    far = fair.clone()
    far[7] += 2.0
    assert "by more than a step" in of_frequencies("far", far, exact, step, 16).fault


@pytest.mark.gpu
@pytest.mark.parametrize("name", BLOCK_SCALED)
def test_products_on_this_gpu_are_within_their_bound(name: str) -> None:
    """The rehearsal: the same sources on any GPU. Before Blackwell, dot_scaled multiplies bf16 values.

    Operands have the reference's bits, and products lie within the check's bound of the emulated ones.
    """
    real = resolved.arch_of(torch.device("cuda"))
    start = StartChecks()
    with pretended(real if real in WITH_BLOCK_SCALES else "sm100"), patch.object(dense, "CHECKS", start):
        passes(name, finite=True, device="cuda")
    assert not start.fault, start.fault
    gemms = load(name).gemms
    operands = [getattr(gemms[gemm], tensor) for gemm in on_blackwell(load(name)) for tensor in GEMM_OPERANDS[gemm]]
    # those that are quantized again follow from numbers that a check does not have
    assert len(start.results) >= len(on_blackwell(load(name))) + sum(each.source == "original" for each in operands)
