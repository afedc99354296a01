"""Saved activations in a format: gradients against plain torch, the same forward bits, and what is refused."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_lowprec import QuantSpec, UserError, get_recipe, quantize
from megatron_lowprec.recipe.activation_spec import ActivationSpec
from megatron_lowprec.recipe.recipe import Recipe
from tests.mcore.test_grouped_mlp import FFN, HIDDEN, TOKENS, bound, experts_of, two_steps
from tests.mcore.test_spec import config_of

pytestmark = pytest.mark.usefixtures("world")

SWIGLU = {"gated_linear_unit": True, "activation_func": F.silu, "bias_activation_fusion": True}
SCALES: dict[str, Any] = {"granularity": "1x128", "scale_format": "e8m0", "scale_rule": "round_up"}


def caching(name: str = "bf16", **formats: Any) -> Recipe:
    return replace(get_recipe(name), activations=ActivationSpec(**formats))


def decoded(x: torch.Tensor, form: str) -> torch.Tensor:
    return quantize(x.detach(), QuantSpec(form, **SCALES)).dequantize(x.dtype)


def glu(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


# ---- SwiGLU's input
def expected(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, probs: torch.Tensor, dy: torch.Tensor, form: str
) -> dict[str, torch.Tensor]:
    """An expert's output and gradients, with h quantized and dequantized between the passes."""
    h = x @ w1.t()
    y = (glu(h) * probs[:, None]) @ w2.t()
    cached, of_probs = decoded(h, form).requires_grad_(), probs.detach().clone().requires_grad_()
    active = glu(cached) * of_probs[:, None]
    dh, dprobs = torch.autograd.grad(active, (cached, of_probs), dy @ w2)
    return {"y": y, "dx": dh @ w1, "dprobs": dprobs, "dw1": dh.t() @ x, "dw2": dy.t() @ active.detach()}


@pytest.mark.parametrize("grouped", [False, True], ids=["sequential", "grouped"])
@pytest.mark.parametrize("form", ["e4m3", "e5m6"])
def test_gradients_are_those_of_the_decoded_input(form: str, grouped: bool) -> None:
    from megatron.core.transformer.moe.experts import SequentialMLP

    experts = experts_of(True, params_dtype=torch.float32, **SWIGLU)
    bound(experts, caching(swiglu_input=form)).begin_step(0)
    with_formats(experts, form)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(TOKENS), HIDDEN, generator=generator).requires_grad_()
    probs = torch.rand(sum(TOKENS), generator=generator).requires_grad_()
    forward = experts if grouped else lambda *args: SequentialMLP.forward(experts, *args)
    y, _ = forward(x, torch.tensor(TOKENS), probs)
    dy = torch.randn(y.shape, generator=generator)
    y.backward(dy)
    rows = [t.detach().split(TOKENS) for t in (x, probs, dy)]
    for number, (x_e, probs_e, dy_e) in enumerate(zip(*rows, strict=True)):
        expert, at = experts.local_experts[number], slice(sum(TOKENS[:number]), sum(TOKENS[: number + 1]))
        w1, w2 = expert.linear_fc1.weight, expert.linear_fc2.weight
        want = expected(x_e, w1.detach(), w2.detach(), probs_e, dy_e, form)
        assert x.grad is not None
        assert probs.grad is not None
        got = {"y": y[at], "dx": x.grad[at], "dprobs": probs.grad[at], "dw1": w1.main_grad, "dw2": w2.main_grad}
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6, msg=f"{name} of expert {number}")


def with_formats(experts: Any, form: str) -> None:
    """As ``bind_activations`` does for a layer."""
    from megatron_lowprec.formats import FORMATS

    for expert in experts.local_experts:
        expert.swiglu_format = FORMATS.get(form)


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "fp8_delayed", "fp8_blockwise", "mxfp4_rht_sr"])
def test_grouped_experts_have_the_bits_of_experts_one_after_the_other(name: str) -> None:
    from megatron.core.transformer.moe.experts import SequentialMLP

    found = []
    for grouped in (False, True):
        experts = experts_of(True, **SWIGLU)
        runtime = bound(experts, caching(name, swiglu_input="e4m3"))
        with_formats(experts, "e4m3")
        one_by_one = lambda *args, experts=experts: SequentialMLP.forward(experts, *args)  # noqa: E731
        one_by_one.named_parameters = experts.named_parameters  # type: ignore[attr-defined]
        found.append(two_steps(experts if grouped else one_by_one, runtime))
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        assert torch.equal(found[1][key], value), key


