"""The table of backends: the first row without a reason runs a GEMM, and the last row runs what is left."""

import copy
import pickle
import sys
from dataclasses import replace
from functools import lru_cache
from types import FrameType
from typing import Any

import pytest
import torch

from megatron_lowprec import LowPrecLinear
from megatron_lowprec.kernels import dispatch
from megatron_lowprec.kernels.philox.reference import WHOLE, ShardSlice
from megatron_lowprec.linear import lowprec_linear
from megatron_lowprec.linear.backends import resolved, table
from megatron_lowprec.linear.backends.emulated import dense as emulated_dense
from megatron_lowprec.linear.backends.emulated.dense import EmulatedGemms
from megatron_lowprec.linear.backends.hopper_fp8 import dense
from megatron_lowprec.linear.backends.hopper_fp8.why_not import why_not
from megatron_lowprec.linear.backends.protocol import CastRequest, GemmBackend
from megatron_lowprec.linear.backends.table import BACKENDS, FALLBACK, Backend, choose, choose_without_gpu
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.mcore.debug.instrumented import inspected_casts
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, GemmSpec

STEP = RngStep(0, 0)


def gemms_of(recipe: str, cache_weights: bool = False) -> LinearGemms:
    return LinearGemms(get_recipe(recipe), LinearId(1, "x"), 0, AmaxHistory, cache_weights=cache_weights)


def test_the_last_row_has_no_conditions() -> None:
    for gemm in (GemmSpec(), get_recipe("mxfp4_rht_sr").dgrad):
        assert choose("dgrad", gemm, Target("cpu", 3, 5, "float64")).backend == FALLBACK == BACKENDS[-1].name


