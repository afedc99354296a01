"""Draws, scales and state of a converted model."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lowprec import convert
from megatron_lowprec.linear.convert import plain_state_dict
from megatron_lowprec.linear.lowprec_linear import end_step
from tests.environment import ROOT, python_path
from tests.linear.conversions import forms, gradients
from tests.linear.tiny_models import TinyModel, build, tokens_of, train
from tests.waiting import PATIENCE


def test_each_layer_has_its_own_draws() -> None:
    model = nn.ModuleDict({name: nn.ModuleList(nn.Linear(64, 64) for _ in "ab") for name in ("encoder", "decoder")})
    layers = [layer for name in model for layer in model[name]]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    convert(model, "mxfp4_rht_sr")
    x, found = torch.randn(32, 64), []
    for layer in layers:
        torch.manual_seed(0)
        layer(x).square().sum().backward()
        found.append(layer.weight.grad)
    assert not any(torch.equal(a, b) for n, a in enumerate(found) for b in found[:n])


def test_seed_and_generator_decide_the_draws() -> None:
    def of(draws: int, **options: Any) -> list[torch.Tensor]:
        return gradients(convert(build(), "mxfp4_rht_sr", **options), draws)

    first = of(1)
    assert all(map(torch.equal, first, of(1)))
    for other in (of(2), of(1, seed=1), of(1, data_parallel_rank=1)):
        assert not all(map(torch.equal, first, other))


def test_scales_follow_the_optimizer() -> None:
    model = convert(build(), "fp8_delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    assert float(model.layers[0].q_proj.state_dict()["amax.input"][0]) == 0.0
    model(tokens_of(1)).backward()
    optimizer.step()
    in_effect = {key: float(value[0]) for key, value in model.state_dict().items() if ".amax." in key}
    assert len(in_effect) == 14 * 3
    assert min(in_effect.values()) > 0
    model(tokens_of(1)).backward()  # the same batch
    end_step(model)  # without an optimizer
    assert {key: float(value[0]) for key, value in model.state_dict().items() if ".amax." in key}.keys() == (
        in_effect.keys()
    )


@forms
@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "mxfp4_rht_sr"])
def test_state_dicts_go_both_ways(name: str, block: type[nn.Module]) -> None:
    plain = build(block)
    torch.manual_seed(9)
    model = convert(TinyModel(block), name)
    model.load_state_dict(plain.state_dict(), strict=True)
    train(model, 2)
    amaxes = {key for key in model.state_dict() if ".amax." in key}
    assert set(model.state_dict()) - amaxes == set(plain.state_dict())
    assert bool(amaxes) == (name == "fp8_delayed")
    plain.load_state_dict(plain_state_dict(model), strict=True)
    assert all(torch.equal(plain.state_dict()[key], model.state_dict()[key]) for key in plain.state_dict())
    again = convert(TinyModel(block), name)
    again.load_state_dict(model.state_dict(), strict=True)
    assert train(again, 2) == train(model, 2)


@pytest.mark.parametrize("name", ["mxfp8", "fp8_delayed", "mxfp4_rht_sr"])
def test_copies_are_independent(name: str) -> None:
    model = convert(build(), name)
    train(model, 2)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        state = {key: value.clone() for key, value in model.state_dict().items()}
        assert train(copied, 2) != []
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.slow
def test_histories_advance_in_the_process_that_loads_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.pkl"
    file.write_bytes(pickle.dumps(convert(build(), "fp8_delayed")))
    code = (
        "import pickle, sys; from tests.linear.tiny_models import train; "
        "model = pickle.load(open(sys.argv[1], 'rb')); train(model, 2); "
        "print(min(float(state[0]) for name, state in model.state_dict().items() if '.amax.' in name))"
    )
    command, environment = [sys.executable, "-c", code, str(file)], {**os.environ, **python_path()}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0


def test_an_amax_that_is_not_finite_is_left_out() -> None:
    """The loop skips the update; an Inf would pin the scale for a whole window."""
    model = convert(build(), "fp8_delayed")
    train(model, 1)
    (model(tokens_of(0)) * torch.inf).backward()  # and no update
    train(model, 1)
    histories = [state for name, state in model.state_dict().items() if ".amax." in name]
    assert histories
    assert all(state.isfinite().all() for state in histories)


def test_a_model_may_be_built_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = TinyModel()
    convert(model, "fp8_delayed").to_empty(device="cpu")
    model.load_state_dict(build().state_dict())
    assert train(model, 2) == train(convert(build(), "fp8_delayed"), 2)