def test_only_gradients_change() -> None:
    found = []
    for form in ("none", "e4m3"):
        experts = experts_of(True, **SWIGLU)
        runtime = bound(experts, caching("fp8_delayed", swiglu_input=form))
        with_formats(experts, form)
        found.append(two_steps(experts, runtime))
    plain, cached = found
    assert torch.equal(plain["0 0 y"], cached["0 0 y"])
    assert not torch.equal(plain["0 0 dx"], cached["0 0 dx"])
    # histories of inputs hold the amax of fprop's operand, not of the decoded one
    inputs = [layer.histories["input"][1] for layer in runtime.layers]
    assert torch.equal(plain["history 0"][:, inputs], cached["history 0"][:, inputs])


# ---- attention's output
def attention_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, form: str) -> Any:
    """Gradients of causal attention [b, heads, s, d] as a kernel computes them, from a saved output."""
    b, heads, s, d = q.shape
    scores = (q @ k.mT / math.sqrt(d)).masked_fill(torch.ones(s, s).triu(1).bool(), -torch.inf)
    p = scores.softmax(-1)
    out = p @ v
    rows = out.permute(2, 0, 1, 3).reshape(s * b, heads * d)
    saved = (rows if form == "none" else decoded(rows, form)).view(s, b, heads, d).permute(1, 2, 0, 3)
    ds = p * (dout @ v.mT - (dout * saved).sum(-1, keepdim=True)) / math.sqrt(d)
    return out, (ds @ k, ds.mT @ q, p.mT @ dout)


@pytest.mark.parametrize("form", ["none", "e4m3", "e5m6"])
def test_attention_s_gradients_are_those_of_its_decoded_output(form: str) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_lowprec.formats import FORMATS
    from megatron_lowprec.mcore.fusion import attached_cache
    from megatron_lowprec.mcore.layers.attention import SdpaAttention

    config = config_of(hidden_size=128, num_attention_heads=4)
    attention = SdpaAttention(config, 1, AttnMaskType.causal, "self")
    attention.output_format = FORMATS.get(form)
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(32, 2, 4, 32, generator=generator) for _ in range(4))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    y = attention(*leaves, None)
    y.backward(dout.flatten(2))
    heads_first = [t.permute(1, 2, 0, 3) for t in (q, k, v, dout)]
    out, want = attention_gradients(*heads_first, form)
    torch.testing.assert_close(y, out.permute(2, 0, 1, 3).flatten(2))
    for leaf, gradient in zip(leaves, want, strict=True):
        torch.testing.assert_close(leaf.grad, gradient.permute(2, 0, 1, 3), rtol=1e-4, atol=1e-5)
    assert (attached_cache(y) is None) == (form == "none")
    with torch.no_grad():
        assert attached_cache(attention(q, k, v, None)) is None


def test_an_output_with_padded_heads_is_refused() -> None:
    """As kernels of a GPU pad heads to a multiple of 8 channels: the saved tensor is not the returned one."""
    from megatron_lowprec.formats import FORMATS
    from megatron_lowprec.mcore.layers.cached_attention import cached_output

    q = torch.randn(1, 2, 16, 72, requires_grad=True)
    with pytest.raises(UserError, match="heads of 72 channels, and the model has 64"):
        cached_output(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)[..., :64], FORMATS["e5m6"])


def test_the_graph_of_attention_is_freed() -> None:
    """A node that holds its own output keeps it, and a model's process groups, forever."""
    from megatron_lowprec.formats import FORMATS
    from megatron_lowprec.mcore.layers import cached_attention

    def attend() -> torch.Tensor:
        q = torch.randn(1, 2, 16, 64, requires_grad=True)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    y = cached_attention.cached_output(attend, FORMATS["e5m6"])
    held = [weakref.ref(each) for each in gc.get_objects() if type(each) is cached_attention.SavedTensor]
    assert held
    del y
    gc.collect()
    assert all(each() is None for each in held)


