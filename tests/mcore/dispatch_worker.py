"""Layers with experts whose tokens travel as codes, and as bf16: two processes with expert parallelism.

``test_token_dispatch.py`` starts it. On a CPU the GEMMs are emulated. On GPUs they are native where the
GPU has them, over NCCL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_lowprec import UserError, get_recipe
from megatron_lowprec.linear.backends.emulated.dense import EmulatedGemms
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.quantization.quantizer import quantize
from megatron_lowprec.recipe.fp8_dispatch import dispatched_bytes
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import GemmSpec, QuantSpec
from tests.checks import run_checks
from tests.mcore.recomputation import bounded_recomputation

HIDDEN, FFN, SEQUENCE, BATCH, EXPERTS, TOPK = 256, 128, 12, 2, 4, 2
TOKENS = SEQUENCE * BATCH
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# experts of each token, by rank: all to the other rank's; of this rank one gets a single token, another none
UNEVEN = {0: [(2, 3)] * (TOKENS - 1) + [(1, 2)], 1: [(1, 3)] * (TOKENS - 5) + [(2, 3)] * 5}


def with_input(name: str, **fields: Any) -> Recipe:
    """A recipe with these fields of fc1's operands x."""
    recipe = get_recipe(name)
    gemms = {
        gemm: replace(found, input=replace(found.input, **fields))
        for gemm, found in recipe.gemms.items()
        if isinstance(found.input, QuantSpec)
    }
    return replace(recipe, name=f"{name}, other input", **gemms)


RECIPES = {
    "fp8_blockwise": get_recipe("fp8_blockwise"),
    "fp8_rowwise": get_recipe("fp8_rowwise"),
    "mxfp8": get_recipe("mxfp8"),
    "powers of two": with_input("fp8_blockwise", scale_rule="amax_pow2"),
    "mxfp4": with_input("mxfp8_ocp", format="e2m1", headroom=0.75),
    "mxfp6": with_input("mxfp8", format="e2m3"),
}


def config_of(**more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    options: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "num_attention_heads": 2,
        "expert_model_parallel_size": 2,
        "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": FFN,
        "moe_router_topk": TOPK,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**(options | more))


def build(recipe: Recipe, dispatch: bool, **more: Any) -> tuple[Any, Any]:
    """A block of layers with experts, and its runtime; the same weights on each call."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_block import TransformerBlock

    from megatron_lowprec.mcore.layers.gpt_spec import gpt_block_spec
    from megatron_lowprec.mcore.runtime import bind_recipe

    config = config_of(**more)
    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(6)
    block = TransformerBlock(config, gpt_block_spec(config)).to(DEVICE, config.params_dtype)
    block.train()
    layers = config.num_layers
    return block, bind_recipe([block], recipe, num_layers=layers, seed=1, fp8_dispatch=dispatch)


@contextmanager
def counted() -> Iterator[Counter[tuple[torch.dtype, int]]]:
    """Bytes that this rank gives to all-to-alls: (dtype, bytes a row) -> bytes."""
    sent: Counter[tuple[torch.dtype, int]] = Counter()
    plain = dist.all_to_all_single

    def all_to_all_single(output: torch.Tensor, input: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent[input.dtype, input[:1].nbytes if input.dim() > 1 else input.element_size()] += input.nbytes
        return plain(output, input, *args, **options)

    with patch.object(dist, "all_to_all_single", all_to_all_single):
        yield sent


def route_unevenly(block: Any) -> None:
    """Experts of ``UNEVEN`` instead of the router's, with its first probabilities."""

    def route(_: Any, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        best = output[0].topk(TOPK, dim=1).values
        chosen = torch.tensor(UNEVEN[dist.get_rank()], device=DEVICE)
        probs = torch.zeros_like(output[0]).scatter(1, chosen, best)
        return probs, torch.zeros_like(output[1]).scatter(1, chosen, True)

    for layer in block.layers:
        layer.mlp.router.register_forward_hook(route)


def steps(block: Any, runtime: Any, count: int = 1) -> dict[str, torch.Tensor]:
    """Outputs and all gradients of ``count`` steps of two microbatches; weights follow their gradients."""
    generator, found = torch.Generator().manual_seed(10 + dist.get_rank()), {}
    for step in range(count):
        runtime.begin_step(step)
        block.zero_grad()
        for microbatch in range(2):
            runtime.begin_microbatch(microbatch)
            x = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).bfloat16().to(DEVICE).requires_grad_()
            y = block(hidden_states=x, attention_mask=None)
            y.backward(torch.randn(y.shape, generator=generator).bfloat16().to(DEVICE))
            assert x.grad is not None
            found |= {f"y {step} {microbatch}": y.detach(), f"dx {step} {microbatch}": x.grad}
        runtime.end_step()
        with torch.no_grad():
            for name, weight in block.named_parameters():
                if weight.grad is not None:
                    found[f"{name} {step}"] = weight.grad.clone()
                    weight -= 0.01 * weight.grad
    return found


