"""The backend of Blackwell's block-scaled units, on a CPU by the model that reads their bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

from megatron_lowprec import KeepBf16, convert
from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.mx_gemm import reference
from megatron_lowprec.kernels.mx_gemm.operand import MxOperand, aligned_codes, from_tiles
from megatron_lowprec.kernels.quantize.reference import encode
from megatron_lowprec.kernels.quantize.rule import Direction, MxCast, MxRule
from megatron_lowprec.linear import grouped_gemms
from megatron_lowprec.linear.backends import resolved, table
from megatron_lowprec.linear.backends.blackwell_mx import dense, sampled
from megatron_lowprec.linear.backends.blackwell_mx import grouped as blackwell_grouped
from megatron_lowprec.linear.backends.blackwell_mx.operands import operand_of
from megatron_lowprec.linear.backends.blackwell_mx.start_check import NativeCheckWarning, StartChecks, of_frequencies
from megatron_lowprec.linear.backends.blackwell_mx.why_not import WITH_BLOCK_SCALES, product_of, why_not
from megatron_lowprec.linear.backends.emulated import cast_plan
from megatron_lowprec.linear.backends.emulated.dense import EmulatedGemms
from megatron_lowprec.linear.backends.protocol import BOTH, COLUMNWISE, ROWWISE, GemmBackend
from megatron_lowprec.linear.backends.table import BACKENDS, choose, choose_without_gpu, emulated_rows
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.linear.backends.traced import backends_of
from megatron_lowprec.linear.compiled import traced_gemms
from megatron_lowprec.linear.grouped_gemms import GroupedLinearGemms
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import SIDES, LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.quantizer import quantize_by_reference
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.token_rows import pack_rows, unpack_rows
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.registry import get_recipe, recipes
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, LinearRecipe
from megatron_lowprec.shipped import names_in
from tests.weekly import also_weekly

IN, OUT = 128, 256
TOKENS = (37, 0, 64)  # of experts; a tile, a block and a transform end within
STEP = RngStep(7, 0)


def load(name: str) -> LinearRecipe:
    return get_recipe(name) if name in recipes() else load_recipe(name)


def on_blackwell(recipe: LinearRecipe, arch: str = "sm100") -> frozenset[str]:
    """The GEMMs that the backend takes."""
    chosen = {gemm: choose(gemm, spec, Target(arch, IN, OUT)).backend for gemm, spec in recipe.gemms.items()}
    return frozenset(gemm for gemm, backend in chosen.items() if backend == "blackwell_mx")


ALL = [*recipes(), *(f"configs/recipes/{name}.yaml" for name in names_in("configs/recipes"))]
BLOCK_SCALED = [name for name in ALL if on_blackwell(load(name))]
# a kind of operand each: scale rules, both gradients' formats, square blocks, transforms, headroom, tensor scales,
# four-over-six, corrections, operands of fprop quantized again
_EACH = ("mxfp8_e5m2_grad", "mxfp8_2d", "mxfp4", "mxfp4_rht_sr", "nvfp4_all", "nvfp4_four_over_six", "quartet2")


@contextmanager
def pretended(arch: str = "sm100") -> Iterator[None]:
    """Layers on the CPU resolve their GEMMs as on a GPU, to rows that run on a CPU."""
    rows = tuple(row for row in BACKENDS if row.name != "hopper_fp8")
    with patch.object(table, "BACKENDS", rows), patch.object(resolved, "arch_of", lambda _: arch):
        yield


def gemms_of(name: str, expert: int = 0, cache_weights: bool = False) -> LinearGemms:
    return LinearGemms(load(name), LinearId(3, "fc1", expert), 1, AmaxHistory, cache_weights=cache_weights)


def passes(
    name: str, cache_weights: bool = False, finite: bool = False, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Two microbatches through a layer, the second one's weight gradient accumulated."""
    gemms, found = gemms_of(name, cache_weights=cache_weights), dict[str, torch.Tensor]()
    for history, _ in gemms.histories.values():
        history.to(torch.device(device))
    generator = torch.Generator().manual_seed(4)
    w, total = torch.randn(OUT, IN, generator=generator).bfloat16().to(device), torch.ones(OUT, IN, device=device)
    for microbatch in range(2):
        rng_step = RngStep(7, microbatch)
        x, dy = (torch.randn(100, size, generator=generator).bfloat16() for size in (IN, OUT))
        x[3] = 0.0
        if not finite:
            x[5, 7] = torch.inf
        bias = torch.randn(OUT, generator=generator).bfloat16()
        x, dy, bias = (each.to(device) for each in (x, dy, bias))
        found[f"y {microbatch}"], saved = gemms.forward(x, w, rng_step, bias_O=bias, save_input=True)
        grad = gemms.grad_output(dy, rng_step)
        found[f"dx {microbatch}"] = gemms.dgrad(grad, saved.weight, rng_step, saved.weight_amax)
        accumulate = total if microbatch else None
        found[f"dw {microbatch}"] = gemms.wgrad(grad, saved.input(), rng_step, accumulate_into=accumulate).clone()
        for history, _ in gemms.histories.values():
            history.update()
    return found


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for what, value in want.items():
        assert got[what].dtype == value.dtype
        assert torch.equal(got[what].nan_to_num(nan=1e30), value.nan_to_num(nan=1e30)), what


