"""Experts of Hugging Face transformers, whose weights are 3-D parameters, under recipes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_lowprec import convert, get_recipe
from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.experts.expert_linear import ExpertLinear
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.linear.lowprec_linear import _LinearFunction, end_step
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from tests.linear.expert_models import (
    BOTH,
    EXPERTS,
    FFN,
    HIDDEN,
    KINDS,
    TOP_K,
    build,
    experts_of,
    only_experts,
    tokens_of,
    train,
    transformers,
)
from tests.weekly import also_weekly


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "recipe"),
    also_weekly(
        [(kind, recipe) for kind in KINDS for recipe in ("fp8_current", "mxfp8", "mxfp4_rht_sr")],
        ["mixtral-fp8_current", "qwen3_moe-mxfp8", "deepseek_v3-mxfp4_rht_sr"],
    ),
)
def test_fifty_steps(kind: str, recipe: str) -> None:
    """The loss falls by as much as in bf16, to within a tenth of the fall."""
    start, *_, want = train(build(kind), 50)
    model = (convert if recipe == "fp8_current" else only_experts)(build(kind), recipe)
    linears = [path for path, module in model.named_modules() if isinstance(module, ExpertLinear)]
    assert linears == [f"model.layers.0.mlp.experts.{name}_proj_gemms" for name in ("gate_up", "down")]
    assert all(model.get_submodule(path).linear_gemms.recipe.quantized for path in linears)
    losses = train(model, 50)
    assert want < start / 2
    assert abs(losses[-1] - want) < 0.1 * (start - want)


class OneByOne:
    """The experts of a module run one after the other, each by GEMMs of its own."""

    def __init__(self, experts: Any, recipe: str) -> None:
        self._experts = experts
        linear = get_recipe(recipe).linear_recipes[0]
        self.gemms = {
            name: [LinearGemms(linear, LinearId(0, name, expert), 0, AmaxHistory) for expert in range(EXPERTS)]
            for name in ("gate_up_proj", "down_proj")
        }
        for history in self._histories():
            history.to(next(experts.parameters()).device)

    def __call__(self, x: torch.Tensor, index: torch.Tensor, factors: torch.Tensor, number: int) -> torch.Tensor:
        outputs = x.new_zeros(*index.shape, x.shape[1])
        for expert in range(EXPERTS):
            token, choice = torch.where(index == expert)
            gate, up = self.product("gate_up_proj", expert, x[token], number).chunk(2, dim=-1)
            y = self.product("down_proj", expert, self._experts.act_fn(gate) * up, number)
            outputs = outputs.index_put((token, choice), y * factors[token, choice, None])
        return outputs.sum(dim=1)

    def product(self, name: str, expert: int, x: torch.Tensor, number: int) -> torch.Tensor:
        weight = getattr(self._experts, name)[expert]
        y: torch.Tensor = _LinearFunction.apply(x, weight, None, self.gemms[name][expert], RngStep(number, 0), True)
        return y

    def end_step(self) -> None:
        for history in self._histories():
            history.update()

    def _histories(self) -> list[AmaxHistory]:
        every = (gemms for experts in self.gemms.values() for gemms in experts)
        return [history for gemms in every for history, _ in gemms.histories.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "recipe", ["fp8_current", "fp8_delayed", "fp8_rowwise", "mxfp8", "mxfp4_rht_sr", BOTH, "nvfp4_all"]
)
def test_bits_are_those_of_expert_by_expert(recipe: str, dtype: torch.dtype) -> None:
    """Outputs and gradients of two steps; an expert is without tokens, another has an odd number of them."""
    plain = experts_of(build()).to(dtype)
    one_by_one, converted = OneByOne(plain, recipe), convert(copy.deepcopy(plain), recipe)
    generator = torch.Generator().manual_seed(3)
    for number in range(2):
        x, dy = (torch.randn(21, HIDDEN, generator=generator).to(dtype) for _ in range(2))
        index = torch.stack([torch.randperm(3, generator=generator)[:TOP_K] for _ in x])
        factors = torch.rand(index.shape, generator=generator).to(dtype)
        found = []
        for experts in (plain, converted):
            leaves = [leaf.clone().requires_grad_() for leaf in (x, factors)]
            given = leaves[0], index, leaves[1]
            y = one_by_one(*given, number) if experts is plain else converted(*given)
            y.backward(dy)
            found.append([y, *(leaf.grad for leaf in leaves), *(weight.grad for weight in experts.parameters())])
            experts.zero_grad()
        assert len(found[0]) == 5
        assert all(map(torch.equal, *found))
        one_by_one.end_step()
        end_step(converted)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_blockwise", "mxfp8", "mxfp4_rht_sr", "quartet2"])
def test_experts_on_a_gpu_are_grouped(recipe: str) -> None:
    """Every GEMM in one launch; each layer has the results of expert by expert, whose sums may have another order.

    A layer behind the other would not: one more bit in the amax of its input rounds all of it anew.
    """
    config = transformers.MixtralConfig(hidden_size=256, intermediate_size=256, num_local_experts=EXPERTS)
    plain = transformers.models.mixtral.modeling_mixtral.MixtralExperts(config)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(2))
    plain = plain.to("cuda", torch.bfloat16)
    one_by_one, converted = OneByOne(plain, recipe), convert(copy.deepcopy(plain), recipe)
    for linear in (converted.gate_up_proj_gemms, converted.down_proj_gemms):
        group, weight = linear.linear_gemms.group, linear.weight[0]
        assert [group.why_in_a_loop(gemm, weight) for gemm in ("fprop", "dgrad", "wgrad")] == [None] * 3
    generator, tokens = torch.Generator().manual_seed(3), [57, 0, 143, 0]
    for name, linear in (("gate_up_proj", converted.gate_up_proj_gemms), ("down_proj", converted.down_proj_gemms)):
        weight = getattr(plain, name)
        x, dy = (torch.randn(200, size, generator=generator).to(weight) for size in (256, weight.shape[1]))
        found = []
        for experts in (plain, converted):
            leaf = x.clone().requires_grad_()
            if experts is converted:
                y = linear(leaf, tokens)
            else:
                parts = enumerate(leaf.split(tokens))
                y = torch.cat([one_by_one.product(name, expert, part, 0) for expert, part in parts])
            y.backward(dy)
            found.append([y, leaf.grad, getattr(experts, name).grad])
        for got, want in zip(found[1], found[0], strict=True):
            assert torch.linalg.vector_norm(got - want) <= 2**-7 * torch.linalg.vector_norm(want)


def _deepseek() -> Any:
    return experts_of(build("deepseek_v3"))


def _gpt_oss() -> Any:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = transformers.GptOssConfig(hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=EXPERTS)
    return GptOssExperts(config)


def _nemotron_h() -> Any:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    config = transformers.NemotronHConfig(hidden_size=HIDDEN, moe_intermediate_size=FFN, n_routed_experts=EXPERTS)
    return NemotronHExperts(config)


@pytest.mark.parametrize("make", [_deepseek, _gpt_oss, _nemotron_h])
def test_layouts_of_transformers(make: Callable[[], Any]) -> None:
    """Transposed weights, biases, no gate, tokens without an expert: without quantization the experts' own results."""
    plain = make()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.2)
    plain.config._experts_implementation = "eager"
    converted = convert(copy.deepcopy(plain), "bf16")
    x, factors = torch.randn(21, HIDDEN), torch.rand(21, TOP_K)
    index = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in x])
    if make is _deepseek:  # the others fail
        index[4, 1] = EXPERTS
    found = []
    for experts in (plain, converted):
        leaf = x.clone().requires_grad_()
        y = experts(leaf, index, factors)
        y.square().sum().backward()
        found.append([y, leaf.grad, *(parameter.grad for parameter in experts.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_experts_without_tokens() -> None:
    """An empty result, and gradients of zero."""
    converted, x = convert(experts_of(build()), "fp8_delayed"), torch.zeros(0, HIDDEN, requires_grad=True)
    y = converted(x, torch.zeros(0, TOP_K, dtype=torch.int64), torch.ones(0, TOP_K))
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None
    assert not any(weight.grad.any() for weight in converted.parameters())


def test_recomputation_and_evaluation_change_no_bit() -> None:
    want = train(only_experts(build()), 3, microbatches=2)
    recomputed = only_experts(build())
    recomputed.gradient_checkpointing_enable()
    assert train(recomputed, 3, microbatches=2) == want
    evaluated, found = only_experts(build()), []
    optimizer = torch.optim.SGD(evaluated.parameters(), lr=0.3)
    for _ in range(3):
        for microbatch in range(2):
            with torch.no_grad():
                evaluated.eval()(input_ids=tokens_of(7))
            loss = evaluated.train()(input_ids=tokens_of(microbatch), labels=tokens_of(microbatch)).loss
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert found == want


def test_wrappers_of_torch_change_no_bit() -> None:
    """FSDP2 gathers the experts' weights in the dtype of the model."""
    want = train(only_experts(build()), 2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, mesh = only_experts(build()), init_device_mesh("cpu", (1,))
        fully_shard(experts_of(model), mesh=mesh)
        assert train(fully_shard(model, mesh=mesh), 2) == want
        with pytest.raises(UserError, match="gate_up_proj is a DTensor in its forward pass"):
            experts_of(model).gate_up_proj_gemms(torch.zeros(1, HIDDEN), [1, 0, 0, 0])
    finally:
        dist.destroy_process_group()


def test_frozen_experts_have_no_gradient_and_change_no_other() -> None:
    """And save no input."""
    found, x, saved = [], torch.zeros(7, HIDDEN, requires_grad=True), []
    for frozen in (False, True):
        model = convert(build(), "mxfp4_rht_sr")
        experts_of(model).gate_up_proj.requires_grad_(not frozen)
        model(input_ids=tokens_of(0), labels=tokens_of(0)).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, shapes=shapes: shapes.append(t.shape), lambda t: t):
            experts_of(model).gate_up_proj_gemms(x, [7, 0, 0, 0])
        saved.append(x.shape in shapes)
    assert saved == [True, False]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert found[1].pop(name) is None
    assert found[0].pop(name) is not None
    assert all(torch.equal(gradient, found[1][each]) for each, gradient in found[0].items())
