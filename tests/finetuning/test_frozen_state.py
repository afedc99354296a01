"""The buffers of a frozen layer: state dicts, copies, moves, and codes that change."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from megatron_lowprec import UserError
from megatron_lowprec.finetuning import FrozenLayer, dequantize_frozen_weights, quantize_frozen_weights
from tests.finetuning.frozen_layers import IN, OUT, equal, held, layer_of, passes


@pytest.mark.parametrize("name", ["fp8_delayed", "mxfp8", "nvfp4_all"])
def test_state_dicts_of_codes_and_of_weights_load(name: str, tmp_path: Path) -> None:
    layer, other = held(name), held(name)
    unquantized = layer_of(name)
    with torch.no_grad():
        unquantized.weight.mul_(3)
    other.load_state_dict(unquantized.state_dict())  # the weight of a checkpoint in bf16
    again = quantize_frozen_weights(unquantized)
    assert equal(passes(other), passes(again))
    save_file(other.state_dict(), tmp_path / "codes.safetensors")
    layer.load_state_dict(load_file(tmp_path / "codes.safetensors"), strict=True)
    assert equal(passes(layer), passes(other))


@pytest.mark.parametrize("assign", [False, True])
def test_a_weight_of_another_shape_is_reported_as_the_weight(assign: bool) -> None:
    """As torch reports it: no name or size of codes, and what the layer holds stays."""
    layer, state = held("mxfp8", "conv1d"), layer_of("mxfp8", "conv1d").state_dict()
    want = passes(layer)
    state["weight"] = state["weight"].t()
    with pytest.raises(RuntimeError) as error:
        layer.load_state_dict(state, assign=assign)
    (line,) = str(error.value).splitlines()[1:]
    assert line.strip() == (
        f"size mismatch for weight: copying a param with shape torch.Size([{OUT}, {IN}]) from checkpoint, the shape "
        f"in current model is torch.Size([{IN}, {OUT}])."
    )
    assert equal(passes(layer), want)


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_copies_pickles_and_moves_keep_the_bits(kind: str) -> None:
    want = passes(held("fp8_rowwise", kind))
    layer = held("fp8_rowwise", kind)
    copies = [copy.deepcopy(layer)]
    if kind == "linear":  # the Conv1D of these tests is a stand-in that does not pickle
        copies.append(pickle.loads(pickle.dumps(layer)))
    for one in copies:
        assert isinstance(one, FrozenLayer)
        assert equal(passes(one), want)
    layer.float().bfloat16()  # would round fp32 scales
    assert layer.weight.dtype == torch.bfloat16
    assert equal(passes(layer), want)
    empty = copy.deepcopy(layer).to("meta")
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert equal(passes(empty), want)


def test_codes_of_another_format_are_refused() -> None:
    """They have the same names and sizes."""
    state = held("mxfp8").state_dict()
    held("mxfp8").load_state_dict(state)
    with pytest.raises(UserError, match=r"holds codes of e5m2 by 1x32.*has codes of e4m3 by 1x32"):
        held("mxfp8_e5m2_weight").load_state_dict(state)


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize(("name", "source"), [("fp8_delayed", "fp8_current"), ("fp8_current", "fp8_delayed")])
def test_codes_of_another_recipe_load(name: str, source: str, kind: str) -> None:
    """The weight of a delayed layer has the amax of the codes, and amaxes of the former weight are forgotten."""
    layer, other = held(name, kind), held(source, kind, scale=3)
    passes(layer)
    state = {key: value for key, value in other.state_dict().items() if ".amax." not in f".{key}"}
    layer.load_state_dict(state, strict=True)
    value = other.weight.value()
    assert torch.equal(layer.weight.value(), value)
    want = held(name, kind, scale=3)
    assert layer.state_dict().keys() == want.state_dict().keys()
    assert equal(passes(layer), passes(want))
    if name == "fp8_delayed":
        assert torch.equal(layer.weight_amax, value.abs().max().float().view(1))
    codes = passes(layer)
    dequantize_frozen_weights(layer)
    assert torch.equal(layer.weight, value)
    assert equal(passes(layer), codes)  # without saturation


def test_a_weight_without_amaxes_starts_empty_histories() -> None:
    """As in the layer that is not codes."""
    layer, plain = held("fp8_delayed"), layer_of("fp8_delayed")
    passes(layer)
    layer.load_state_dict(nn.Linear(IN, OUT).bfloat16().state_dict())
    assert {key: float(value.sum()) for key, value in vars(layer.amax).items()} == dict.fromkeys(vars(plain.amax), 0)


def test_a_part_of_the_codes_leaves_the_amax() -> None:
    layer, state = held("fp8_delayed"), held("fp8_current").state_dict()
    want = layer.weight_amax.clone()
    layer.load_state_dict({"bias": state["bias"]}, strict=False)
    assert torch.equal(layer.weight_amax, want)
    state["weight_rowwise_data"] = state["weight_rowwise_data"][:-1]
    with pytest.raises(RuntimeError, match="size mismatch for weight_rowwise_data"):
        layer.load_state_dict(state)
    assert torch.equal(layer.weight_amax, want)


def test_replaced_buffers_are_read() -> None:
    layer, x = held("fp8_current"), torch.randn(8, IN).bfloat16()
    y = layer(x)
    zeros = {name: torch.zeros_like(buffer) for name, buffer in layer.named_buffers()}
    with torch.no_grad():
        assert torch.equal(torch.func.functional_call(layer, zeros, x), layer.bias.expand(8, -1))
        assert torch.equal(layer(x), y)
        layer.weight_rowwise_scale = 2 * layer.weight_rowwise_scale
        assert not torch.equal(layer(x), y)


def test_codes_that_change_before_the_backward_pass_are_refused() -> None:
    layer, x = held("fp8_current"), torch.randn(8, IN).bfloat16().requires_grad_()
    y = layer(x)
    layer.weight_rowwise_data.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