def test_linear_proj_takes_the_decoded_output() -> None:
    """Its weight gradient is that of the decoded input, whether or not attention has attached codes."""
    from megatron_lowprec.formats import FORMATS
    from megatron_lowprec.linear.layer_tensors import CachedInput
    from megatron_lowprec.mcore.fusion import attach_metadata

    layer = bound_layer(caching(attention_output="e5m6"))
    proj = layer.self_attention.linear_proj
    assert proj.input_format is FORMATS["e5m6"]
    x = torch.randn(6, 2, 128, generator=torch.Generator().manual_seed(2))
    found = []
    for attached in (False, True):
        proj.weight.grad = None
        leaf = x.clone().requires_grad_()
        if attached:
            attach_metadata(leaf, cached_input=CachedInput.of(leaf, FORMATS["e5m6"]))
        y, _ = proj(leaf)
        y.sum().backward()
        assert torch.equal(y.detach(), F.linear(x, proj.weight).detach())
        found.append(proj.weight.grad)
    rows = decoded(x.reshape(-1, 128), "e5m6")
    torch.testing.assert_close(found[0], torch.ones(12, 128).t() @ rows)
    assert torch.equal(found[0], found[1])


# ---- binding
def bound_layer(recipe: Recipe, *, stock: bool = False, attention: str = "auto", **options: Any) -> Any:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module

    from megatron_lowprec.mcore.layers.gpt_spec import gpt_block_spec
    from megatron_lowprec.mcore.runtime import RecipeRuntime, bind_layer

    model_parallel_cuda_manual_seed(1)
    sizes = {"hidden_size": 128, "ffn_hidden_size": FFN, "add_bias_linear": False, **SWIGLU}
    config = config_of(**{**sizes, **options})
    spec = gpt_block_spec(config, no_lowprec_linears=stock, attention_backend=attention)
    layer = build_module(spec.layer_specs[0], config, layer_number=1)
    bind_layer(RecipeRuntime(recipe, torch.device("cpu"), num_layers=1, seed=1, accumulate_wgrad=False), layer)
    return layer


def test_binding_sets_and_clears_the_formats() -> None:
    from megatron_lowprec.mcore.activation_cache import bind_activations

    layer = bound_layer(caching(attention_output="e5m6", swiglu_input="e4m3"))
    attention, mlp = layer.self_attention, layer.mlp
    names = [getattr(each, "name", None) for each in (attention.core_attention.output_format, mlp.swiglu_format)]
    assert names == ["e5m6", "e4m3"]
    bind_activations(get_recipe("bf16"), layer)
    assert attention.core_attention.output_format is attention.linear_proj.input_format is mlp.swiglu_format is None


@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({}, True),
        ({"attention": "local"}, False),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, False),
    ],
    ids=["saved", "unfused", "recomputed"],
)
def test_save_memory_keeps_codes_of_an_output_that_nothing_else_saves(options: dict[str, Any], again: bool) -> None:
    from megatron_lowprec.mcore.activation_cache import bind_activations

    recipe = get_recipe("fp8_current")
    layer = bound_layer(recipe, **options)
    bind_activations(recipe, layer, save_memory=True)
    assert layer.self_attention.linear_proj.casts_again == again


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gelu": ({"swiglu_input": "e4m3"}, {"gated_linear_unit": False, "bias_activation_fusion": False}, "add --swiglu"),
    "another gate": ({"swiglu_input": "e4m3"}, {"activation_func": F.gelu}, "SwiGLU without variants"),
    "width of the MLP": ({"swiglu_input": "e4m3"}, {"ffn_hidden_size": 192}, "192 input features"),
    "width of attention": ({"attention_output": "e5m6"}, {"hidden_size": 192}, "192 input features"),
    "full recompute": (
        {"attention_output": "e5m6"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        "recompute_granularity full",
    ),
    "recomputed MLP": (
        {"swiglu_input": "e4m3"},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        "recompute_modules mlp",
    ),
    "unscaled codes of Megatron-core": (
        {"swiglu_input": "e4m3"},
        {"activation_func_fp8_input_store": True},
        "activation_func_fp8_input_store",
    ),
    "Megatron-core's linear layers": ({"attention_output": "e5m6"}, {"stock": True}, "RowParallelLinear"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_exclude_saved_formats_are_refused(name: str) -> None:
    formats, options, says = REFUSED[name]
    with pytest.raises(UserError, match=says):
        bound_layer(caching(**formats), **options)


def test_other_frameworks_layers_are_refused() -> None:
    from megatron_lowprec import convert
    from megatron_lowprec.te.translation import why_not

    recipe = caching("fp8_current", attention_output="e5m6")
    with pytest.raises(UserError, match="also sets activations, but convert changes only linear layers"):
        convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), recipe)
    assert why_not(recipe) == "it also quantizes saved activations, which only this project's layers do"


def test_a_format_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match=r"swiglu_input is 'e5m2', but must be one of none, e4m3, e5m6"):
        ActivationSpec(swiglu_input="e5m2")  # type: ignore[arg-type]
