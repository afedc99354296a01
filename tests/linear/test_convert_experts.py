"""Experts of Hugging Face transformers, whose weights are 3-D parameters, under recipes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from megatron_lowprec import convert, get_recipe
from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.convert import plain_state_dict, plan
from megatron_lowprec.linear.experts.expert_linear import ExpertLinear
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.linear.lowprec_linear import _LinearFunction, end_step
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from tests.weekly import also_weekly

transformers = pytest.importorskip("transformers")  # the extra dev has it

VOCABULARY, HIDDEN, FFN, EXPERTS, TOP_K = 32, 64, 64, 4, 2
BOTH = "fp8_mxfp4_rht_sr"  # delayed scales and random draws
KINDS: dict[str, tuple[str, dict[str, int]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS, "intermediate_size": FFN}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": EXPERTS, "moe_intermediate_size": FFN}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": FFN,
            "intermediate_size": FFN,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 64,
            "q_lora_rank": 64,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
    ),
}


def build(kind: str = "mixtral", **options: Any) -> Any:
    """A model of one layer with random weights of seed 0."""
    name, sizes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts_per_tok=TOP_K,
        **sizes,
        **options,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


def experts_of(model: Any) -> Any:
    return model.model.layers[0].mlp.experts


def tokens_of(seed: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(seed))


def only_experts(model: Any, recipe: str = BOTH) -> Any:
    """The model with no other converted layers, which take time."""
    return convert(model, recipe, filter=lambda path, _: ".experts." in path)


def train(model: Any, steps: int, microbatches: int = 1) -> list[float]:
    """Losses of steps on the same batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for _ in range(steps):
        for microbatch in range(microbatches):
            tokens = tokens_of(microbatch)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "recipe"),
    also_weekly(
        [(kind, recipe) for kind in ("mixtral", "qwen3_moe") for recipe in (BOTH, "fp8_current", "mxfp8")],
        [f"mixtral-{BOTH}", "qwen3_moe-fp8_current"],
    ),
)
def test_compiled_experts_are_in_one_graph(kind: str, recipe: str) -> None:
    """However many tokens each of them has; losses are those of eager mode, with draws and histories."""
    want = train(only_experts(build(kind), recipe), 3, microbatches=2)
    model, backend = only_experts(build(kind), recipe), CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    experts_of(model).compile(backend=backend, fullgraph=True)
    assert train(model, 3, microbatches=2) == want
    assert backend.frame_count == 1


@pytest.mark.parametrize("recomputes", [False, True])
def test_compiled_experts_wait_once_for_the_device(recomputes: bool) -> None:
    """One copy of the counts serves both layers and the backward pass, also where it recomputes activations."""
    graphs: list[Any] = []

    def graph_of(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    partition = min_cut_rematerialization_partition  # of Inductor
    backend = aot_autograd(fw_compiler=graph_of, bw_compiler=graph_of, partition_fn=partition)
    module = experts_of(only_experts(build()))
    torch._dynamo.reset()
    run = partial(checkpoint, module, use_reentrant=False) if recomputes else module
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    compiled(torch.randn(4, HIDDEN, requires_grad=True), torch.zeros(4, 1).long(), torch.ones(4, 1)).sum().backward()

    def calls(graph: Any, operator: str) -> list[Any]:
        target = getattr(torch.ops.megatron_lowprec, operator).default
        return list(graph.graph.find_nodes(op="call_function", target=target))

    (copied,) = calls(graphs[0], "counts_on_host")
    assert [node.args[2] for node in calls(graphs[0], "expert_linear")] == [copied] * 2
    assert not calls(graphs[1], "counts_on_host")
    again, backward = calls(graphs[1], "expert_linear"), calls(graphs[1], "expert_linear_backward")
    assert len(again) == recomputes
    saved = [node.args[2] for node in again] + [node.args[3] for node in backward]
    assert [(node.op, node.name) for node in saved] == [("placeholder", copied.name)] * (2 + recomputes)


def test_compiled_experts_leave_tokens_of_no_expert_out() -> None:
    """As the router marks them where ranks hold some experts each; gradients of their rows are zeros."""
    index = torch.tensor([[0, EXPERTS], [2, 1], [EXPERTS, EXPERTS], [2, 3]])
    found = []
    for compiles in (False, True):
        module = experts_of(only_experts(build()))
        if compiles:
            torch._dynamo.reset()
            module.compile(backend="aot_eager", fullgraph=True)
        x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = module(x, index, torch.full((4, 2), 0.5))
        y.backward(y.detach())
        found.append([y.detach(), x.grad, *(each.grad for each in module.parameters(recurse=False))])
    assert all(map(torch.equal, *found))
    assert found[0][1][2].count_nonzero() == 0


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


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _loaded(model: Any) -> Any:
    other = only_experts(build())
    other.load_state_dict(copy.deepcopy(model.state_dict()), strict=True)
    return other


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), _saved, _loaded])
def test_a_copy_continues_as_the_model(copied: Callable[[Any], Any]) -> None:
    model = only_experts(build())
    train(model, 2)
    other = copied(model)
    del other.lm_head  # the copy shares nothing with the model
    other = copied(model)
    assert isinstance(experts_of(other), type(experts_of(build())))
    state = model.state_dict()
    assert train(other, 2) == train(model, 2)
    assert all(torch.equal(value, state[key]) is False for key, value in other.state_dict().items() if "amax" in key)


def test_a_shallow_copy_takes_no_layer_of_its_source() -> None:
    experts = experts_of(only_experts(build()))
    other = copy.copy(experts)
    assert other.down_proj_gemms is not experts.down_proj_gemms
    assert other.down_proj_gemms.weight is other.down_proj
    del other
    assert experts.down_proj_gemms.weight is experts.down_proj
    assert isinstance(experts.down_proj_gemms(torch.zeros(1, FFN), [1, 0, 0, 0]), torch.Tensor)


