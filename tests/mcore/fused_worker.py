"""A GPT through the fused kernels and without them, under Triton's interpreter or on a GPU.

``test_fused_model.py`` starts it, by torchrun; ``gather_worker.py`` runs the checks of two tensor-parallel processes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.checks import run_checks
from tests.kernels.interpreted import remove_interpreter_overhead
from tests.mcore.fused_handover import (
    fusions,
    gradients_that_are_seen,
    joined_casts,
    norms_that_are_seen,
    observed_gradients,
    recomputed_activation,
    residuals,
    turned_queries_and_keys,
)
from tests.mcore.fused_model import (
    BATCH,
    DEVICE,
    HIDDEN,
    RECOMPUTED,
    RECOMPUTED_MLP,
    SEQUENCE,
    SHAPES,
    VOCABULARY,
    build,
    equal_but_for,
    native,
    run,
    switched,
    two_steps,
)
from tests.mcore.recomputation import bounded_recomputation


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
