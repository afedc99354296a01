"""GEMMs of experts by the grouped ops are those of the loop: keys, padding, caches and main gradients."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_lowprec.kernels.matrices import Matrices
from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.linear import grouped_gemms
from megatron_lowprec.linear.backends import resolved
from megatron_lowprec.linear.backends.emulated import grouped as grouped_emulated
from megatron_lowprec.linear.backends.grouped_protocol import grouped_backend
from megatron_lowprec.linear.backends.hopper_fp8 import grouped as grouped_hopper_fp8
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.grouped_gemms import GroupedLinearGemms
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import SIDES, LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.quantizer import quantize
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.token_rows import pack_rows, unpack_rows
from megatron_lowprec.recipe.coverage import primary_weight_spec
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.registry import get_recipe
from tests.kernels.mx_cases import nvfp4_recipe

STEP = RngStep(0, 0)
TOKENS, IN, OUT = (5, 0, 150, 32), 128, 256
ROUNDED = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-18}  # sums of another order, rounded once
NVFP4 = nvfp4_recipe()
GEMMS, BACKWARD = ("fprop", "dgrad", "wgrad"), ("dgrad", "wgrad")
OF_BLOCKS = grouped_emulated._KNOWN_BLOCKS
TETRAJET, UE5M3 = "configs/recipes/tetrajet.yaml", "configs/recipes/ue5m3.yaml"
SHARD = {"O": ShardSlice(256, gate_offset=128, gate_stride=256)}


@contextmanager
def grouped_ops(arch: str = "cpu", module_of_ops: str = "reference") -> Iterator[list[str]]:
    """The grouped paths on a CPU, as on ``arch``, with the ops' references; the ops that were taken."""
    taken = []

    def load(op: str) -> object:
        taken.append(op)
        return import_module(f"megatron_lowprec.kernels.{op}.{module_of_ops}")

    with ExitStack() as stack:
        for module in (grouped_emulated, grouped_hopper_fp8):
            stack.enter_context(patch.object(module, "load", load))
        stack.enter_context(patch.object(grouped_gemms, "fuses", lambda _: True))
        stack.enter_context(patch.object(resolved, "arch_of", lambda _: arch))
        yield taken


def passes(
    name: str, accumulates: bool, saves: bool = True, primary: bool = False, save_memory: bool = False
) -> dict[str, torch.Tensor]:
    """Two microbatches through the experts of one layer; ``primary`` for FP8 primary weights."""
    recipe = NVFP4 if name == NVFP4.name else load_recipe(name)
    experts = [
        LinearGemms(
            recipe,
            LinearId(3, "fc1", expert, spans=SHARD, split="O"),
            1,
            AmaxHistory,
            cache_weights=True,
            save_memory=save_memory,
        )
        for expert in range(4)
    ]
    generator, found = torch.Generator().manual_seed(4), {}
    weights = [torch.randn(OUT, IN, generator=generator).bfloat16() for _ in experts]
    if primary:
        spec = primary_weight_spec(get_recipe(name))
        assert spec is not None
        weights = [Fp8Weight.of(weight, spec) for weight in weights]
    totals = [torch.full((OUT, IN), torch.nan) if accumulates else None for _ in experts]
    for gemms in experts:
        gemms.main_grad_is_zero = accumulates
    for microbatch, tokens in enumerate((TOKENS, TOKENS[::-1])):
        group, rng_step = GroupedLinearGemms(experts), RngStep(7, microbatch)
        x, dy = (torch.randn(sum(tokens), size, generator=generator).bfloat16() for size in (IN, OUT))
        found[f"y {microbatch}"], saved = group.forward(x, tokens, weights, rng_step, save_input=saves)
        saved = saved.without_tensors().with_tensors(saved.tensors())
        found[f"dx {microbatch}"], dw = group.backward(dy, tokens, saved, rng_step, totals)
        found[f"dw {microbatch}"] = torch.stack(dw).clone()
        for tensor in experts[0].histories:
            histories = [gemms.histories[tensor][0] for gemms in experts]
            found[f"amax of {tensor} {microbatch}"] = torch.cat([history.newest for history in histories])
            for history in histories:
                history.update()
    return found


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("bf16", 3),
        ("mxfp8", 3),
        ("mxfp4_sr", 3),
        ("mxfp4_rht_sr", 3),
        ("fp8_mxfp4_rht_sr", 2),
        ("nvfp4_here", 3),
        ("quartet2", 3),
        (TETRAJET, 3),
        (UE5M3, 3),
    ],
)
def test_grouped_ops_compute_what_the_loop_does(name: str, products: int, accumulates: bool) -> None:
    want = passes(name, accumulates)
    with grouped_ops() as taken:
        got = passes(name, accumulates)
    assert taken.count("grouped_gemm") == 2 * products
    assert ("grouped_quantize" in taken) == (name != "bf16")
    for what, value in want.items():
        assert got[what].dtype == value.dtype
        bound = ROUNDED[value.dtype] * value.abs().max()
        assert (got[what] - value).abs().max() <= bound, what


