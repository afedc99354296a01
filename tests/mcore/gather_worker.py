"""A GPT whose ranks gather FP8 codes, and one whose ranks gather bf16: two processes with sequence parallelism.

``test_fp8_gather.py`` starts it, by torchrun, also for the parallel checks of ``fused_worker.py``. On a CPU the GEMMs
are emulated, or native under Triton's interpreter. On GPUs they are native, over NCCL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from megatron_lowprec import UserError, get_recipe
from megatron_lowprec.recipe.coverage import LinearSite
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import QuantSpec
from megatron_lowprec.training.memory.transfers import layer_transfers
from tests.mcore.fused_model import (
    BATCH,
    DEVICE,
    HIDDEN,
    RECOMPUTED,
    RECOMPUTED_MLP,
    SEQUENCE,
    VOCABULARY,
    build,
    equal_but_for,
    native,
    two_steps,
)
from tests.mcore.fused_worker import PARALLEL, main

SIZES = {"hidden_size": 256, "ffn_hidden_size": 512} if DEVICE == "cuda" else {}
STEPS, MICROBATCHES = 3, 2
CODES = torch.uint8
Sent = Counter[tuple[str, torch.dtype]]


@contextmanager
def counted() -> Iterator[Sent]:
    """Bytes that this rank receives in all-gathers and reduce-scatters: (collective, dtype on the wire) -> bytes."""
    from megatron.core.tensor_parallel import layers, mappings

    from megatron_lowprec.mcore import collectives

    received: Sent = Counter()

    def gather(plain: Callable[..., Any], out: torch.Tensor, x: torch.Tensor, **options: Any) -> Any:
        received["gather", out.dtype] += out.nbytes - x.nbytes
        return plain(out, x, **options)

    def scatter(plain: Callable[..., Any], out: torch.Tensor, x: torch.Tensor, **options: Any) -> Any:
        received["scatter", out.dtype] += x.nbytes - out.nbytes
        return plain(out, x, **options)

    with ExitStack() as stack:
        for module, names in (
            (collectives, ("_all_gather", "_reduce_scatter")),
            (mappings, ("dist_all_gather_func", "dist_reduce_scatter_func")),
            (layers, ("dist_all_gather_func", "dist_reduce_scatter_func")),
        ):
            for name, counting in zip(names, (gather, scatter), strict=True):
                stack.enter_context(patch.object(module, name, partial(counting, getattr(module, name))))
        yield received


def train(
    shape: str,
    recipe: str | Recipe,
    gather: bool,
    *,
    dtype: torch.dtype = torch.bfloat16,
    within: Callable[[Any, int], Any] = lambda *_: nullcontext(),
    rerun_in_bf16: tuple[str, ...] = (),
    **more: Any,
) -> tuple[dict[str, torch.Tensor], list[Sent]]:
    """Losses, gradients and histories of every step, and the bytes of each step; weights follow their gradients."""
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    binding = {"fp8_gather": gather, "rerun_in_bf16": rerun_in_bf16}
    with patch("megatron_lowprec.get_recipe", lambda _: recipe):
        model = build(shape, DEVICE == "cuda", recipe.name, dtype, binding=binding, **SIZES, **more)
    generator = torch.Generator().manual_seed(2)
    positions = torch.arange(SEQUENCE, device=DEVICE).expand(BATCH, -1)
    found: dict[str, torch.Tensor] = {}
    sent: list[Sent] = []
    for step in range(STEPS):
        model.zero_grad()
        model.runtime.begin_step(step)
        with counted() as received, within(model, step):
            for microbatch in range(MICROBATCHES):
                model.runtime.begin_microbatch(microbatch)
                tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator).to(DEVICE)
                losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
                losses.mean().backward()
                found[f"losses {step} {microbatch}"] = losses.detach()
        sent.append(received)
        model.runtime.end_step()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                assert weight.grad is not None
                if getattr(weight, "sequence_parallel", False):
                    dist.all_reduce(weight.grad)
                found[f"{name} {step}"] = weight.grad.clone()
                weight -= weight.grad
        for i, history in enumerate(model.runtime._histories.values()):
            found[f"histories {i} {step}"] = torch.cat((history.in_effect[None], history.window))
    return found, sent


def same_bits(shape: str, recipe: str | Recipe, codes: int = 8, **options: Any) -> None:
    """All bits of a run that gathers bf16; ``codes`` of eight linear layers gather codes."""
    want, plain = train(shape, recipe, False, **options)
    got, sent = train(shape, recipe, True, **options)
    equal_but_for((), got, want)
    losses = [value for name, value in got.items() if name.startswith("losses")]
    assert not torch.equal(losses[0], losses[-2])  # it learns
    assert all(history.any() for name, history in got.items() if name.startswith("histories"))
    assert not any(kind == "gather" and dtype == CODES for step in plain for kind, dtype in step)
    assert (sent[0]["gather", CODES] > 0) == (codes > 0)
    wide = options.get("dtype", torch.bfloat16)
    for step, reference in zip(sent, plain, strict=True):
        # what is not gathered as codes is as before; reduce-scatters are as before
        saved = step["gather", CODES] * (wide.itemsize - 1)
        assert sum(step.values()) == sum(reference.values()) - saved
        assert step["scatter", wide] == reference["scatter", wide] > 0


def bytes_on_the_wire(shape: str, recompute: bool) -> None:
    """The bytes of the plan: those of the layers, counted, less those of embedding and output layer."""
    options: dict[str, Any] = RECOMPUTED if recompute else {}
    hidden, ffn = SIZES.get("hidden_size", HIDDEN), SIZES.get("ffn_hidden_size", 2 * HIDDEN)
    gates = 2 if shape == "llama" else 1
    sites = [
        site
        for layer in (1, 2)
        for site in (
            LinearSite(layer, "self_attention.linear_qkv", hidden, 3 * hidden, "column"),
            LinearSite(layer, "self_attention.linear_proj", hidden, hidden, "row"),
            LinearSite(layer, "mlp.linear_fc1", hidden, gates * ffn, "column", gated=gates == 2),
            LinearSite(layer, "mlp.linear_fc2", ffn, hidden, "row"),
        )
    ]
    tokens, recipe = BATCH * SEQUENCE, get_recipe("fp8_delayed")
    for gather in (False, True):
        _, (first, *_) = train(shape, "fp8_delayed", gather, **options)
        planned = layer_transfers(sites, recipe, tokens, 2, ranks=2, num_layers=2, fp8_gather=gather)
        forward = 2 if recompute else 1
        gathers = MICROBATCHES * (
            forward * planned["inputs, gathered in the forward pass"]
            + planned["inputs, gathered again in the backward pass"]
            + planned["output gradients, gathered in the backward pass"]
        )
        # the output layer gathers its input in both passes, the embedding its gradient in one; all in bf16
        rest = 3 * MICROBATCHES * tokens * hidden * 2 // 2
        if gather:
            assert first["gather", CODES] == gathers
            assert first["gather", torch.bfloat16] == rest
        else:
            assert first["gather", torch.bfloat16] == gathers + rest
        scatters = MICROBATCHES * (
            forward * planned["outputs, reduce-scattered in the forward pass"]
            + planned["input gradients, reduce-scattered in the backward pass"]
        )
        # the gradient of the output layer's input, and the embedding's output where no position is added to it
        ends = 2 if shape == "llama" else 1
        assert first["scatter", torch.bfloat16] == scatters + ends * MICROBATCHES * tokens * hidden * 2 // 2


def evaluation() -> None:
    """Without gradients: the same losses, and no history changes."""
    found = []
    for gather in (False, True):
        model = build(
            "gpt-sp", DEVICE == "cuda", "fp8_delayed", torch.bfloat16, binding={"fp8_gather": gather}, **SIZES
        )
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(2)).to(DEVICE)
        positions = torch.arange(SEQUENCE, device=DEVICE).expand(BATCH, -1)
        with torch.no_grad(), counted() as received:
            found.append(model(tokens, positions, None, labels=tokens))
        assert (received["gather", CODES] > 0) == gather
        assert not any(history.newest.any() for history in model.runtime._histories.values())
    assert torch.equal(*found)


def header() -> None:
    """The number of layers that gather codes, among those of the model."""
    globs = ("layers.1.mlp.linear_fc1.wgrad", "layers.2.*.dgrad")
    model = build("gpt-sp", False, "fp8_delayed", binding={"fp8_gather": True, "rerun_in_bf16": globs})
    assert any("--fp8-sequence-parallel-gather: codes in 5 of 8" in line for line in model.runtime.header())


def refusals() -> None:
    """A recipe whose codes cannot be gathered is refused where it is bound."""
    with pytest.raises(UserError, match="in recipe fp8_current the current scale of input"):
        build("gpt-sp", False, "fp8_current", binding={"fp8_gather": True})


def changed(**fields: Any) -> Recipe:
    """fp8_delayed with these fields in every operand."""
    recipe = get_recipe("fp8_delayed")
    gemms = {
        name: replace(
            gemm,
            **{
                operand: replace(spec, **fields)
                for operand in ("input", "weight", "grad_output")
                if isinstance(spec := getattr(gemm, operand), QuantSpec)
            },
        )
        for name, gemm in recipe.gemms.items()
    }
    return replace(recipe, name="changed", **gemms)


def probed(model: Any, step: int) -> Any:
    """Operands inspected in the second step: they must be in memory, so it gathers bf16."""
    from megatron_lowprec.mcore.debug.operand_probe import OperandProbe

    return OperandProbe([model], 1) if step == 1 else nullcontext()


def anomalies(_: Any, step: int) -> Any:
    """Autograd's anomaly detection in the second step: no placeholders, so it gathers output gradients in bf16."""
    return torch.autograd.set_detect_anomaly(step == 1)


