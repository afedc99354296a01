"""Experts in one call per GEMM have the bits of the experts one after the other, for every recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_lowprec import get_recipe
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.registry import recipes
from tests.mcore.test_spec import config_of
from tests.weekly import each_kind

pytestmark = pytest.mark.usefixtures("world")

HIDDEN, FFN = 128, 128
TOKENS = (5, 0, 131, 32)  # none, less than a block, whole blocks, and no multiple


def experts_of(grouped: bool, **options: Any) -> Any:
    """Experts in bf16, the same ones on each call."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megatron_lowprec.mcore.layers.grouped_mlp import LowPrecGroupedMLP
    from megatron_lowprec.mcore.layers.parallel_linear import LowPrecColumnParallelLinear, LowPrecRowParallelLinear

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    experts = {"num_moe_experts": len(TOKENS), "moe_ffn_hidden_size": FFN, "add_bias_linear": False}
    config = config_of(**{"hidden_size": HIDDEN, "params_dtype": torch.bfloat16, **experts, **options})
    linears = MLPSubmodules(linear_fc1=LowPrecColumnParallelLinear, linear_fc2=LowPrecRowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    made = (LowPrecGroupedMLP if grouped else SequentialMLP)(len(TOKENS), config, linears, pg_collection=groups)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            weight += 0.1 * torch.randn_like(weight) if name.endswith("bias") else 0  # they begin as zeros
    return made


def bound(experts: Any, recipe: Recipe, *, in_fp32: bool = True) -> Any:
    """The experts' runtime, as of layer 2; weights get fp32 main gradients."""
    from megatron_lowprec.mcore.runtime import RecipeRuntime

    runtime = RecipeRuntime(
        recipe, torch.device("cpu"), num_layers=4, seed=7, cache_weights=True, accumulate_wgrad=in_fp32
    )
    for number, expert in enumerate(experts.local_experts):
        for name in ("linear_fc1", "linear_fc2"):
            module = getattr(expert, name)
            runtime.bind_linear(module, 2, f"mlp.experts.{name}", number)
            module.weight.main_grad = torch.full(module.weight.shape, torch.nan)  # the first wgrad overwrites it
    return runtime


def pass_through(experts: Any, generator: torch.Generator, counts: tuple[int, ...] = TOKENS) -> dict[str, Any]:
    """Output and gradients of the inputs, of one forward and backward pass on random tokens."""
    counts_tensor, total = torch.tensor(counts), sum(counts)
    x = torch.randn(total, HIDDEN, generator=generator).bfloat16().requires_grad_()
    probs = torch.rand(total, generator=generator).requires_grad_()
    y, bias = experts(x, counts_tensor, probs)
    assert bias is None
    y.backward(torch.randn(y.shape, generator=generator).bfloat16())
    return {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad}


def two_steps(experts: Any, runtime: Any) -> dict[str, Any]:
    """Everything that two steps of two microbatches compute; the experts of the second step have other tokens."""
    generator, found = torch.Generator().manual_seed(3), {}
    for step, counts in enumerate((TOKENS, TOKENS[::-1])):
        runtime.begin_step(step)
        for microbatch in range(2):
            runtime.begin_microbatch(microbatch)
            for name, value in pass_through(experts, generator, counts).items():
                found[f"{step} {microbatch} {name}"] = value
        for name, weight in experts.named_parameters():
            of_ddp = hasattr(weight, "main_grad") and runtime._accumulate_wgrad
            found[f"{step} gradient of {name}"] = (weight.main_grad if of_ddp else weight.grad).clone()
        runtime.end_step()
    for number, history in enumerate(runtime._histories.values()):
        found |= {f"history {number}": history.window, f"in effect {number}": history.in_effect}
    return found


def same(recipe: Recipe, *, in_fp32: bool = True, **options: Any) -> None:
    want, got = (
        two_steps(experts, bound(experts, recipe, in_fp32=in_fp32))
        for experts in (experts_of(False, **options), experts_of(True, **options))
    )
    assert want.keys() == got.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name
        assert torch.isfinite(want[name]).all(), name


@pytest.mark.parametrize(
    "name", each_kind(n for n in recipes() if not (get_recipe(n).activations.quantized or get_recipe(n).phases))
)
def test_bits_are_those_of_experts_one_after_the_other(name: str) -> None:
    same(get_recipe(name))


@pytest.mark.parametrize(
    "options",
    [
        {"add_bias_linear": True},
        {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
        {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    ],
    ids=["biases", "gated", "probabilities of the input"],
)
def test_bits_around_the_gemms(options: dict[str, Any]) -> None:
    same(get_recipe("mxfp4_rht_sr"), **options)


def test_gradients_of_autograd() -> None:
    same(get_recipe("mxfp8"), in_fp32=False, add_bias_linear=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_swiglu_is_megatron_cores(device: str) -> None:
    """On a GPU one kernel computes its gradients, from the same fp32 values but for the exponential's last bits."""
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    from megatron_lowprec.mcore.layers.cached_swiglu import expert_swiglu

    generator = torch.Generator().manual_seed(1)
    h, dout = (torch.randn(67, width, generator=generator).to(device, torch.bfloat16) for width in (288, 144))
    probs = torch.rand(67, generator=generator).to(device)
    found = []
    for swiglu in (expert_swiglu, lambda h, probs: weighted_bias_swiglu_impl(h, None, probs.unsqueeze(-1))):
        inputs = [x.clone().requires_grad_() for x in (h, probs)]
        out = swiglu(*inputs)
        out.backward(dout)
        found.append((out, *(x.grad for x in inputs)))
    (out, dh, dprobs), theirs = found
    assert torch.equal(out, theirs[0])
    if device == "cpu":
        assert torch.equal(dh, theirs[1])
        assert torch.equal(dprobs, theirs[2])
    else:
        torch.testing.assert_close(dh, theirs[1], rtol=2**-7, atol=1e-5)  # a step of bf16
        torch.testing.assert_close(dprobs, theirs[2], rtol=1e-4, atol=1e-4)  # sums of 144 terms of up to 10


def test_the_kernel_of_swiglu_gets_contiguous_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads strided ones as if they were; the reference stands in for it here."""
    from megatron_lowprec.kernels import dispatch
    from megatron_lowprec.kernels.swiglu.reference import weighted_swiglu_backward
    from megatron_lowprec.mcore.layers.cached_swiglu import expert_swiglu

    contiguous: list[bool] = []

    def kernel(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        contiguous.extend(tensor.is_contiguous() for tensor in tensors)
        return weighted_swiglu_backward(*tensors)

    monkeypatch.setattr(dispatch, "fuses", lambda _: True)
    monkeypatch.setattr(dispatch, "weighted_swiglu_backward", kernel)
    h = torch.randn(32, 12).t().requires_grad_()
    probs = torch.rand(12, 3)[:, 0].requires_grad_()
    expert_swiglu(h, probs).backward(torch.randn(16, 12).t())
    assert contiguous == [True] * 3
    assert h.grad is not None
    assert probs.grad is not None


def test_experts_take_this_swiglu(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_lowprec.mcore.layers import cached_swiglu

    calls: list[int] = []
    original = cached_swiglu.expert_swiglu
    monkeypatch.setattr(cached_swiglu, "expert_swiglu", lambda h, probs: calls.append(len(h)) or original(h, probs))
    experts = experts_of(True, gated_linear_unit=True, activation_func=F.silu, bias_activation_fusion=True)
    bound(experts, get_recipe("bf16"))
    pass_through(experts, torch.Generator().manual_seed(2))
    assert calls == [sum(TOKENS)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bias_activation_fusion", False),
        ("activation_func_fp8_input_store", True),
        ("add_bias_linear", True),
        ("activation_func_clamp_value", 7.0),
        ("glu_linear_offset", 1.0),
        ("use_te_activation_func", True),
    ],
)
def test_variants_of_swiglu_are_megatron_cores(name: str, value: object) -> None:
    experts = experts_of(True, gated_linear_unit=True, activation_func=F.silu, bias_activation_fusion=True)
    expert, probs = experts.local_experts[0], torch.ones(4)
    assert expert._own_swiglu(probs) is not None
    assert expert._own_swiglu(None) is None
    with torch.no_grad():
        assert expert._own_swiglu(probs) is None
    setattr(expert.config, name, value)
    assert expert._own_swiglu(probs) is None


def test_an_expert_s_draws_do_not_depend_on_the_others() -> None:
    """The same rows under another expert draw other bits; behind an expert of more tokens the same ones."""
    gradients = []
    for counts in ((0, 4, 0, 0), (9, 4, 0, 0), (4, 0, 0, 0)):
        experts = experts_of(True)
        with torch.no_grad():
            for expert in experts.local_experts[1:]:
                expert.load_state_dict(experts.local_experts[0].state_dict())
        bound(experts, get_recipe("mxfp4_rht_sr")).begin_step(0)
        rows = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(5)).bfloat16()
        x = torch.cat((torch.zeros(sum(counts) - 4, HIDDEN).bfloat16(), rows)).requires_grad_()
        experts(x, torch.tensor(counts), torch.ones(len(x)))[0].sum().backward()
        assert x.grad is not None
        gradients.append(x.grad[-4:])
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[0], gradients[2])


def test_no_tokens() -> None:
    experts = experts_of(True)
    runtime = bound(experts, get_recipe("fp8_delayed"))
    runtime.begin_step(0)
    found = pass_through(experts, torch.Generator(), (0, 0, 0, 0))
    assert found["y"].shape == found["dx"].shape == (0, HIDDEN)
    assert all(not weight.main_grad.any() for weight in experts.parameters())


def test_checkpoints_have_the_same_entries() -> None:
    """Those of sequential experts load into grouped ones and back, amax histories included."""
    metadata = {"dp_cp_group": torch.distributed.group.WORLD}
    found = []
    for grouped in (False, True):
        experts = experts_of(grouped, gated_linear_unit=True)
        bound(experts, get_recipe("fp8_delayed"))
        state = experts.sharded_state_dict("experts.", ((0, 1, 4),), metadata)
        entries = {
            name: (type(entry), entry.key, getattr(entry, "global_shape", None), getattr(entry, "global_offset", None))
            for name, entry in state.items()
        }
        found.append((list(experts.state_dict()), entries))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["fp8_delayed", "mxfp4_rht_sr"])
def test_a_snapshot_has_rows_of_each_expert(name: str) -> None:
    """Named and measured as those of sequential experts; an expert without tokens has rows of its weights alone."""
    from megatron_lowprec.mcore.debug.operand_probe import OperandProbe

    found, outputs = [], []
    for grouped, probed in ((False, True), (True, True), (True, False)):
        experts = experts_of(grouped)
        bound(experts, get_recipe(name)).begin_step(0)
        with OperandProbe([experts] if probed else [], seed=7) as probe:
            outputs.append(pass_through(experts, torch.Generator().manual_seed(3)))
        found.append([(operand, vars(error)) for operand, error in probe.found()])
    assert found[0] == found[1]
    entries = {(operand.linear, operand.gemm, operand.operand): error["entries"] for operand, error in found[1]}
    for expert, count in enumerate(TOKENS):
        where = f"layers.2.mlp.experts.linear_fc1 of expert {expert}"
        rows = {place[1:]: entries[place] for place in entries if place[0] == where}
        assert {operand for _, operand in rows} == (
            {"input", "weight", "grad_output", "output"} if count else {"weight"}
        )
        assert not count or rows["dgrad", "grad_output"] == count * FFN
    for value, plain in zip(outputs[1].values(), outputs[2].values(), strict=True):
        assert torch.equal(value, plain)