def test_rows_that_are_passed_over_are_named_with_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row before the others takes what it runs; its reason is named where it does not."""
    row = Backend(
        "loud", lambda name, gemm, target: None if name == "fprop" else f"no {name}", "dense.X", archs=("sm99",)
    )
    monkeypatch.setattr(table, "BACKENDS", (row, *(row for row in BACKENDS if row.name in ("hopper_fp8", "emulated"))))
    gemm, target = get_recipe("mxfp8").fprop, Target("sm90", 256, 256)
    assert choose("fprop", gemm, target) == ("loud", False, ())
    found = choose("dgrad", get_recipe("mxfp8").dgrad, target)
    assert found.describe("sm90") == "emulated on sm90 (loud: no dgrad)"
    assert choose("fprop", gemm, target, emulate=True).describe() == "loud (asked)"
    assert choose_without_gpu("wgrad", get_recipe("mxfp8").wgrad, target).why == ("on GPUs as well: loud: no wgrad")


def test_a_reason_fits_one_plain_operand_and_two() -> None:
    dgrad = get_recipe("mxfp4_rht").dgrad
    for gemm in (replace(dgrad, weight=None), replace(dgrad, weight=None, grad_output=None)):
        assert why_not("dgrad", gemm, Target("sm90", 256, 256)) == "an operand stays in the compute dtype"


def test_an_expert_without_tokens_takes_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolved, "arch_of", lambda _: "sm90")
    gemms, weight = gemms_of("fp8_current", cache_weights=True), torch.randn(128, 128).bfloat16()
    gemms.backends.resolve(weight)
    assert {backend.name for backend in gemms.backends.of(weight).gemms.values()} == {"hopper_fp8"}
    assert gemms.fprop(weight[:0], weight, STEP).shape == (0, 128)
    assert gemms.weight_cache.get("fprop", "emulated") is not None
    assert gemms.weight_cache.get("fprop", "hopper_fp8") is None


def test_backends_are_resolved_again_for_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolved, "arch_of", lambda _: "sm90")
    gemms = gemms_of("fp8_blockwise")
    for weight, row in (
        (torch.zeros(128, 256), "emulated"),
        (torch.zeros(128, 256).bfloat16(), "hopper_fp8"),
        (torch.zeros(128, 256), "emulated"),
    ):
        gemms.backends.resolve(weight)
        assert {backend.name for backend in gemms.backends.resolved.gemms.values()} == {row}


def test_wrapped_backends_are_used_meanwhile() -> None:
    gemms, x = gemms_of("mxfp8"), torch.randn(32, 32)
    want, seen = gemms.fprop(x, x, STEP), []

    class Wrapped:
        def __init__(self, inner: GemmBackend) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

        def quantize(self, tensor: str, *rest: object) -> object:
            seen.append(tensor)
            return self.inner.quantize(tensor, *rest)  # type: ignore[arg-type]

    with gemms.backends.wrapped(Wrapped):  # type: ignore[arg-type]
        assert torch.equal(gemms.fprop(x, x, STEP), want)
    assert seen == ["input", "weight"]
    gemms.fprop(x, x, STEP)
    assert len(seen) == 2
    assert all(isinstance(gemms.backends.resolved.gemms[name], EmulatedGemms) for name in GEMM_OPERANDS)


@pytest.mark.parametrize("gemms", [("dgrad", "wgrad"), ("dgrad",), ("wgrad",)])
def test_dy_is_quantized_once_by_a_backend_that_fuses_both_directions(
    monkeypatch: pytest.MonkeyPatch, gemms: tuple[str, ...]
) -> None:
    """One read for the GEMMs that follow, and none of those that do not; a backend that does not fuse waits."""
    layer, requests = gemms_of("fp8_blockwise"), list[tuple[str, CastRequest]]()
    dy, quantize = torch.randn(128, 128), EmulatedGemms.quantize

    def noted(
        self: EmulatedGemms, tensor: str, matrix: torch.Tensor, step: RngStep, request: CastRequest, *_: object
    ) -> object:
        requests.append((self.name, request))
        return quantize(self, tensor, matrix, step, request._replace(columnwise=not request.rowwise))

    monkeypatch.setattr(EmulatedGemms, "quantize", noted)
    assert layer.grad_output(dy, STEP, gemms=gemms).quantized is None
    monkeypatch.setattr(EmulatedGemms, "fuses_producer", True)
    monkeypatch.setattr(EmulatedGemms, "fuses_directions", lambda *_: True)
    layer.grad_output(dy, STEP, gemms=gemms)
    assert requests == [("emulated", CastRequest("dgrad" in gemms, "wgrad" in gemms))]


@pytest.mark.parametrize(
    ("changes", "fuses"), [({}, True), ({"block": 32, "signs": "none"}, False), ({"output": "fp32"}, False)]
)
def test_dy_of_two_transforms_is_not_quantized_in_one_cast(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], fuses: bool
) -> None:
    """The fused kernel has one block and one rounding of the transform for both directions."""
    monkeypatch.setattr(dispatch, "has_mx_kernel", lambda _, rule: rule is not None)
    recipe = get_recipe("nvfp4_all")
    assert recipe.wgrad.hadamard is not None
    dgrad = replace(recipe.dgrad, hadamard=replace(recipe.wgrad.hadamard, **changes))
    emulated = LinearGemms(replace(recipe, dgrad=dgrad), LinearId(1, "x"), 0, AmaxHistory).backends.built("emulated")
    assert emulated.fuses_directions("grad_output", torch.zeros(64, 64).bfloat16(), STEP) == fuses


def test_a_plan_serves_any_number_of_tokens_of_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_mx_kernel", lambda _, rule: rule is not None)
    emulated, x = gemms_of("mxfp8").backends.built("emulated"), torch.zeros(64, 96).bfloat16()
    assert isinstance(emulated, EmulatedGemms)
    plan, of_columns = (emulated.plans.of("input", x, rowwise, not rowwise) for rowwise in (True, False))
    assert plan.rule is not None
    assert plan is emulated.plans.of("input", x[:33])
    assert (plan.reads_transpose, plan.rows is None, plan.columns is None) == (False, False, True)
    assert (of_columns.rule, of_columns.rows is None, of_columns.columns is None) == (plan.rule, True, False)
    transposed = emulated.plans.of("input", torch.zeros(96, 64).bfloat16().t())
    assert (transposed.rule, transposed.reads_transpose, transposed.columns) == (plan.rule, True, plan.rows)
    for other in (x[:0], x.double(), x[:, :80].contiguous(), x[:, ::2]):
        assert emulated.plans.of("input", other).rule is None
    assert emulated.plans.of("input", x[:, :80].contiguous(), False, True) is of_columns


@pytest.mark.parametrize("split", ["I", "O"])
def test_a_plan_knows_the_shard_and_the_ranks_that_share_a_scale(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads contiguous rows: of x, or of its transpose, whose spans are in the other order."""
    monkeypatch.setattr(dispatch, "has_mx_kernel", lambda _, rule: rule is not None)
    shard, x = ShardSlice(64), torch.zeros(64, 96).bfloat16()
    linear_id = LinearId(1, "x", spans={split: shard}, split=split)
    gemms = LinearGemms(get_recipe("nvfp4_all"), linear_id, 0, AmaxHistory, torch.neg)
    emulated = gemms.backends.built("emulated")
    assert isinstance(emulated, EmulatedGemms)
    for rowwise in (True, False):
        for matrix, order in ((x, 1), (x.t().contiguous().t(), -1)):
            plan = emulated.plans.of("input", matrix, rowwise, not rowwise)
            assert plan.rule is not None
            assert plan.spans == (WHOLE, shard if split == "I" else WHOLE)[::order]
            assert plan.reduce_amax is (torch.neg if split == "I" else None)


