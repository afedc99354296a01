"""Experts of transformers under torch.compile: one graph, one wait for the device, and eager results."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from megatron_lowprec import UserError
from tests.linear.expert_models import BOTH, EXPERTS, HIDDEN, build, experts_of, only_experts, train
from tests.weekly import also_weekly


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


def test_compiled_experts_refuse_other_features() -> None:
    """As in eager mode: grouped kernels would take each operand's width as given."""
    torch._dynamo.reset()
    module = experts_of(only_experts(build()))
    module.compile(backend="aot_eager")
    with pytest.raises(UserError, match=f"a weight of {HIDDEN} input features got an input of shape"):
        module(torch.zeros(4, HIDDEN // 2), torch.zeros(4, 1).long(), torch.ones(4, 1))