def native_bits(shape: str, **more: Any) -> None:
    """The bits of a bf16 gather in native GEMMs; norms write the codes, which sequence parallelism else prevents."""
    from megatron_lowprec.mcore import collectives
    from megatron_lowprec.mcore.layers import parallel_linear

    gathers = Mock(wraps=collectives.gather_codes)
    attached: list[bool] = []

    def attached_input(x: torch.Tensor, linear_gemms: Any) -> Any:
        quantized = plain(x, linear_gemms)
        attached.append(quantized is not None)
        return quantized

    plain = parallel_linear.attached_input
    with (
        native(),
        patch.object(parallel_linear, "attached_input", attached_input),
        patch.object(parallel_linear, "gather_codes", gathers),
        patch.object(collectives, "gather_codes", gathers),
    ):
        want = two_steps("fp8_delayed", shape=shape, **more)
        assert not any(attached)
        assert not gathers.called
        got = two_steps("fp8_delayed", shape=shape, binding={"fp8_gather": True}, **more)
    # of each of two blocks in two steps: the inputs of two layers, again where recomputed, and dy of two
    assert gathers.call_count == 4 * (6 if more.get("recompute_granularity") == "full" else 4)
    assert sum(attached) == 4 * 2  # both norms of a block
    equal_but_for((), got, want)