def test_state_dict_has_the_keys_of_the_model_and_of_the_recipe() -> None:
    plain, model = build(), only_experts(build())
    experts = "model.layers.0.mlp.experts."
    added = sorted(key.removeprefix(experts) for key in model.state_dict() if key.startswith(experts))
    operands = [f"amax.{tensor}" for tensor in ("input", "weight")]
    names = [f"{name}_proj_gemms.{key}" for name in ("down", "gate_up") for key in (*operands, "draws")]
    assert added == sorted([*names, "down_proj", "gate_up_proj"])
    assert model.state_dict()[f"{experts}down_proj_gemms.amax.input"].shape == (EXPERTS, 1025)
    plain.load_state_dict(plain_state_dict(model), strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)
    with pytest.warns(UserWarning, match="keys that this recipe does not use"):
        convert(build(), "mxfp8").load_state_dict(model.state_dict(), strict=True)


def test_scales_follow_the_optimizer_of_the_experts() -> None:
    """Each expert has its own amaxes; one without tokens keeps its window, and is evaluated by its current amax."""
    converted = convert(experts_of(build()), "fp8_delayed")
    x, factors = torch.randn(8, HIDDEN), torch.ones(8, 1)
    optimizer = torch.optim.SGD(converted.parameters(), lr=0.1)
    converted(x, torch.ones(8, 1, dtype=torch.int64), factors).sum().backward()
    torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()  # of other weights
    assert not converted.gate_up_proj_gemms.amax.input.any()
    optimizer.step()
    of_inputs = converted.gate_up_proj_gemms.amax.input
    assert of_inputs[:, 0].tolist() == [0, float(x.abs().max()), 0, 0]
    index = torch.tensor([0, 1] * 4).unsqueeze(1)
    with torch.no_grad(), pytest.warns(UserWarning, match="scales by current amaxes"):
        y = converted.eval()(1e6 * x, index, factors)
    current = convert(experts_of(build()), "fp8_current").eval()
    current.load_state_dict(plain_state_dict(converted))
    of_current = current(1e6 * x, index, factors)
    assert torch.equal(y[::2], of_current[::2])
    assert y[1::2].abs().max() < 1e-3 * of_current[1::2].abs().max()  # saturated


class OwnExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.weight = (nn.Parameter(torch.randn(EXPERTS, FFN, HIDDEN)) for _ in range(2))


def test_experts_that_stay_are_named_with_the_reason() -> None:
    def changed(change: Callable[[Any], Any]) -> str:
        model = build()
        change(model)
        with pytest.warns(UserWarning, match="mlp.experts") as warned:
            convert(model, "mxfp8")
        assert not any(isinstance(module, ExpertLinear) for module in model.modules())
        return str(warned[0].message)

    def replace_forward(model: Any) -> None:
        experts_of(model).forward = lambda *_: None

    def replace_experts(model: Any) -> None:
        model.model.layers[0].mlp.experts = OwnExperts()

    def spread(model: Any) -> None:
        experts_of(model)._is_expert_parallel = True

    def take_kernels(model: Any) -> None:
        model.config._experts_implementation_internal = "sonicmoe"

    assert "experts is replaced on the module" in changed(replace_forward)
    own = changed(replace_experts)
    assert "OwnExperts have a forward of their own" in own
    assert "not converted: model.layers.*.mlp.experts.w1, model.layers.*.mlp.experts.weight (" in own
    assert "spread over ranks" in changed(spread)
    assert "the implementation sonicmoe, whose kernels follow no recipe" in changed(take_kernels)
    found = plan(build(), "mxfp8", dtype=torch.float16).excluded["model.layers.0.mlp.experts.down_proj"]
    assert "float16" in found.reason


def test_each_weight_of_the_experts_is_a_layer_for_rules_and_filters() -> None:
    kept = convert(build(), "mxfp8", keep_bf16=["*.experts.down_proj"])
    paths = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"]
    found = plan(build(), "mxfp8", keep_bf16=["*.experts.down_proj"])
    assert set(paths) & set(found.converted) == {paths[0]}
    assert found.excluded[paths[1]] == ("by keep_bf16", True)
    linears = [experts_of(kept).gate_up_proj_gemms, experts_of(kept).down_proj_gemms]
    assert [linear.linear_gemms.recipe.quantized for linear in linears] == [True, False]
    model, seen = build(), {}
    plan(model, "mxfp8", filter=lambda path, module: seen.setdefault(path, module) is None)
    assert [seen[path] for path in paths] == [experts_of(model)] * 2
    with pytest.raises(UserError, match="already: convert a model once"):
        convert(kept, "mxfp8")


def test_experts_are_refused_where_they_cannot_run() -> None:
    converted, index = convert(experts_of(build()), "mxfp8"), torch.zeros(4, 1, dtype=torch.int64)
    with pytest.raises(UserError, match=r"weight of torch.float32 got an input of torch.bfloat16"):
        converted(torch.zeros(4, HIDDEN).bfloat16(), index, torch.ones(4, 1))
    x = torch.zeros(4, HIDDEN, requires_grad=True)
    with pytest.raises(UserError, match="create_graph=True reached down_proj"):
        torch.autograd.grad(converted(x, index, torch.ones(4, 1)).sum(), x, create_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        in_bf16 = converted(torch.ones(4, HIDDEN), index, torch.ones(4, 1))
    assert torch.equal(in_bf16, converted.bfloat16()(torch.ones(4, HIDDEN).bfloat16(), index, torch.ones(4, 1)).float())