def differing(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    assert got.keys() == want.keys()
    assert len(got) > 8
    for name, value in got.items():
        assert torch.isfinite(value).all(), name
    return [name for name in want if not torch.equal(got[name], want[name])]


@contextmanager
def wgrad_from_codes() -> Iterator[None]:
    """wgrad of experts takes x of fc1 and dy of fc2 as tensors that were rounded to the codes of fprop and dgrad."""
    plain = LinearGemms.wgrad

    def wgrad(gemms: LinearGemms, dy: Any, x: Any, *args: Any, **options: Any) -> torch.Tensor:
        if gemms.linear_id.name.endswith("mlp.experts.linear_fc2") and len(x):
            spec = gemms.recipe.dgrad.grad_output
            assert spec is not None
            assert dy.quantized is None
            dy = replace(dy, matrix=quantize(dy.matrix, spec).dequantize(dy.matrix.dtype))
        if gemms.linear_id.name.endswith("mlp.experts.linear_fc1") and len(x):
            spec = gemms.recipe.fprop.input
            assert spec is not None
            assert isinstance(x, torch.Tensor)
            x = quantize(x, spec).dequantize(x.dtype)
        return plain(gemms, dy, x, *args, **options)

    with patch.object(LinearGemms, "wgrad", wgrad):
        yield


def bits(name: str, grouped: bool, uneven: bool = False, **more: Any) -> None:
    """Output and gradients of x are those of a bf16 dispatch; experts' weight gradients are of dequantized codes."""
    found = []
    for dispatch in (False, True):
        block, runtime = build(RECIPES[name], dispatch, moe_grouped_gemm=grouped, **more)
        if uneven:
            route_unevenly(block)
        found.append(steps(block, runtime))
    differ = differing(found[1], found[0])
    weights = [weight for weight in found[0] if "local_experts" in weight]
    assert len(weights) == more.get("num_moe_experts", EXPERTS)  # two of each expert, half of them on a rank
    used = [weight for weight in weights if found[0][weight].any()]
    assert len(used) == len(weights) - 2 * (uneven and dist.get_rank() == 0)
    assert set(differ) <= set(used)
    spec = RECIPES[name].fprop.input
    assert spec is not None
    # with powers of two both roundings keep the same mantissa bits, but of subnormal codes
    assert differ or spec.power_of_two_scale
    if DEVICE == "cuda":  # native GEMMs save codes along tokens, not x
        return
    with wgrad_from_codes():
        block, runtime = build(RECIPES[name], False, moe_grouped_gemm=grouped, **more)
        if uneven:
            route_unevenly(block)
        assert not differing(found[1], steps(block, runtime))


def layers_in_sequence(**more: Any) -> None:
    """Two layers over two steps, recomputed or not: the bits of bf16 with fc1's weight gradient from the codes."""
    with bounded_recomputation():
        got = steps(*build(RECIPES["mxfp8"], True, num_layers=2, **more), count=2)
        with wgrad_from_codes():
            want = steps(*build(RECIPES["mxfp8"], False, num_layers=2, **more), count=2)
    assert not differing(got, want)


def bytes_on_the_wire(name: str) -> None:
    """Rows of tokens, and of gradients for fc2, have the bytes of the formula; both are combined in bf16."""
    recipe = RECIPES[name]
    assert recipe.fprop.input is not None
    assert recipe.dgrad.grad_output is not None
    bf16 = 2 * HIDDEN
    width, back = (dispatched_bytes(spec, HIDDEN) for spec in (recipe.fprop.input, recipe.dgrad.grad_output))
    expected = {
        "fp8_blockwise": HIDDEN + 2 * 4,
        "fp8_rowwise": HIDDEN + 1,
        "mxfp8": HIDDEN + 8,
        "powers of two": HIDDEN + 2,
        "mxfp4": HIDDEN // 2 + 8,
        "mxfp6": HIDDEN + 8,
    }
    assert width == expected[name]
    assert max(width, back) <= 0.55 * bf16
    rows = 2 * TOKENS * TOPK  # of two microbatches
    for dispatch in (False, True):
        block, runtime = build(recipe, dispatch)
        got: list[int] = []  # tokens of the experts on this rank, in each microbatch
        experts = block.layers[0].mlp.experts
        experts.register_forward_pre_hook(lambda _, inputs, got=got: got.append(len(inputs[0])))
        with counted() as sent:
            steps(block, runtime)
        probabilities = {key: sent.pop(key) for key in list(sent) if key[1] <= 4}
        assert probabilities
        want: Counter[tuple[torch.dtype, int]] = Counter()
        for size in (width, back):
            want[(torch.uint8, size) if dispatch else (torch.bfloat16, bf16)] += rows * (size if dispatch else bf16)
        # what a rank gives to combine outputs and gradients of tokens is what it got
        want[torch.bfloat16, bf16] += sum(got) * 2 * bf16
        assert sent == want


def quantized_once(grouped: bool) -> None:
    """Operands of fc1's fprop and fc2's dgrad are quantized before tokens are copied, and not again."""
    calls: list[tuple[str, tuple[int, ...]]] = []
    plain = EmulatedGemms.quantize

    def quantizing(gemms: EmulatedGemms, tensor: str, matrix: Any, rng_step: Any, request: Any, *amax: Any) -> Any:
        if request.rowwise:
            calls.append((tensor, tuple(matrix.shape)))
        return plain(gemms, tensor, matrix, rng_step, request, *amax)

    block, runtime = build(RECIPES["fp8_blockwise"], True, moe_grouped_gemm=grouped)
    runtime.begin_step(0)
    with patch.object(EmulatedGemms, "quantize", quantizing):
        y = block(hidden_states=torch.randn(SEQUENCE, BATCH, HIDDEN).bfloat16(), attention_mask=None)
        y.backward(torch.randn(y.shape).bfloat16())
    inputs, gradients = ([shape for found, shape in calls if found == tensor] for tensor in ("input", "grad_output"))
    # linear_qkv and linear_proj, the tokens of this rank, and linear_fc2 of two experts
    assert [shape[1] for shape in inputs] == [HIDDEN, HIDDEN, HIDDEN, FFN, FFN]
    assert inputs[2] == (TOKENS, HIDDEN)
    # dy of the tokens of this rank, linear_fc1 of two experts, linear_proj and linear_qkv
    assert [shape[1] for shape in gradients] == [HIDDEN, 2 * FFN, 2 * FFN, HIDDEN, 3 * HIDDEN]
    assert gradients[0] == (TOKENS, HIDDEN)


def saved_codes() -> None:
    """The backward pass of fc1 saves codes and scales, not bf16."""
    saved: list[torch.Tensor] = []
    block, runtime = build(RECIPES["fp8_blockwise"], True, moe_grouped_gemm=True)
    runtime.begin_step(0)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN).bfloat16().requires_grad_()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(hidden_states=x, attention_mask=None)
    codes = [tensor for tensor in saved if tensor.dtype == torch.float8_e4m3fn]
    assert [tensor.shape[1] for tensor in codes] == [HIDDEN]


