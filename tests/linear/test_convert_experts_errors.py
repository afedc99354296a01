"""Which experts of transformers convert: rules and filters, experts that stay, and calls that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lowprec import convert
from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.convert import plan
from megatron_lowprec.linear.experts.expert_linear import ExpertLinear
from tests.linear.expert_models import EXPERTS, FFN, HIDDEN, build, experts_of


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
    assert "not converted: model.layers.0.mlp.experts.w1, model.layers.0.mlp.experts.weight (" in own
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
