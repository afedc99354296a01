"""State of converted experts of transformers: copies, state dicts, and scales of each expert."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lowprec import convert
from megatron_lowprec.linear.convert import plain_state_dict
from tests.linear.expert_models import EXPERTS, FFN, HIDDEN, build, experts_of, only_experts, train


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


@pytest.mark.parametrize("shape", [(EXPERTS + 1, 9), (EXPERTS - 1, 9), (9,), (), (EXPERTS, 0)], ids=str)
def test_amaxes_of_other_experts_are_a_size_mismatch(shape: tuple[int, ...]) -> None:
    model = only_experts(build())
    key = "model.layers.0.mlp.experts.down_proj_gemms.amax.input"
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(model.state_dict() | {key: torch.ones(shape)})
    (line,) = str(error.value).splitlines()[1:]
    assert line.strip().startswith(f"size mismatch for {key}: copying amaxes with shape torch.Size({list(shape)})")


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