CHECKS: dict[str, Callable[[], None]] = {}
for _shape in ("gpt-sp", "llama"):
    for _recipe in ("fp8_delayed", "fp8_lm"):
        CHECKS[f"{_recipe}-{_shape}"] = partial(same_bits, _shape, _recipe)
    CHECKS[f"bytes-{_shape}"] = partial(bytes_on_the_wire, _shape, recompute=False)
CHECKS["recomputed"] = partial(same_bits, "gpt-sp", "fp8_delayed", **RECOMPUTED)
CHECKS["recomputed-mlp"] = partial(same_bits, "gpt-sp", "fp8_delayed", **RECOMPUTED_MLP)
CHECKS["recomputed-bytes"] = partial(bytes_on_the_wire, "gpt-sp", recompute=True)
CHECKS["float32"] = partial(same_bits, "gpt-sp", "fp8_delayed", dtype=torch.float32)
CHECKS["microbatch-history"] = partial(same_bits, "llama", changed(history_update="microbatch"))
CHECKS["powers-of-two"] = partial(same_bits, "gpt-sp", changed(scale_rule="amax_pow2"))
_globs = ("layers.1.mlp.linear_fc1.wgrad", "layers.2.*.dgrad")
CHECKS["partly-bf16"] = partial(same_bits, "gpt-sp", "fp8_delayed", codes=5, rerun_in_bf16=_globs)
CHECKS["probed"] = partial(same_bits, "gpt-sp", "fp8_delayed", within=probed)
CHECKS["anomaly-detection"] = partial(same_bits, "llama", "fp8_delayed", within=anomalies)
# what the interpreter cuts to bf16 is exact at this dropout
CHECKS["native-llama"] = partial(native_bits, "llama", hidden_dropout=0.1 if DEVICE == "cuda" else 0.5)
CHECKS["native-gpt-sp"] = partial(native_bits, "gpt-sp", **RECOMPUTED)
CHECKS["evaluation"] = evaluation
CHECKS["header"] = header
CHECKS["refusals"] = refusals


if __name__ == "__main__":
    main(CHECKS | PARALLEL)
