"""A GPT through the fused kernels and without them, under Triton's interpreter or on a GPU.

``test_fused_model.py`` starts it, by torchrun; ``gather_worker.py`` runs the checks of two tensor-parallel processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lowprec.kernels import dispatch
from megatron_lowprec.mcore.fusion import GradOutputChannel
from tests.checks import run_checks
from tests.kernels.interpreted import remove_interpreter_overhead
from tests.mcore.recomputation import bounded_recomputation

HIDDEN, SEQUENCE, BATCH, VOCABULARY = 64, 16, 2, 192
# normalization, activation, sequence parallel
SHAPES = {
    "gpt": ("LayerNorm", "gelu", False),
    "gpt-sp": ("LayerNorm", "gelu", True),
    "llama": ("RMSNorm", "silu", True),
    "llama-tp": ("RMSNorm", "silu", False),
}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECOMPUTED_MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = (
    ("bias", "add_bias_"),
    ("layernorm", "norm"),
    ("gelu", "bias_gelu"),
    ("swiglu", "swiglu"),
    ("rope", "rope"),
    ("cross_entropy", "logit_sums"),
    ("dropout", "bias_dropout_add"),
)


def build(
    shape: str,
    fused: bool,
    recipe: str = "bf16",
    dtype: torch.dtype = torch.float32,
    recompute_gelu: bool = False,
    binding: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    """A GPT bound to a recipe: ``binding`` of ``bind_recipe``, ``more`` of its config."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_lowprec import get_recipe
    from megatron_lowprec.mcore.layers.gpt_model import LowPrecGPTModel
    from megatron_lowprec.mcore.layers.gpt_spec import gpt_block_spec
    from megatron_lowprec.mcore.runtime import bind_recipe

    normalization, activation, sequence_parallel = SHAPES[shape]
    gated = activation == "silu"
    config = TransformerConfig(
        num_layers=2,
        num_attention_heads=2,
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=sequence_parallel and dist.get_world_size() > 1,
        normalization=normalization,
        gated_linear_unit=gated,
        activation_func=getattr(torch.nn.functional, activation),
        add_bias_linear=not gated,
        bias_activation_fusion=True,
        # Megatron-core's own fusion rounds the logits' gradient to bf16 whatever the model is
        cross_entropy_loss_fusion=fused,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        bias_dropout_fusion=True,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        **{"hidden_size": HIDDEN, "ffn_hidden_size": 2 * HIDDEN, "hidden_dropout": 0.0, **more},
    )
    model_parallel_cuda_manual_seed(5)
    torch.manual_seed(5)
    model = LowPrecGPTModel(
        config,
        gpt_block_spec(config),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope" if gated else "learned_absolute",
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    for name, weight in model.named_parameters():
        if weight.dim() == 1:  # biases begin as zeros, weights of norms as ones
            shared = "norm" in name or "proj.bias" in name or "fc2.bias" in name
            noise = torch.Generator().manual_seed(7) if shared else generator
            weight.data += 0.3 * torch.randn(weight.shape, generator=noise).to(weight)
    model.to(DEVICE, dtype)
    model.runtime = bind_recipe(
        [model], get_recipe(recipe), num_layers=2, seed=1, recompute_gelu=recompute_gelu, **binding or {}
    )
    return model


@contextlib.contextmanager
def switched(on: bool) -> Iterator[dict[str, int]]:
    """Fused kernels for every tensor, or for none; how often each of KERNELS was launched."""
    launched = dict.fromkeys((name for _, name in KERNELS), 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch("megatron_lowprec.kernels.dispatch.fuses", lambda _: on))
        for folder, name in KERNELS:
            module = importlib.import_module(f"megatron_lowprec.kernels.{folder}.triton")
            plain = getattr(module, name)

            # no mock, which would hold on to the arguments
            def launch(*args: Any, kernel: Any = plain, name: str = name, **kwargs: Any) -> Any:
                launched[name] += 1
                return kernel(*args, **kwargs)

            stack.enter_context(patch.object(module, name, launch))
        yield launched


def run(
    shape: str, fused: bool, prepare: Callable[[torch.nn.Module], None] | None = None, **more: Any
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Losses and all gradients, of a model that ``prepare`` has had in its hands."""
    model = build(shape, fused, **more)
    if prepare is not None:
        prepare(model)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator).to(DEVICE)
    positions = torch.arange(SEQUENCE, device=DEVICE).expand(BATCH, -1)
    with switched(fused) as launched:
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        (losses * torch.rand(losses.shape, generator=generator).to(DEVICE)).sum().backward()
    found = {"losses": losses.detach()}
    return found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, launched


def same(shape: str, **more: Any) -> None:
    """The kernels are used, and give torch's results."""
    want, none = run(shape, False, **more)
    got, launched = run(shape, True, **more)
    gelu, bias = SHAPES[shape][1] == "gelu", SHAPES[shape][0] == "LayerNorm"
    norms = 9 if more.get("qk_layernorm") else 5
    calls = (2 * bias, norms, 2 * gelu, 2 * (not gelu), 4 * (not gelu), 1, 4)
    assert list(launched.values()) == list(calls), launched
    assert not any(none.values())
    assert got.keys() == want.keys()
    assert len(got) > 15
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=2e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


def joined_casts(recipe: str, shape: str) -> None:
    """Casts that an activation's kernels help give what those do that read its result from memory: the same bits.

    Biases' gradients are the exception: sums of other parts. The other fusions are on in ``got`` alone.
    """
    from megatron_lowprec.linear.linear_gemms import LinearGemms
    from megatron_lowprec.mcore.layers.mlp import _MlpFunction

    with patch.object(_MlpFunction, "apply", wraps=_MlpFunction.apply) as joined:
        got = two_steps(recipe, shape=shape)
    assert joined.call_count == 4
    with patch.object(LinearGemms, "supported_fusion", lambda *_: None):
        want = two_steps(recipe, shape=shape)
    equal_but_for(("linear_fc1.bias", "linear_fc2.bias", "linear_proj.bias"), got, want)


def recomputed_activation(recipe: str, shape: str) -> None:
    """Computing an activation again in the backward pass changes no bit."""
    want, got = two_steps(recipe, shape=shape), two_steps(recipe, recompute_gelu=True, shape=shape)
    equal_but_for(("linear_fc1.bias",), got, want)  # not joined without the flag, under some recipes


def observed_gradients(shape: str) -> None:
    """The amax that a norm's backward pass finds spares linear_proj's cast a pass, with the same bits."""
    from megatron_lowprec.mcore.layers import bias_dropout_add

    known: list[bool] = []

    def cached_amax(x: torch.Tensor) -> torch.Tensor | None:
        amax = plain(x)
        known.append(amax is not None)
        assert amax is None or torch.equal(amax[0], x.abs().amax().float())
        return amax

    plain = bias_dropout_add.cached_amax
    with native():
        with patch.object(bias_dropout_add, "cached_amax", cached_amax):
            got = two_steps("fp8_current", shape=shape)
        with patch.object(bias_dropout_add, "cached_amax", lambda _: None):
            want = two_steps("fp8_current", shape=shape)
    assert sum(known) >= 4, known  # linear_proj of each of two blocks, in two steps
    equal_but_for((), got, want)


def saved_memory(recipe: str, shape: str) -> None:
    """What --save-memory computes and casts again has the same bits, and does not wait in memory.

    A layer of T tokens saves two outputs of norms in bf16, or their codes, and codes of attention's output.
    """
    held: list[int] = []
    results = []
    for save_memory in (False, True):
        storages: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor, storages: dict[int, torch.Tensor] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with native(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results.append(two_steps(recipe, shape=shape, binding={"save_memory": save_memory}))
        held.append(sum(tensor.untyped_storage().nbytes() for tensor in storages.values()))
        storages.clear()
    equal_but_for((), results[1], results[0])
    assert held[1] < held[0], held


def turned_queries_and_keys(recipe: str, in_place: bool, **more: Any) -> None:
    """Behind the fused rope nothing holds linear_qkv's output.

    The kernel reads queries where linear_qkv left them, if ``in_place``.
    """
    made: list[StorageWeakRef] = []
    held, read = list[bool](), list[bool]()

    def look(*_: Any) -> None:
        gc.collect()  # the interpreter holds its arguments in a cycle
        held.append(not made[-1].expired())

    def prepare(model: torch.nn.Module) -> None:
        for layer in model.decoder.layers:
            layer.self_attention.linear_qkv.register_forward_hook(
                lambda _, inputs, outputs: made.append(StorageWeakRef(outputs[0].untyped_storage()))
            )
            layer.self_attention.linear_proj.register_forward_pre_hook(look)

    def rope(x: torch.Tensor, *turn: torch.Tensor) -> torch.Tensor:
        read.append(StorageWeakRef(x.untyped_storage()) == made[-1])
        return plain(x, *turn)

    plain = dispatch.rope
    with native(), patch.object(dispatch, "rope", rope):
        run("llama", True, prepare, recipe=recipe, dtype=torch.bfloat16, num_query_groups=1, **more)
    assert held == [False, False]
    assert read == [in_place] * 4


def vocabulary_gradients(shape: str) -> None:
    """Embedding and output layer add to main_grad what autograd would return, over two microbatches."""
    from megatron_lowprec.mcore.optim.vocabulary_grad import accumulate_vocabulary_gradients

    names = "embedding.word_embeddings.weight", "output_layer.weight"
    found: list[dict[str, torch.Tensor]] = []
    for accumulates in (False, True):
        model = build(shape, False)
        weights = dict(model.named_parameters())
        if accumulates:
            assert len(accumulate_vocabulary_gradients([model])) == dist.get_world_size() - 1
            for weight in weights.values():
                weight.main_grad = torch.ones(weight.shape, device=DEVICE)
                weight.grad_added_to_main_grad = False
        for seed in (2, 3):
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator).to(DEVICE)
            positions = torch.arange(SEQUENCE, device=DEVICE).expand(BATCH, -1)
            model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).sum().backward()
        found.append({name: weight.grad for name, weight in weights.items()})
        added = {name for name, weight in weights.items() if getattr(weight, "grad_added_to_main_grad", False)}
        if accumulates:
            assert added >= ({*names} if dist.get_world_size() == 1 else {names[1]})
            found[-1] |= {name: weights[name].main_grad - 1 for name in added}
    for name in names:
        torch.testing.assert_close(found[1][name], found[0][name], rtol=1e-4, atol=1e-5)


def recomputed_mlp() -> None:
    """The bits of an MLP that runs once; its bias leaves the recomputed part with its output."""
    p = 0.1 if DEVICE == "cuda" else 0.5
    with bounded_recomputation():
        want, _ = run("gpt", True, hidden_dropout=p)
        for recompute_gelu in (False, True):
            got, _ = run("gpt", True, hidden_dropout=p, recompute_gelu=recompute_gelu, **RECOMPUTED_MLP)
            equal_but_for(("linear_fc1.bias",), got, want)
        with native():
            want = two_steps("fp8_delayed", hidden_dropout=p)
            got = two_steps("fp8_delayed", hidden_dropout=p, **RECOMPUTED_MLP)
    equal_but_for(("linear_proj.bias", "linear_fc1.bias", "linear_fc2.bias"), got, want)


def late_weights() -> None:
    """A layer inside a larger function waits for its weights as well: --overlap-param-gather brings them by a hook."""

    def hold_back(model: torch.nn.Module) -> None:
        for module in model.modules():
            for weight in module.parameters(recurse=False):
                held = weight.detach().clone()
                weight.data.zero_()

                def gather(*_: Any, weight: torch.Tensor = weight, held: torch.Tensor = held) -> None:
                    weight.data.copy_(held)

                module.register_forward_pre_hook(gather)

    want, _ = run("gpt", True, recompute_gelu=True)
    got, _ = run("gpt", True, hold_back, recompute_gelu=True)
    assert all(torch.equal(got[name], want[name]) for name in want)


@contextlib.contextmanager
def native() -> Iterator[None]:
    """FP8 products; on a CPU as fp32 products of the same operands, for layers that believe to be on a Hopper GPU."""
    if DEVICE == "cuda":
        yield
        return
    from megatron_lowprec.kernels.layernorm import triton as layernorm

    def product(a: Any, b: Any, *, a_scale: Any, b_scale: Any, out_dtype: torch.dtype, bias: Any, **_: Any) -> Any:
        y = (a.float() * a_scale) @ (b.float() * b_scale).t()
        return (y if bias is None else y + bias.float()).to(out_dtype)

    def norm(x: torch.Tensor, weight: Any, bias: Any, eps: float, amax: Any) -> Any:
        """Rounded as a GPU does; the interpreter would cut."""
        made = plain_norm(*(None if t is None else t.float() for t in (x, weight, bias)), eps)
        made = made._replace(y=made.y.to(x.dtype))
        if amax is not None:
            torch.maximum(amax, made.y.abs().amax().float(), out=amax)
        return made

    plain_norm = layernorm.norm
    with (
        switched(True),
        patch.object(layernorm, "norm", norm),
        patch("megatron_lowprec.linear.backends.resolved.arch_of", lambda _: "sm90"),
        patch("megatron_lowprec.linear.backends.hopper_fp8.dense.scaled_gemm", product),
    ):
        yield


def fusions(recipe: str, taken: int = 0, read: int = 0, shape: str = "gpt", **more: Any) -> None:
    """Casts inside another kernel give the bits of casts that read memory.

    On a CPU p is such that the interpreter, which cuts to bf16 what a GPU rounds, has nothing to cut.

    Args:
        taken: linear layers a block whose output gradient arrives quantized; 0 does not compare. Biases' gradients are
            not compared by bits: they are sums of other parts.
        read: norms a block whose output is never in memory; 0 does not compare.
    """
    from megatron_lowprec.linear.linear_gemms import LinearGemms
    from megatron_lowprec.mcore.layers import parallel_linear
    from megatron_lowprec.mcore.layers.norm import Consumer

    gradients: list[bool] = []
    inputs: list[bool] = []

    def get(self: GradOutputChannel, dy: torch.Tensor) -> Any:
        gradients.append((quantized := plain_get(self, dy)) is not None)
        assert quantized is None or bool(dy.isnan().all())
        return quantized

    def attached_input(x: torch.Tensor, linear_gemms: Any) -> Any:
        inputs.append((quantized := plain_attached_input(x, linear_gemms)) is not None)
        assert quantized is None or bool(x.isnan().all())
        return quantized

    def no_parts(*_: Any) -> bool:
        return False

    plain_get, plain_attached_input = GradOutputChannel.get, parallel_linear.attached_input
    with native():
        with (
            patch.object(GradOutputChannel, "get", get),
            patch.object(parallel_linear, "attached_input", attached_input),
        ):
            got = two_steps(recipe, shape=shape, **more)
        if taken:
            assert gradients == [True] * 4 * taken, gradients  # of each of two blocks, in two steps
            gradients.clear()
            with (
                patch.object(GradOutputChannel, "get", get),
                patch.object(GradOutputChannel, "of", lambda _: None),
                patch.object(LinearGemms, "accepts_split_input", no_parts),
            ):
                want = two_steps(recipe, shape=shape, **more)
            assert not any(gradients)
            equal_but_for(("linear_proj.bias", "linear_fc2.bias"), got, want)
        if read:
            assert sum(inputs) == 4 * read, inputs
            with patch.object(Consumer, "supported_fusion", lambda *_: None):
                want = two_steps(recipe, shape=shape, **more)
            equal_but_for((), got, want)


def residuals(shape: str, **more: Any) -> None:
    """Gradients that are added in the norms are the bits of those that autograd adds; no norm's input outlives them."""
    from megatron_lowprec.kernels.layernorm import triton as layernorm
    from megatron_lowprec.mcore.fusion import attach_residual

    inputs = []

    def noted(x: torch.Tensor, y: torch.Tensor, residual: torch.Tensor) -> None:
        inputs.append(weakref.ref(x.untyped_storage()))
        attach_residual(x, y, residual)

    with (
        patch.object(layernorm, "norm_backward", wraps=layernorm.norm_backward) as joined,
        patch("megatron_lowprec.mcore.layers.norm.attach_residual", noted),
    ):
        got, _ = run(shape, True, **more)
    given = [call.args[5] is not None for call in joined.call_args_list]
    joined.reset_mock()  # which holds on to arguments
    assert given == [False, True, True, True, True]  # the last norm has none
    assert len(inputs) >= 5
    gc.collect()  # the model's own circles; none that leads through autograd is ever found
    assert not any(storage() is not None for storage in inputs)
    with patch("megatron_lowprec.mcore.layers.norm.attach_residual"):
        want, _ = run(shape, True, **more)
    equal_but_for((), got, want)


def norms_that_are_seen() -> None:
    """A norm's output is a tensor to a forward hook, in an evaluation, and while a bad number is looked for."""
    from megatron_lowprec.mcore.debug.finite_check import FiniteCheck
    from megatron_lowprec.mcore.layers.norm import LayerNorm

    seen: list[bool] = []
    with native():
        model = build("gpt", True, "fp8_delayed", torch.bfloat16)
        norms = [module for module in model.modules() if isinstance(module, LayerNorm)]
        x = torch.randn(SEQUENCE, BATCH, HIDDEN, device=DEVICE).bfloat16()
        assert [bool(norm(x).isnan().all()) for norm in norms] == [True] * 4 + [False]
        with torch.no_grad():
            assert not any(norm(x).isnan().any() for norm in norms)
        with FiniteCheck([model]):
            assert not any(norm(x).isnan().any() for norm in norms)
        for norm in norms:
            norm.register_forward_hook(lambda module, inputs, output: seen.append(bool(output.isfinite().all())))
            norm(x)
    assert seen == [True] * 5


def five_calls_to_a_launch() -> None:
    """From a parallel linear's forward to the launch of a kernel, native and emulated: host time counts at 345M."""
    from megatron_lowprec.kernels.launch import Specialized

    launch, paths = Specialized.launch, list[list[str]]()

    def noted(self: Specialized, *args: Any) -> None:
        path, frame = list[str](), sys._getframe(1)
        while not (frame.f_code.co_name == "forward" and "/megatron/core/" in frame.f_code.co_filename):
            if "/megatron_lowprec/" in frame.f_code.co_filename:  # not autograd's apply
                path.append(frame.f_code.co_name)
            assert frame.f_back is not None
            frame = frame.f_back
        paths.append(path)
        launch(self, *args)

    x = torch.randn(SEQUENCE, BATCH, HIDDEN, device=DEVICE).bfloat16()
    with native(), contextlib.ExitStack() as stack:
        if DEVICE == "cpu":
            stack.enter_context(
                patch("megatron_lowprec.kernels.dispatch.has_mx_kernel", lambda _, rule: rule is not None)
            )
        for recipe in ("fp8_delayed", "fp8_current", "mxfp8"):
            layer = build("gpt", True, recipe, torch.bfloat16).decoder.layers[0].self_attention.linear_qkv
            paths.clear()
            with patch.object(Specialized, "launch", noted):
                layer(x)
            assert len(paths) >= 2, recipe  # x and the weight
            assert max(map(len, paths)) == 5, (recipe, paths)


def gradients_that_are_seen() -> None:
    """Nothing is offered without a backward pass to come, nor while a bad number is looked for."""
    from megatron_lowprec.mcore.debug.finite_check import FiniteCheck

    with native():
        model = build("gpt", True, "fp8_delayed", torch.bfloat16)
        attention = model.decoder.layers[0].self_attention
        x = torch.randn(SEQUENCE, BATCH, HIDDEN, device=DEVICE).bfloat16()
        layers = attention.linear_qkv, attention.linear_proj
        assert all(layer.offer_grad_channel(x) is not None for layer in layers)
        with torch.no_grad():
            assert not any(layer.offer_grad_channel(x) for layer in layers)
        with torch.autograd.set_detect_anomaly(True):
            assert not any(layer.offer_grad_channel(x) for layer in layers)
        with FiniteCheck([model]):
            assert not any(layer.offer_grad_channel(x) for layer in layers)


def equal_but_for(sums: tuple[str, ...], got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        if name.endswith(sums):
            torch.testing.assert_close(got[name], want[name], rtol=2**-6, atol=1e-5)
        else:
            assert torch.equal(got[name], want[name]), name


def frozen() -> None:
    """Freezing parts of the model changes no amax of an input or a weight, and no gradient of the others."""
    first, second = "decoder.layers.0", "decoder.layers.1"
    parts = ("embedding", f"{first}.mlp.linear_fc1", f"{second}.self_attention", f"{second}.mlp.linear_fc2")
    with native():
        want, got = (two_steps("fp8_delayed", frozen=names) for names in ((), parts))
    unneeded = {name for name in want if name.startswith(parts)} | {"amax grad_output"}
    assert all(got.pop(name) is None for name in unneeded if not name.startswith("amax"))
    equal_but_for(
        ("linear_proj.bias", "linear_fc1.bias", "linear_fc2.bias"),
        {name: tensor for name, tensor in got.items() if name not in unneeded},
        {name: tensor for name, tensor in want.items() if name not in unneeded},
    )


def two_steps(
    recipe: str, recompute_gelu: bool = False, shape: str = "gpt", frozen: tuple[str, ...] = (), **more: Any
) -> dict[str, torch.Tensor]:
    """Losses, gradients and amaxes of the second of two steps: the first one has empty histories."""
    sizes = {"hidden_size": 256, "ffn_hidden_size": 512} if DEVICE == "cuda" else {}
    model = build(shape, True, recipe, torch.bfloat16, recompute_gelu, **sizes, **more)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    positions = torch.arange(SEQUENCE, device=DEVICE).expand(BATCH, -1)
    for step in range(2):
        model.zero_grad()
        model.runtime.begin_step(step)
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        losses.sum().backward()
        model.runtime.end_step()
    amax: dict[str, torch.Tensor] = {}
    for operand in ("input", "weight", "grad_output"):
        of_layers = [gemms.histories[operand] for gemms in model.runtime.layers if operand in gemms.histories]
        if of_layers:
            amax[f"amax {operand}"] = torch.stack([history.state(slot) for history, slot in of_layers])
    return amax | {"losses": losses} | {name: p.grad for name, p in model.named_parameters()}


def dropout(shape: str) -> None:
    """It drops, alike on ranks that hold the same tokens; and a repeated forward pass drops the same."""
    found, _ = run(shape, True, hidden_dropout=0.2)
    none, _ = run(shape, True)
    assert not torch.equal(found["losses"], none["losses"])
    other = found["losses"].clone()
    dist.broadcast(other, 0)
    assert torch.equal(other, found["losses"])
    again, launched = run(shape, True, hidden_dropout=0.2, **RECOMPUTED)
    assert launched["bias_dropout_add"] == 8  # it was really run again
    assert all(torch.equal(again[name], found[name]) for name in found)


def dropped_entries() -> None:
    """A fresh mask each time, of the right size, and the same one backwards."""
    from megatron_lowprec.mcore.layers.bias_dropout_add import get_bias_dropout_add

    x, bias, residual = (
        torch.full(shape, value, device=DEVICE, requires_grad=True)
        for shape, value in (((40, 3, 64), 0.5), ((64,), 0.5), ((40, 3, 64), 2.0))
    )
    with switched(True):
        first, second = (get_bias_dropout_add(True, True)((x, bias), residual, 0.5) for _ in range(2))
        still = get_bias_dropout_add(False, True)((x, bias), residual, 0.5)
    assert torch.equal(still, torch.full_like(still, 3.0))
    assert not torch.equal(first, second)
    assert set(first.unique().tolist()) == {2.0, 4.0}
    assert abs(float((first == 2.0).float().mean()) - 0.5) < 4 * (0.25 / x.numel()) ** 0.5
    first.sum().backward()
    assert torch.equal(x.grad != 0, first != 2.0)
    assert torch.equal(residual.grad, torch.ones_like(residual))
    torch.testing.assert_close(bias.grad, x.grad.sum((0, 1)))


def second_backward_fails() -> None:
    """The logits are gone after one: a second backward pass over them says so."""
    from megatron_lowprec.mcore.layers.gpt_model import vocab_parallel_cross_entropy

    logits = torch.randn(3, 8, device=DEVICE, requires_grad=True) * 1.0
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([1, 3, 7], device=DEVICE), dist.group.WORLD).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def norm_marks_its_parameters() -> None:
    model = build("gpt-sp", False)
    norms = [(name, p) for name, p in model.named_parameters() if "layernorm" in name]
    assert {name.rsplit(".", 1)[1] for name, _ in norms} == {"weight", "bias"}
    assert len(norms) == 10
    assert all(p.sequence_parallel == (dist.get_world_size() > 1) for _, p in norms)


# norms of queries and keys on half of the shapes: they change no other kernel's part
CHECKS = {f"same-{shape}": lambda shape=shape: same(shape) for shape in ("gpt-sp", "llama-tp")}
CHECKS |= {f"same-{shape}-qk-norms": lambda shape=shape: same(shape, qk_layernorm=True) for shape in ("gpt", "llama")}
CHECKS |= {f"dropout-{shape}": lambda shape=shape: dropout(shape) for shape in ("gpt", "gpt-sp")}
if DEVICE == "cuda":
    shapes, again = ("gpt", "llama"), ("bf16", "fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp4_rht_sr")
    joined = ("fp8_delayed", "fp8_current")
    CHECKS |= {f"joined-{r}-{s}": lambda r=r, s=s: joined_casts(r, s) for r in joined for s in shapes}
    CHECKS |= {f"recomputed-{r}-{s}": lambda r=r, s=s: recomputed_activation(r, s) for r in again for s in shapes}
CHECKS |= {
    f"saved-memory-{recipe}-{shape}": lambda recipe=recipe, shape=shape: saved_memory(recipe, shape)
    for recipe, shape in (("fp8_current", "gpt-sp"), ("mxfp8", "llama"), ("fp8_delayed", "gpt"))
}
CHECKS |= {
    f"vocabulary-gradients-{shape}": lambda shape=shape: vocabulary_gradients(shape) for shape in ("gpt", "llama-tp")
}
CHECKS |= {
    f"turned-{recipe}": lambda recipe=recipe: turned_queries_and_keys(recipe, True)
    for recipe in ("bf16", "fp8_current")
}
CHECKS["turned-norms"] = lambda: turned_queries_and_keys("bf16", False, qk_layernorm=True)
CHECKS["observed-gradients"] = lambda: observed_gradients("llama")
DROPOUT = {"hidden_dropout": 0.1 if DEVICE == "cuda" else 0.5}
CHECKS["fusions-delayed"] = lambda: fusions("fp8_delayed", taken=3, read=2, **DROPOUT)
CHECKS["fusions-current"] = lambda: fusions("fp8_current", taken=3, **DROPOUT)
if DEVICE == "cuda":  # twenty seconds of the interpreter, for kernels that the checks above run
    CHECKS["fusions-recomputed"] = lambda: fusions("fp8_delayed", taken=3, read=2, **DROPOUT, **RECOMPUTED)
CHECKS["fusions-llama-tp"] = lambda: fusions("fp8_delayed", read=2, shape="llama-tp")
# also without dropout
CHECKS["fusions-qk-norms"] = lambda: fusions("fp8_delayed", taken=3, qk_layernorm=True)
# then gradients of what ranks gather are not handed over: two layers of three
CHECKS["fusions-sp"] = lambda: fusions(
    "fp8_delayed", taken=1 if dist.get_world_size() > 1 else 3, shape="gpt-sp", **DROPOUT
)
CHECKS["residuals-llama"] = lambda: residuals("llama", hidden_dropout=0.2)
CHECKS["residuals-recomputed"] = lambda: residuals("gpt", **RECOMPUTED)
CHECKS |= {
    check.__name__: check
    for check in (
        frozen,
        recomputed_mlp,
        late_weights,
        norms_that_are_seen,
        gradients_that_are_seen,
        five_calls_to_a_launch,
        dropped_entries,
        second_backward_fails,
        norm_marks_its_parameters,
    )
}


PARALLEL = {name: check for name, check in CHECKS.items() if name.endswith(("-sp", "-tp"))}
"""Of sequence and tensor parallel models. The others do the same on each rank."""


def main(checks: dict[str, Callable[[], None]]) -> None:
    """Run checks under tensor parallelism over all ranks."""
    from megatron_lowprec.mcore.cpu_compat import install

    install()
    from megatron.core import parallel_state

    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    else:
        remove_interpreter_overhead()
    torch._dynamo.config.disable = True
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    run_checks(checks)


if __name__ == "__main__":
    main(CHECKS)
