"""Inputs, weights and passes that few models have: of other features, parametrized, without tokens."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from megatron_lowprec import LowPrecLinear, UserError, convert
from tests.linear.compiled_layers import One, converted, equal, steps_of
from tests.linear.layers import IN, T, all_recipes, layer_of
from tests.linear.tiny_models import Conv1D


@all_recipes
def test_an_input_of_other_features_is_refused(name: str) -> None:
    """Emulated GEMMs took one of too few as padded with zeros."""
    layer = layer_of(name)
    for mode in (True, False):
        layer.train(mode)
        for shape in ((T, IN // 2), (2, T, 2 * IN), (IN // 2,), (0, IN // 2), (T, 0), ()):
            with pytest.raises(UserError, match=f"a weight of {IN} input features got an input of shape .*: give it"):
                layer(torch.zeros(shape))


@all_recipes
def test_a_layer_on_the_meta_device_has_the_shapes_of_torch_s(name: str) -> None:
    layer, x = layer_of(name).to("meta"), torch.zeros(2, T, IN, device="meta", requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert (y.shape, y.device.type) == ((2, T, layer.out_features), "meta")
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert layer.weight.grad.shape == layer.weight.shape


def test_the_layer_of_gpt2_refuses_its_output_features() -> None:
    layer = convert(nn.Sequential(Conv1D(nf=256, nx=128)), "fp8_current")
    assert layer(torch.zeros(T, 128)).shape == (T, 256)
    with pytest.raises(UserError, match="a weight of 128 input features got an input of shape"):
        layer(torch.zeros(T, 256))


@pytest.mark.slow
def test_a_compiled_layer_refuses_as_well() -> None:
    model = converted("fp8_current", One)
    model.compile(backend="aot_eager")
    with pytest.raises(UserError, match="a weight of 128 input features got an input of shape"):
        model(torch.zeros(T, 64))


# ---- parametrized weights
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "mxfp4_rht_sr"])
def test_a_parametrization_is_computed_once_in_a_pass(name: str, compiles: bool) -> None:
    """Spectral norm iterates in each read, also in one by a checkpoint or for the device."""
    torch._dynamo.reset()
    found = []
    for recipe in (None, name):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64))
        if recipe is not None:
            convert(model, recipe)
        spectral_norm(model[0])
        if compiles and recipe is not None:
            model.compile(backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            model(torch.ones(32, 64)).square().mean().backward()
            optimizer.step()
            model.state_dict()
            model.float()
        found.append(model[0].parametrizations["weight"][0]._u.clone())
    assert torch.equal(*found)


def test_a_parametrized_weight_that_changes_without_a_step_is_scaled_by_its_amax() -> None:
    layer = spectral_norm(LowPrecLinear(64, 64, recipe="fp8_delayed"))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for _ in range(2):
        layer(torch.ones(32, 64)).square().mean().backward()
        optimizer.step()
    layer(torch.ones(32, 64))
    with torch.no_grad():
        layer.parametrizations["weight"].original += 1.0
    with pytest.warns(UserWarning, match="scales by current amaxes: a weight changed without a step"):
        layer(torch.ones(32, 64))


# ---- passes
@pytest.mark.slow
@pytest.mark.parametrize("tokens", [(64, 0, 64), (0, 64, 64)])
@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_mxfp4_rht_sr"])
def test_a_compiled_step_without_tokens_records_the_weight(name: str, tokens: tuple[int, ...]) -> None:
    """As an eager one, so that the layer is no longer one without amaxes."""
    want, model = steps_of(converted(name, One), 3, tokens), converted(name, One)
    model.compile(backend="aot_eager", fullgraph=True)
    assert equal(steps_of(model, 3, tokens), want)


@pytest.mark.filterwarnings("ignore:.* scales by current amaxes")
@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_mxfp4_rht_sr", "mxfp4_rht_sr"])
def test_a_pass_without_gradients_is_recomputed_with_its_bits(name: str) -> None:
    """As of a teacher, in a reentrant checkpoint, before a pass of the same layer with gradients."""
    torch.manual_seed(0)
    layer, numbers, outputs = convert(nn.Sequential(nn.Linear(64, 64)), name), [], []

    def part(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            outputs.append(layer(x))
        numbers.append(layer[0].rng_step)
        y = layer(x * outputs[-1])
        numbers.append(layer[0].rng_step)
        outputs.append(y.detach())
        return y

    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        numbers.clear()
        outputs.clear()
        checkpoint(part, torch.randn(32, 64, requires_grad=True), use_reentrant=True).square().sum().backward()
        optimizer.step()
        assert numbers[:2] == numbers[2:]
        assert all(map(torch.equal, outputs[:2], outputs[2:]))
