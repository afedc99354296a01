"""Building a layer: sizes, layers kept in bf16, torch.nn.Linear's place, and its device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from megatron_lowprec import KeepBf16, LowPrecLinear, UserError, get_recipe
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.lowprec_linear import end_step
from megatron_lowprec.quantization.amax_history import AmaxHistory
from tests.linear.layers import DELAYED, IN, OUT, layer_of, step, tensors


def test_sizes_are_checked_when_built() -> None:
    with pytest.raises(
        UserError, match=r"mxfp8: fprop of layers\.1\.linear has .* 80 input features are no multiple of 32"
    ):
        LowPrecLinear(80, 64, recipe="mxfp8")
    with pytest.raises(UserError, match="there is no recipe 'mxpf8'"):
        LowPrecLinear(64, 64, recipe="mxpf8")


def quantizes(layer: LowPrecLinear) -> bool:
    x = torch.randn(4, layer.in_features, generator=torch.Generator().manual_seed(1))
    return not torch.equal(layer(x), linear(x, layer.weight, layer.bias))


def test_layers_that_a_recipe_keeps_in_bf16() -> None:
    keep = KeepBf16(first_layers=1, last_layers=2, names=("*.proj", "layers.3.*"))
    recipe = replace(get_recipe("fp8_delayed"), keep_bf16=keep)
    quantized = {
        (layer, name): quantizes(LowPrecLinear(IN, OUT, recipe=recipe, layer=layer, name=name, num_layers=6))
        for layer in range(1, 7)
        for name in ("up", "proj")
    }
    assert [place for place, is_so in quantized.items() if is_so] == [(2, "up"), (4, "up")]
    # a layer that is left alone needs no sizes that blocks divide, and has no amax histories
    assert "amax.input" not in LowPrecLinear(81, 64, recipe=recipe, layer=1, num_layers=6).state_dict()
    LowPrecLinear(81, 64, recipe=replace(get_recipe("mxfp8"), keep_bf16=keep), layer=6, num_layers=6)


def test_last_layers_need_the_number_of_layers() -> None:
    with pytest.raises(
        UserError,
        match=r"bf16_ends has a rule that counts layers from the last one: pass num_layers=\.\.\.",
    ):
        LowPrecLinear(64, 64, recipe="fp8_current_bf16_ends")
    with pytest.raises(UserError, match="nvfp4_bf16_tail has phases"):  # whatever the number of layers
        LowPrecLinear(64, 64, recipe="nvfp4_bf16_tail")
    with pytest.raises(UserError, match="layer=5 of num_layers=4"):
        LowPrecLinear(64, 64, recipe="fp8_current", layer=5, num_layers=4)
    first = replace(get_recipe("fp8_current"), keep_bf16=KeepBf16(first_layers=1))
    assert [quantizes(LowPrecLinear(IN, OUT, recipe=first, layer=layer)) for layer in (1, 2)] == [False, True]


def test_layer_is_a_drop_in() -> None:
    torch.manual_seed(3)
    ours = LowPrecLinear(64, 96, recipe="mxfp8")
    torch.manual_seed(3)
    theirs = torch.nn.Linear(64, 96)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert torch.equal(ours.weight, theirs.weight)
    theirs.load_state_dict(ours.state_dict())
    assert ours(torch.randn(2, 3, 64)).shape == (2, 3, 96)
    assert torch.equal(ours(torch.zeros(64)), ours.bias)


# ---- several GPUs in one process
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["mxfp4_rht_sr", "fp8_current", "fp8_delayed"])
def test_a_layer_need_not_be_on_the_current_gpu(name: str, generator: torch.Generator) -> None:
    given = tensors(torch.bfloat16, generator)
    found: list[list[torch.Tensor]] = []
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        layer = layer_of(name, torch.bfloat16).to(device)
        found.append([])
        for _ in range(2):
            found[-1] += [tensor.cpu() for tensor in step(layer, *(tensor.to(device) for tensor in given))]
            end_step(layer)
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", ["mxfp4_rht_sr", "fp8_delayed"])
def test_a_layer_makes_its_device_the_current_one(
    name: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here on a stand-in for a device's being current: no product, cast or update of a history goes without it."""
    current: list[torch.device] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor.device)
        yield
        current.pop()

    def recorded(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert current == [torch.device("cpu")]
            calls.append(inner.__name__)
            return inner(*args, **kwargs)

        return call

    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(LinearGemms, "forward", recorded(LinearGemms.forward))
    monkeypatch.setattr(AmaxHistory, "_update_", recorded(AmaxHistory._update_))
    layer, (x, _) = layer_of(name), tensors(torch.float32, generator)
    layer(x)
    end_step(layer)
    assert set(calls) == ({"forward", "_update_"} if name in DELAYED else {"forward"})
    assert current == []
