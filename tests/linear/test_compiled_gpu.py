"""Compiled layers on a GPU, also as CUDA graphs: the bits of eager mode."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from megatron_lowprec import convert
from megatron_lowprec.linear.backends import traced
from tests.linear.compiled_layers import OURS, whole
from tests.linear.tiny_models import Conv1D

pytestmark = pytest.mark.slow
PLANNED = ("fp8_current", "fp8_rowwise")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "launches", "tokens"),
    [
        *((name, False, (256,) * 3) for name in (*PLANNED, "fp8_blockwise", "fp8_delayed", "mxfp8", "mxfp4_rht_sr")),
        *((name, True, tokens) for name in PLANNED for tokens in ((256,) * 3, (256, 200, 97))),
    ],
)
def test_compiled_layers_on_a_gpu(
    name: str, launches: bool, tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes, scales and gradients of eager mode; the generated code has casts and products, and hides no layer."""
    monkeypatch.setattr(traced, "INDUCTOR_LAUNCHES", launches)
    found: list[list[torch.Tensor]] = []
    for compiles in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128), Conv1D(128, 128))
        convert(model.to("cuda", torch.bfloat16), whole(name), skip_slower=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def run(model: nn.Module = model, optimizer: Any = optimizer) -> list[torch.Tensor]:
            tensors = []
            for step, count in enumerate(tokens):
                x = torch.randn(count, 128, generator=torch.Generator().manual_seed(step)).to("cuda", torch.bfloat16)
                optimizer.zero_grad()
                y = model(x.requires_grad_())
                y.backward(y.detach())
                tensors += [y.detach(), x.grad, *(each.grad.clone() for each in model.parameters())]
                optimizer.step()
            return tensors

        if compiles:
            model.compile(fullgraph=True)
            tensors, codes = run_and_get_code(run)
            ours = set(OURS.findall("\n".join(codes)))
            assert "linear" not in ours
            if launches:
                assert not ours & {"cast", "cast_with_state", "planned_cast"}
                assert "_planned_cast_kernel" in "\n".join(codes)
            else:
                assert ours & {"cast", "cast_with_state"}
            found.append(tensors)
        else:
            found.append(run())
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
@pytest.mark.parametrize("launches", [False, True])
@pytest.mark.parametrize("name", ["fp8_current", "fp8_rowwise", "mxfp4_rht_sr", "fp8_delayed"])
def test_reduced_overhead_on_a_gpu(name: str, launches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``mode="reduce-overhead"`` replays CUDA graphs with the state of each step: bits of eager mode."""
    monkeypatch.setattr(traced, "INDUCTOR_LAUNCHES", launches)
    found: list[list[torch.Tensor]] = []
    for compiles in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.ReLU(), nn.Linear(256, 128, bias=False))
        convert(model.to("cuda", torch.bfloat16), whole(name), skip_slower=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if compiles:
            model.compile(mode="reduce-overhead", fullgraph=True)
        tensors = []
        for step in range(6):  # two run before a graph is recorded
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(256, 128, generator=torch.Generator().manual_seed(step)).to("cuda", torch.bfloat16)
            y = model(x.requires_grad_())
            y.backward(y.detach())
            tensors += [y.detach().clone(), x.grad.clone(), *(each.grad.clone() for each in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        found.append(tensors)
    assert all(map(torch.equal, *found))