@pytest.mark.parametrize(
    ("overrides", "backend", "saves"),
    [
        ([], "emulated", True),
        ([], "blackwell_mx", False),  # whose operands are codes
        (["wgrad.input.source=original"], "emulated", False),
        (["fprop.input.scale.rule=product", "fprop.input.tensor_scale=null"], "emulated", False),
        (["fprop.input.format=e2m3", "fprop.input.scale.four_over_six=null"], "emulated", False),
        (["fprop.input.scaling=delayed", "fprop.input.scale.four_over_six=null"], "emulated", False),
        (["wgrad.input.tensor_scale=null", "wgrad.input.scale.rule=product"], "emulated", False),
    ],
)
def test_codes_are_saved_for_a_second_quantization(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], backend: str, saves: bool
) -> None:
    monkeypatch.setattr(dispatch, "has_mx_kernel", lambda _, rule: rule is not None)
    layer = LinearGemms(load_recipe("quartet2", overrides), LinearId(1, "x"), 0, AmaxHistory)
    x = torch.zeros(70, 128).bfloat16()
    assert layer.backends.built(backend).saves_codes(x) == saves
    assert not layer.backends.built(backend).saves_codes(torch.zeros(128, 70).bfloat16().t())
    if backend == "emulated":
        assert layer.saves_codes(x) == saves
    with inspected_casts(layer, lambda *_: None):
        assert not layer.saves_codes(x)


def test_a_tensor_of_two_specs_is_not_quantized_in_one_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolved, "arch_of", lambda _: "sm90")
    recipe = get_recipe("fp8_current")
    fprop = replace(recipe.fprop, input=replace(recipe.fprop.input, format="e5m2"))  # type: ignore[type-var]
    layer = LinearGemms(replace(recipe, fprop=fprop), LinearId(1, "x"), 0, AmaxHistory)
    assert layer.backends.one_spec == {"input": False, "weight": True, "grad_output": True}
    layer.backends.resolve(torch.zeros(128, 128).bfloat16())
    names = {tensor: backend and backend.name for tensor, backend in layer.backends.resolved.one_cast.items()}
    assert names == {"input": None, "weight": "hopper_fp8", "grad_output": "hopper_fp8"}