def test_the_backend_takes_all_gemms_of_mx_or_nvfp4_operands() -> None:
    """Of every registered recipe; shipped files also have formats and scales without such units."""
    reasons: dict[str, set[str]] = {}
    for name in ALL:
        for gemm, spec in load(name).gemms.items():
            operands = [getattr(spec, tensor) for tensor in GEMM_OPERANDS[gemm]]
            if any(each is not None and each.scale_format != "fp32" for each in operands):
                reason = why_not(gemm, spec, Target("sm100", IN, OUT))
                if reason is not None:
                    reasons.setdefault(reason, set()).add(name)
    assert not set.union(*reasons.values()) & set(recipes())
    assert sorted(reasons) == [
        "an operand stays in the compute dtype",
        "no product of E2M1 with UE5M3 scales of 16 entries",
        "one scale above the blocks' is that of the tensor, not of outer blocks",
    ]


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


def test_reasons_against_a_gemm_are_named() -> None:
    wide = Target("sm100", IN, OUT)
    nvfp4, blocks = get_recipe("nvfp4_all").fprop, get_recipe("fp8_blockwise").fprop
    assert why_not("fprop", nvfp4, wide) is None
    assert why_not("fprop", nvfp4, wide._replace(arch="sm90")) == "no NVFP4 GEMM on sm90"
    assert why_not("fprop", nvfp4, wide._replace(out_features=8)) == "out_features 8 is no multiple of 16"
    assert why_not("fprop", nvfp4, wide._replace(dtype="float32")) == (
        "block-scaled GEMMs are for bf16 models, this one is float32"
    )
    assert "not fp32 scales" in str(why_not("fprop", blocks, wide))
    found = choose("fprop", blocks, wide)
    assert found.describe() == "emulated (hopper_fp8: no FP8 GEMM of granularity 128x128 and 1x128 on sm100)"
    ue5m3 = load("configs/recipes/ue5m3.yaml").fprop
    assert "no product of E2M1 with UE5M3 scales" in str(why_not("fprop", ue5m3, wide))
    assert choose_without_gpu("fprop", nvfp4, wide).why == "no GPU here; blackwell_mx on sm100, sm103, sm120"


def test_native_off_leaves_the_backend_out() -> None:
    """Verified backends stay; the header says which products were never run here."""
    mxfp8, fp8 = get_recipe("mxfp8").fprop, get_recipe("fp8_current").fprop
    wide, off = Target("sm100", IN, OUT), emulated_rows(False, "off")
    assert choose("fprop", mxfp8, wide, off).describe() == ("emulated (blackwell_mx: --native off)")
    assert choose("fprop", fp8, wide, off).backend == "hopper_fp8"
    assert choose("fprop", mxfp8, wide, emulated_rows(True, "auto")).why == "asked"
    assert choose("fprop", mxfp8, wide, emulated_rows(False, "require")).header(["fprop"], "sm100") == (
        "fprop: blackwell_mx on sm100, unverified hardware, checked at start"
    )


@pytest.mark.parametrize(
    ("name", "gemm", "on_10", "on_12"),
    [
        ("mxfp8", "fprop", "scaled_mm", "dot_scaled"),
        ("mxfp8_e5m2_grad", "dgrad", "dot_scaled", "dot_scaled"),
        ("mxfp4_sr", "wgrad", "dot_scaled", "dot_scaled"),
        ("nvfp4_all", "wgrad", "scaled_mm", "dot_scaled"),
    ],
)
def test_products_by_device(name: str, gemm: str, on_10: str, on_12: str) -> None:
    """torch's scaled product where it has one: E4M3 without headroom, and NVFP4, on compute capability 10."""
    spec = get_recipe(name).gemms[gemm]
    assert [product_of(gemm, spec, arch) for arch in ("sm100", "sm103", "sm120")] == [on_10, on_10, on_12]


# ---- check at start


@contextmanager
def unchecked(required: bool = False) -> Iterator[StartChecks]:
    """A pretended GPU whose products are to be checked, with checks of its own."""
    start = StartChecks()
    start.required = required
    with (
        pretended(),
        patch.object(dense, "CHECKS", start),
        patch.object(StartChecks, "applies", staticmethod(lambda _: True)),
    ):
        yield start


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
        with patch(f"{__name__}.load", lambda _: replace(recipe, fprop=fprop)):
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
