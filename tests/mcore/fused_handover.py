"""Checks in ``CHECKS`` of ``fused_worker.py``: what a kernel hands to the next has the bits of what memory holds."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lowprec.kernels import dispatch
from megatron_lowprec.mcore.fusion import GradOutputChannel
from tests.mcore.fused_model import BATCH, DEVICE, HIDDEN, SEQUENCE, build, equal_but_for, native, run, two_steps


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