def operand_differences(name: str, device: str) -> list[str]:
    """The operands of all experts whose bits are not those of each expert's own; another rank has larger amaxes."""
    recipe = load_recipe(name)
    experts = [
        LinearGemms(recipe, LinearId(3, "fc1", i, spans=SHARD, split="O"), 1, AmaxHistory, lambda own: own.clamp(min=9))
        for i in range(4)
    ]
    weights = [2.0**i * torch.randn(OUT, IN).bfloat16().to(device) for i in range(4)]
    matrices = {"weight": weights, "input": _rows(IN, device), "grad_output": _rows(OUT, device)}
    for gemms in experts:
        gemms.backends.resolve(weights[0])
        for history, slot in gemms.histories.values():
            history.in_effect[slot] = 3.0 + gemms.linear_id.expert  # not the amax of any matrix
            history.to(torch.device(device))
    grouped, found = grouped_backend("emulated", [gemms.backends for gemms in experts]), list[str]()
    assert grouped is not None
    for (gemm, tensor), columnwise in {
        (gemm, tensor): columnwise for tensor, sides in SIDES.items() for columnwise, gemm in enumerate(sides)
    }.items():
        assert grouped.why_not(gemm, weights[0]) is None
        sources, request = matrices[tensor], CastRequest(not columnwise, bool(columnwise))
        if tensor == "weight":
            operand = grouped.weights(gemm, Matrices(sources), STEP, True)
            data = list(operand.data) if gemm == "fprop" else [one.t() for one in operand.data]
        else:
            rows = [len(source) for source in sources]
            operand = grouped.quantize(tensor, torch.cat(sources), rows, STEP, request)[columnwise]
            assert operand is not None
            assert isinstance(operand.data, torch.Tensor)
            padding = experts[0].transforms.of(gemm)
            whole = padding[0].block if columnwise and padding is not None else 1
            data = list(operand.data.split([-(-count // whole) * whole for count in rows]))
        recorded = [_amaxes(gemms) for gemms in experts]
        for i, (gemms, source) in enumerate(zip(experts, sources, strict=True)):
            for history, _ in gemms.histories.values():
                history.newest.zero_()
            own, _ = gemms.backends.resolved.gemms[gemm].quantize(tensor, source, STEP, request)
            want, scale = own.rowwise_data, own.rowwise_tensor_scale
            if columnwise:
                want, scale = own.columnwise()[0].t(), own.columnwise_tensor_scale
            same = want is not None and torch.equal(data[i], want) and data[i].dtype == want.dtype
            same &= scale is None or torch.equal(scale.view(()), operand.scale[i])
            if not same or _amaxes(gemms) != recorded[i]:
                found.append(f"{tensor} of {gemm}, expert {i}")
            for history, _ in gemms.histories.values():
                history.newest.zero_()
    return found


def _rows(columns: int, device: str) -> list[torch.Tensor]:
    return [2.0**i * torch.randn(count, columns).bfloat16().to(device) for i, count in enumerate(TOKENS)]


def _amaxes(gemms: LinearGemms) -> list[float]:
    return [float(history.newest[slot]) for history, slot in gemms.histories.values()]


@pytest.mark.parametrize("name", ["quartet2", "nvfp4_all", TETRAJET, UE5M3, "mxfp4_rht_sr"])
def test_operands_of_all_experts_have_the_bits_of_each(name: str) -> None:
    """Values, scales of tensors and recorded amaxes, also of operands that are quantized again from fprop's."""
    with grouped_ops():
        assert operand_differences(name, "cpu") == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["quartet2", "nvfp4_all", TETRAJET, UE5M3, "mxfp4_rht_sr"])
def test_compiled_operands_of_all_experts_have_the_bits_of_each(name: str) -> None:
    assert operand_differences(name, "cuda") == []


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("name", ["fp8_blockwise", "fp8_current", "fp8_delayed"])
def test_grouped_fp8_gemms_compute_what_the_loop_does(name: str, accumulates: bool, saves: bool) -> None:
    want = passes(name, accumulates)
    with grouped_ops("sm90") as taken:
        got = passes(name, accumulates, saves)
    # of two microbatches x and dy, x again if it was not saved, and both directions of the weights once
    assert taken.count("grouped_cast_fp8") == 2 * (3 - saves) + 2
    for what, value in want.items():
        assert got[what].dtype == value.dtype
        bound = ROUNDED[value.dtype] * value.abs().max()
        assert (got[what] - value).abs().max() <= bound, what


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize("name", ["fp8_blockwise", "fp8_current", "fp8_delayed"])
def test_grouped_gemms_take_the_codes_of_fp8_primary_weights(name: str, accumulates: bool) -> None:
    want = passes(name, accumulates, primary=True)
    with grouped_ops("sm90") as taken:
        got = passes(name, accumulates, primary=True)
        assert taken.count("grouped_cast_fp8") == 2 * 2  # x and dy of two microbatches, and no weight
        from_bf16 = passes(name, accumulates)
    for what, value in want.items():
        assert got[what].dtype == value.dtype
        bound = ROUNDED[value.dtype] * value.abs().max()
        assert (got[what] - value).abs().max() <= bound, what
        # bf16 holds these main weights; a delayed scale begins with 1, which the weights do not know
        assert name == "fp8_delayed" or torch.equal(got[what], from_bf16[what]), what


@pytest.mark.parametrize("name", ["fp8_blockwise", "fp8_current", "fp8_delayed"])
def test_codes_of_fp8_primary_weights_are_those_of_each_linear_layer(name: str) -> None:
    """The stored codes without a copy for fprop, one transposed copy a step for dgrad."""
    spec = primary_weight_spec(get_recipe(name))
    assert spec is not None
    experts = [
        LinearGemms(get_recipe(name), LinearId(3, "fc1", i), 1, AmaxHistory, cache_weights=True, save_memory=True)
        for i in (0, 1)
    ]
    group = GroupedLinearGemms(experts)
    backend = grouped_backend("hopper_fp8", [gemms.backends for gemms in experts])
    assert backend is not None
    weights = Matrices([Fp8Weight.of(2.0**i * torch.randn(OUT, IN).bfloat16(), spec) for i in range(2)])
    for gemm, columnwise in (("fprop", False), ("dgrad", True)):
        data, scale = group._weights(gemm, backend, weights, STEP, True)
        assert group._weights(gemm, backend, weights, STEP, True).data is data
        assert scale is not None
        for i, weight in enumerate(weights):
            quantized = weight.quantized(columnwise=columnwise, codes=True)
            want_data, want_scale = quantized.columnwise() if columnwise else quantized.rowwise()
            assert (data[i].dtype, data[i].is_contiguous()) == (want_data.dtype, True)
            assert torch.equal(data[i].view(torch.uint8), want_data.view(torch.uint8))
            assert want_scale is not None
            assert torch.equal(scale[i].view(-1), want_scale[..., : scale.shape[-1] if spec.block else 1].reshape(-1))
            assert (data[i].data_ptr() == weight.codes.data_ptr()) is not columnwise


@pytest.mark.parametrize(("saves", "save_memory"), [(True, False), (False, False), (False, True)])
def test_grouped_row_wise_gemms_compute_what_the_loop_does(saves: bool, save_memory: bool) -> None:
    want = passes("fp8_rowwise", accumulates=True)
    with grouped_ops("sm90") as taken:
        got = passes("fp8_rowwise", accumulates=True, saves=saves, save_memory=save_memory)
    # rows of x and dy in two microbatches and of the weights, once unless memory is saved; and their columns
    casts = 2 * 2 + (2 if save_memory else 1)
    assert (taken.count("cast_fp8"), taken.count("grouped_cast_fp8")) == (casts, casts)
    for what, value in want.items():
        assert (got[what] - value).abs().max() <= ROUNDED[value.dtype] * value.abs().max(), what


def test_an_fp8_forward_pass_and_an_mx_backward_pass_are_both_grouped() -> None:
    want = passes("fp8_mxfp4_rht_sr", accumulates=True)
    with grouped_ops("sm90") as taken:
        got = passes("fp8_mxfp4_rht_sr", accumulates=True)
    assert (taken.count("grouped_cast_fp8"), taken.count("grouped_fp8_gemm")) == (2 + 1, 2)
    assert taken.count("grouped_gemm") == 2 * 2
    for what, value in want.items():
        assert (got[what] - value).abs().max() <= ROUNDED[value.dtype] * value.abs().max(), what


def test_the_weights_of_a_step_are_quantized_once() -> None:
    with grouped_ops() as taken:
        passes("mxfp8", accumulates=True)
    # in each microbatch x for fprop, dy and x for the others; in the first both directions of the weights
    assert taken.count("grouped_quantize") == 2 * 4 + 2


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_current", "fp8_rowwise", "fp8_blockwise"])
def test_emulated_fp8_takes_the_loop(name: str) -> None:
    with grouped_ops() as taken:
        passes(name, accumulates=True)
    assert not taken


def test_instrumented_experts_take_the_loop() -> None:
    from megatron_lowprec.mcore.debug.instrumented import InstrumentedGemms

    experts = [LinearGemms(get_recipe("mxfp8"), LinearId(3, "fc1", expert), 1, AmaxHistory) for expert in range(2)]
    group = GroupedLinearGemms([InstrumentedGemms(gemms) for gemms in experts])  # type: ignore[list-item]
    x, w = torch.zeros(8, IN).bfloat16(), torch.zeros(OUT, IN).bfloat16()
    with grouped_ops() as taken:
        group.forward(x, (3, 5), (w, w), RngStep(0, 0))
    assert not taken


def test_evaluation_is_grouped_where_all_experts_scale_alike() -> None:
    """An expert that no token has reached yet scales by its current amax, the others by their histories."""
    x, weights = torch.randn(sum(TOKENS), IN).bfloat16(), [torch.randn(OUT, IN).bfloat16() for _ in TOKENS]

    def evaluated(*current: frozenset[str]) -> torch.Tensor:
        experts = [LinearGemms(load_recipe(UE5M3), LinearId(3, "fc1", i), 1, AmaxHistory) for i in range(4)]
        group = GroupedLinearGemms([gemms.unrecorded(own) for gemms, own in zip(experts, current, strict=True)])
        y, _ = group.forward(x, TOKENS, weights, STEP, update_amax=False)
        assert not any(history.newest.any() for gemms in experts for history, _ in gemms.histories.values())
        return y

    none, of_input = frozenset[str](), frozenset(["input"])
    for current, grouped in ([of_input] * 4, True), ([none, of_input, none, none], False):
        want = evaluated(*current)
        with grouped_ops() as taken:
            y = evaluated(*current)
        assert bool(taken) == grouped
        assert (y - want).abs().max() <= ROUNDED[y.dtype] * want.abs().max()


@pytest.mark.parametrize("arch", ["cpu", "sm90"])
@pytest.mark.parametrize("name", ["fp8_blockwise", "fp8_rowwise", "mxfp8"])
def test_codes_of_all_experts_are_the_operand(name: str, arch: str) -> None:
    """Products and input gradients of x and dy; the weight gradient is that of the dequantized codes."""
    recipe, rng_step = get_recipe(name), RngStep(7, 0)
    spec = recipe.fprop.input
    assert spec is not None
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(OUT, IN, generator=generator).bfloat16() for _ in TOKENS]
    x, dy = (torch.randn(sum(TOKENS), size, generator=generator).bfloat16() for size in (IN, OUT))
    dy_spec = recipe.dgrad.grad_output
    assert dy_spec is not None
    tensors, rounded, sent = [x, dy], [], []
    for tensor, of_tensor in ((x, spec), (dy, dy_spec)):
        codes = quantize(tensor, of_tensor)
        rounded.append(codes.dequantize(torch.bfloat16))
        sent.append(unpack_rows(pack_rows(codes), tensor.shape[1], of_tensor, torch.bfloat16))
    found = []
    with grouped_ops(arch) as taken:
        for given, gradient in (tensors, rounded, sent):
            group = GroupedLinearGemms([LinearGemms(recipe, LinearId(3, "fc1", i), 1, AmaxHistory) for i in range(4)])
            y, saved = group.forward(given, TOKENS, weights, rng_step)
            saved = saved.without_tensors().with_tensors(saved.tensors())
            found.append((y, *group.backward(gradient, TOKENS, saved, rng_step, [None] * 4)))
    assert bool(taken) == (name == "mxfp8" or arch == "sm90")
    (want_y, want_dx, _), (_, _, want_dw), (y, dx, dw) = found
    assert torch.equal(y, want_y)
    assert torch.equal(dx, want_dx)
    assert all(map(torch.equal, dw, want_dw))


@pytest.mark.parametrize("needed", ["dgrad", "wgrad"])
@pytest.mark.parametrize(
    ("name", "arch"), [("mxfp8", "cpu"), ("fp8_blockwise", "sm90"), ("fp8_current", "sm90"), ("fp8_delayed", "sm90")]
)
def test_a_gemm_that_is_not_needed_does_not_run(name: str, arch: str, needed: str) -> None:
    """That of frozen experts, or of inputs without gradients; the other gradient keeps its bits."""
    generator = torch.Generator().manual_seed(4)
    x, dy = (torch.randn(sum(TOKENS), size, generator=generator).bfloat16() for size in (IN, OUT))
    weights = [torch.randn(OUT, IN, generator=generator).bfloat16() for _ in TOKENS]
    found, products = [], []
    for gemms in (("dgrad", "wgrad"), (needed,)):
        experts = [LinearGemms(get_recipe(name), LinearId(3, "fc1", expert), 1, AmaxHistory) for expert in range(4)]
        group = GroupedLinearGemms(experts)
        with grouped_ops(arch) as taken:
            _, saved = group.forward(x, TOKENS, weights, RngStep(0, 0), save_input="wgrad" in gemms)
            saved = saved if "wgrad" in gemms else saved.without_input()
            taken.clear()
            found.append(group.backward(dy, TOKENS, saved, RngStep(0, 0), [None] * 4, gemms=gemms))
            products.append(sum(op.endswith("gemm") for op in taken))
    (dx, dw), (only_dx, only_dw) = found
    assert products[1] < products[0]
    if needed == "dgrad":
        assert only_dw == [None] * 4
        assert torch.equal(only_dx, dx)
    else:
        assert only_dx is None
        assert all(map(torch.equal, only_dw, dw))


@pytest.mark.parametrize(
    ("recipe", "out_features", "reasons"),
    [
        ("mxfp8", 256, {}),
        ("mxfp4", 48, dict.fromkeys(BACKWARD, "emulated: sizes are no multiples of 32")),
        ("fp8_current", 256, dict.fromkeys(GEMMS, f"emulated: {OF_BLOCKS}")),
        ("mxfp4_rht_sr", 256, {}),
        ("quartet2", 256, {}),
        ("quartet2", 192, dict.fromkeys(BACKWARD, "emulated: sizes are no multiples of 128")),
        (TETRAJET, 256, {}),
        (UE5M3, 256, {}),
        ("configs/recipes/tetrajet_v2_scales_only.yaml", 256, dict.fromkeys(GEMMS, f"emulated: {OF_BLOCKS}")),
    ],
)
def test_the_reason_for_a_loop(recipe: str, out_features: int, reasons: dict[str, str]) -> None:
    experts = [LinearGemms(load_recipe(recipe), LinearId(1, "fc1", expert), 1, AmaxHistory) for expert in range(2)]
    weight, group = torch.zeros(out_features, IN).bfloat16(), GroupedLinearGemms(experts)
    assert group.why_in_a_loop("fprop", weight) == "kernels need a GPU and Triton"
    with grouped_ops():
        found = {name: group.why_in_a_loop(name, weight) for name in ("fprop", "dgrad", "wgrad")}
    assert {name: reason for name, reason in found.items() if reason is not None} == reasons


def test_gemms_of_two_backends_run_in_a_loop() -> None:
    experts = [LinearGemms(get_recipe("fp8_rowwise_gw_hp"), LinearId(1, "fc1"), 1, AmaxHistory)]
    with grouped_ops("sm90"):
        reason = GroupedLinearGemms(experts).why_in_a_loop("wgrad", torch.zeros(OUT, IN).bfloat16())
    assert reason == "dgrad runs on hopper_fp8, wgrad on emulated"


@pytest.mark.parametrize(("name", "most"), [("fp8_current", 900), ("mxfp8", 780), ("bf16", 440)])
def test_calls_of_a_layer_do_not_grow_with_its_experts(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that forward and backward pass call, of Python and of C: the GPU waits for them."""
    pytest.importorskip("triton", reason="triton is not installed")
    from megatron_lowprec.kernels.launch import Specialized

    monkeypatch.setattr(Specialized, "launch", lambda *_: None)
    found: list[int] = []
    for number in (4, 64):
        calls: list[str] = []

        def count(frame: FrameType, event: str, _: Any, calls: list[str] = calls) -> None:
            if event in ("call", "c_call") and "megatron_lowprec/" in frame.f_code.co_filename:
                calls.append(frame.f_code.co_name)

        group = GroupedLinearGemms([LinearGemms(load_recipe(name), LinearId(0, "fc1"), 0, AmaxHistory)] * number)
        weight = torch.zeros(number, OUT, IN).bfloat16()
        for step in range(3):
            tokens = [i % 5 + step for i in range(number)]
            x, dy = (torch.zeros(sum(tokens), size).bfloat16() for size in (IN, OUT))
            with grouped_ops("sm90", "triton"):
                sys.setprofile(count if step == 2 else None)
                _, saved = group.forward(x, tokens, weight, STEP, save_input=True)
                group.backward(dy, tokens, saved, STEP, [None] * number, out=torch.empty_like(weight))
                sys.setprofile(None)
        found.append(len(calls))
    assert 200 < found[0] == found[1] <= most, found


def test_kernels_get_rows_from_a_multiple_of_16_bytes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor descriptors begin there; a view of tokens may not."""
    found: list[int] = []
    quantize = grouped_hopper_fp8.GroupedHopperFp8Gemms.quantize

    def spy(self: Any, tensor: str, matrix: torch.Tensor, *args: Any) -> Any:
        found.append(matrix.data_ptr() % 16)
        return quantize(self, tensor, matrix, *args)

    monkeypatch.setattr(grouped_hopper_fp8.GroupedHopperFp8Gemms, "quantize", spy)
    group = GroupedLinearGemms([LinearGemms(load_recipe("fp8_current"), LinearId(0, "fc1"), 0, AmaxHistory)] * 2)
    weight, tokens = torch.ones(2, OUT, IN).bfloat16(), [3, 2]
    x, dy = (torch.ones(5 * size + 1).bfloat16()[1:].view(5, size) for size in (IN, OUT))
    assert x.data_ptr() % 16
    with grouped_ops("sm90"):
        _, saved = group.forward(x, tokens, weight, STEP, save_input=True)
        group.backward(dy, tokens, saved, STEP, [None] * 2, out=torch.empty_like(weight))
    assert found == [0, 0]