def inspected() -> None:
    """Tokens travel in bf16 while a step is searched for NaN: operands are then in memory."""
    from megatron_lowprec.mcore.debug.finite_check import FiniteCheck

    block, runtime = build(RECIPES["mxfp8"], True)
    with FiniteCheck([block]) as check, counted() as sent:
        steps(block, runtime)
    assert check.first is None
    assert not any(dtype == torch.uint8 for dtype, _ in sent)
    with counted() as sent:
        steps(block, runtime)
    assert any(dtype == torch.uint8 for dtype, _ in sent)


def header() -> None:
    """Layers and bytes; a layer that the recipe leaves in bf16 sends bf16."""
    recipe = replace(get_recipe("mxfp8"), keep_bf16=replace(get_recipe("mxfp8").keep_bf16, last_layers=1))
    block, runtime = build(recipe, True, num_layers=2)
    line = next(line for line in runtime.header() if "--moe-fp8-dispatch" in line)
    assert "to experts as codes in 1, gradients to linear_fc2 in 1 of 2 layers" in line
    assert "264 bytes a token and expert instead of 512" in line
    with counted() as sent:
        steps(block, runtime)
    assert sent[torch.uint8, 264] == 2 * 2 * TOKENS * TOPK * 264


def under_spec() -> None:
    """A GPTModel from ``layer_spec`` sends codes, and has the losses of one that sends bf16."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_lowprec.mcore.layer_spec import layer_spec

    found = []
    tokens = torch.randint(64, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(dist.get_rank()))
    for dispatch in (False, True):
        torch.manual_seed(5)
        model_parallel_cuda_manual_seed(5)
        spec = layer_spec(RECIPES["mxfp8"], seed=1, fp8_dispatch=dispatch)
        model = GPTModel(config_of(), spec, vocab_size=64, max_sequence_length=SEQUENCE).bfloat16()
        with counted() as sent:
            loss = model(tokens, torch.arange(SEQUENCE).expand_as(tokens), None, labels=tokens)
            loss.mean().backward()
        found.append(loss.detach())
        assert sent[torch.uint8, 264] == (2 * TOKENS * TOPK * 264 if dispatch else 0)
    assert torch.equal(*found)


def losses() -> None:
    """Weight gradients of experts differ from those of a bf16 dispatch by less than the rounding of the format."""
    found = {}
    for name in ("fp8_blockwise", "powers of two", "mxfp8"):
        for dispatch in (False, True):
            block, runtime = build(RECIPES[name], dispatch)
            found[name, dispatch] = steps(block, runtime)
        want, got = (
            torch.cat([v.flatten().double() for k, v in found[name, on].items() if "local_experts" in k])
            for on in (False, True)
        )
        assert (got - want).norm() / want.norm() < 0.1, name


REFUSALS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "the all-gather dispatcher",
        "--moe-token-dispatcher-type is allgather",
        {"moe_token_dispatcher_type": "allgather"},
    ),
    (
        "probabilities of the input",
        "moe_apply_probs_on_input",
        {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    ),
    (
        "padding",
        "moe_pad_expert_input_to_capacity",
        {
            "moe_pad_expert_input_to_capacity": True,
            "moe_expert_capacity_factor": 1.0,
            "moe_router_load_balancing_type": "none",
        },
    ),
    (
        "overlap",
        "moe_shared_expert_overlap",
        {"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": FFN},
    ),
]


def refused(reason: str, more: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"--moe-fp8-dispatch .*{reason}"):
        build(RECIPES["mxfp8"], True, **more)


def gradients_in_bf16(recipe: Recipe, **more: Any) -> None:
    """Gradients travel in bf16 where dgrad takes no such codes, or linear_fc2 has a bias; tokens travel as codes."""
    block, runtime = build(recipe, True, **more)
    line = next(line for line in runtime.header() if "--moe-fp8-dispatch" in line)
    assert "to experts as codes in 1, gradients to linear_fc2 in 0 of 1 layers" in line
    with counted() as sent:
        steps(block, runtime)
    assert sent[torch.uint8, 264] == 2 * TOKENS * TOPK * 264


def recipes_refused() -> None:
    with pytest.raises(UserError, match="in recipe fp8_delayed input has a delayed scale per expert"):
        build(get_recipe("fp8_delayed"), True)


def fused_permutation_refused() -> None:
    from megatron_lowprec.mcore.token_dispatch import Fp8Dispatch

    block, _ = build(RECIPES["mxfp8"], False)
    block.layers[0].mlp.config.moe_permute_fusion = True
    with pytest.raises(UserError, match="moe_permute_fusion: TransformerEngine's fused permutation"):
        Fp8Dispatch(RECIPES["mxfp8"]).bind(block.layers[0])


def stock_experts_refused() -> None:
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megatron_lowprec.mcore.token_dispatch import Fp8Dispatch

    block, _ = build(RECIPES["mxfp8"], False)
    experts = block.layers[0].mlp.experts
    experts.__class__ = SequentialMLP
    with pytest.raises(UserError, match="needs this project's experts, which take codes, and found SequentialMLP"):
        Fp8Dispatch(RECIPES["mxfp8"]).bind(block.layers[0])


def one_rank_refused() -> None:
    with _layout(1), pytest.raises(UserError, match="does nothing at --expert-model-parallel-size 1"):
        build(RECIPES["mxfp8"], True, expert_model_parallel_size=1)


def tensor_parallel_experts_refused() -> None:
    """Two tensor-parallel shards of each expert; the check comes before that of the expert-parallel size."""
    with _layout(1, tensor_model_parallel_size=2, expert_tensor_parallel_size=2):
        block, _ = build(
            RECIPES["fp8_blockwise"],
            False,
            expert_model_parallel_size=1,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            moe_ffn_hidden_size=256,
        )
        from megatron_lowprec.mcore.token_dispatch import Fp8Dispatch

        block.layers[0].mlp.token_dispatcher.ep_size = 2
        with pytest.raises(UserError, match="--expert-tensor-parallel-size 2, whose ranks gather tokens"):
            Fp8Dispatch(RECIPES["fp8_blockwise"]).bind(block.layers[0])


@contextmanager
def _layout(expert: int, **sizes: int) -> Iterator[None]:
    """Other process groups for a while."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=expert, **sizes)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2, expert_tensor_parallel_size=1)