@pytest.mark.parametrize(("name", "most"), [("fp8_current", 66), ("fp8_rowwise", 68), ("fp8_delayed", 79)])
def test_calls_of_a_native_layer(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of the package that forward and backward pass call: the GPU waits for Python at small sizes."""
    pytest.importorskip("triton", reason="triton is not installed")
    from megatron_lowprec.kernels.launch import Specialized

    monkeypatch.setattr(resolved, "arch_of", lambda _: "sm90")
    monkeypatch.setattr(Specialized, "launch", lambda *_: None)
    monkeypatch.setattr(dense, "scaled_gemm", lambda a, b, **_: a.new_empty(len(a), len(b), dtype=torch.bfloat16))
    assert 50 < calls_of_a_step(LowPrecLinear(128, 256, dtype=torch.bfloat16, recipe=name)) <= most


@pytest.mark.parametrize(
    ("name", "most"), [("mxfp8", 126), ("mxfp4_rht_sr", 157), ("nvfp4_all", 165), ("quartet2", 203)]
)
def test_calls_of_an_emulated_layer(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a native layer, where the MX kernel quantizes."""
    pytest.importorskip("triton", reason="triton is not installed")
    from megatron_lowprec.kernels.launch import Specialized

    monkeypatch.setattr(dispatch, "has_mx_kernel", lambda _, rule: rule is not None)
    monkeypatch.setattr(Specialized, "launch", lambda *_: None)
    monkeypatch.setattr(emulated_dense, "gemm", lambda a, b, **_: a.new_empty(len(a), len(b), dtype=torch.bfloat16))
    assert 50 < calls_of_a_step(LowPrecLinear(128, 256, dtype=torch.bfloat16, recipe=name)) <= most


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "mxfp8", "quartet2"])
def test_a_layer_with_kernels_is_copied_and_pickled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rules keep compiled kernels, which pickle refuses."""
    pytest.importorskip("triton", reason="triton is not installed")
    from megatron_lowprec.kernels.launch import Specialized

    launched: list[Any] = []
    monkeypatch.setattr(Specialized, "launch", lambda *arguments: launched.append(arguments))
    if name.startswith("fp8"):
        monkeypatch.setattr(resolved, "arch_of", lambda _: "sm90")
        monkeypatch.setattr(dense, "scaled_gemm", lambda a, b, **_: a.new_empty(len(a), len(b), dtype=torch.bfloat16))
    else:
        monkeypatch.setattr(dispatch, "has_mx_kernel", lambda _, rule: rule is not None)
        monkeypatch.setattr(emulated_dense, "gemm", lambda a, b, **_: a.new_empty(len(a), len(b), dtype=torch.bfloat16))
    layer = LowPrecLinear(128, 256, dtype=torch.bfloat16, recipe=name)
    calls_of_a_step(layer)
    once = len(launched) // 3
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        launched.clear()
        calls_of_a_step(copied)
        assert len(launched) == 3 * once > 0


@pytest.mark.slow
def test_calls_of_a_compiled_layer_with_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of ``begin_pass`` and of four casts."""
    pytest.importorskip("triton", reason="triton is not installed")
    from megatron_lowprec.kernels.launch import Specialized

    torch._dynamo.reset()
    monkeypatch.setattr(resolved, "arch_of", lambda _: "sm90")
    monkeypatch.setattr(Specialized, "launch", lambda *_: None)
    monkeypatch.setattr(lowprec_linear, "traced_gemms", lru_cache(lowprec_linear.traced_gemms.__wrapped__))
    layer = LowPrecLinear(128, 256, dtype=torch.bfloat16, recipe="fp8_delayed", bias=False)
    layer.compile(backend="aot_eager", fullgraph=True)
    assert 40 < calls_of_a_step(layer) <= 60


def calls_of_a_step(layer: LowPrecLinear) -> int:
    """Functions of the package that a forward and a backward pass call, in a step that follows others."""
    calls: list[str] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "megatron_lowprec/" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    for step in range(3):
        x, dy = torch.randn(32, 128).bfloat16().requires_grad_(), torch.randn(32, 256).bfloat16()
        sys.setprofile(count if step == 2 else None)
        layer(x).backward(dy)
        sys.setprofile(None)
        for history in layer.histories:
            history.newest.fill_(1.0)
        layer.end_step()
    return len(calls)