CHECKS: dict[str, Callable[[], None]] = {}
for _name in RECIPES:
    for _grouped in (False, True):
        CHECKS[f"bits, {_name}{', grouped' * _grouped}"] = partial(bits, _name, _grouped)
    CHECKS[f"bytes, {_name}"] = partial(bytes_on_the_wire, _name)
for _grouped in (False, True):
    CHECKS[f"uneven{', grouped' * _grouped}"] = partial(bits, "fp8_blockwise", _grouped, uneven=True)
    CHECKS[f"one expert a rank{', grouped' * _grouped}"] = partial(bits, "mxfp8", _grouped, num_moe_experts=2)
    CHECKS[f"quantized once{', grouped' * _grouped}"] = partial(quantized_once, _grouped)
_shared = {"moe_shared_expert_intermediate_size": FFN}
CHECKS["shared experts"] = partial(bits, "fp8_blockwise", False, **_shared)
_capacity = {"moe_expert_capacity_factor": 0.5, "moe_router_load_balancing_type": "none"}
CHECKS["dropped tokens"] = partial(bits, "mxfp8", False, **_capacity)
CHECKS["two layers"] = layers_in_sequence
CHECKS["two layers, recomputed"] = partial(
    layers_in_sequence, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
CHECKS["two layers, experts recomputed"] = partial(
    layers_in_sequence, recompute_granularity="selective", recompute_modules=["moe"]
)
CHECKS["saved codes"] = saved_codes
CHECKS["inspected"] = inspected
CHECKS["header"] = header
CHECKS["losses"] = losses
CHECKS["spec"] = under_spec
CHECKS["gradients in bf16, biases"] = partial(gradients_in_bf16, RECIPES["mxfp8"], add_bias_linear=True)
_plain_dgrad = replace(get_recipe("mxfp8"), dgrad=GemmSpec())
CHECKS["gradients in bf16, dgrad"] = partial(gradients_in_bf16, _plain_dgrad)
for _name, _reason, _more in REFUSALS:
    CHECKS[f"refused: {_name}"] = partial(refused, _reason, _more)
CHECKS["refused: recipe"] = recipes_refused
CHECKS["refused: fused permutation"] = fused_permutation_refused
CHECKS["refused: stock experts"] = stock_experts_refused
CHECKS["refused: one rank"] = one_rank_refused
CHECKS["refused: expert tensor parallelism"] = tensor_parallel_experts_refused
if DEVICE == "cuda":
    CHECKS = {name: check for name, check in CHECKS.items() if name.startswith(("bits", "bytes", "uneven", "one"))}


def main() -> None:
    from megatron_lowprec.mcore.cpu_compat import install

    install()
    from megatron.core import parallel_state

    torch._dynamo.config.disable = True
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
