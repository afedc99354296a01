"""Calls that make codes of weights and weights of codes: the way back, and what is refused."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron_lowprec import QuantSpec, UserError, convert
from megatron_lowprec.finetuning import dequantize_frozen_weights, quantize_frozen_weights
from megatron_lowprec.linear.convert import plain_state_dict
from megatron_lowprec.quantization.frozen_weight import Codes
from megatron_lowprec.recipe.registry import MXFP4
from tests.finetuning.frozen_layers import IN, OUT, equal, held, layer_of, passes


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_dequantized_weights_are_parameters(kind: str) -> None:
    layer = held("mxfp8", kind)
    want, kinds = layer.weight.value(), type(layer_of("mxfp8", kind))
    layer.weight.requires_grad_(False)
    writes = (
        lambda: layer.weight.data.add_(1),
        lambda: layer.weight.add_(1),
        lambda: setattr(layer.weight, "data", torch.zeros(layer.weight.shape)),
        lambda: layer.weight.requires_grad_(True),  # would train nothing
        lambda: setattr(layer.weight, "requires_grad", True),
    )
    for write in writes:
        with pytest.raises(UserError, match=r"call megatron_lowprec\.finetuning\.dequantize_frozen_weights\(model\)"):
            write()
    assert torch.equal(layer.weight + 0, want)  # to read
    dequantize_frozen_weights(layer)
    assert type(layer) is kinds
    assert isinstance(layer.weight, nn.Parameter)
    assert torch.equal(layer.weight, want)
    assert {name for name, _ in layer.named_parameters()} == {"weight", "bias"}
    assert dict(layer.named_buffers()) == {}


def test_weights_that_cannot_be_codes() -> None:
    with pytest.raises(UserError, match="found no converted layer: call convert first"):
        quantize_frozen_weights(nn.Linear(IN, OUT))
    layer = layer_of("fp8_current")
    layer.weight.requires_grad_(True)
    with pytest.raises(UserError, match=r"no converted layer with a frozen weight; freeze weights by requires_grad_"):
        quantize_frozen_weights(layer)
    for spec in (replace(MXFP4, rounding="stochastic"), QuantSpec("e4m3", granularity="tensor", scaling="delayed")):
        with pytest.raises(UserError, match="takes a storage spec with current scales"):
            held("bf16", storage=spec)
    with pytest.raises(UserError, match="all codes already: call dequantize_frozen_weights first to change storage"):
        quantize_frozen_weights(held("mxfp8"), storage=MXFP4)
    layer = layer_of("mxfp8")
    nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(UserError, match=r"weight is computed by a parametrization: call .*remove_parametrizations"):
        quantize_frozen_weights(layer.requires_grad_(False))
    layer = layer_of("mxfp8")
    for given, why in (
        ({"model": [layer]}, r"a list as model: give a torch\.nn\.Module"),
        ({"storage": "mxfp4"}, r"a str as storage: give a QuantSpec, as in QuantSpec\("),
        ({"dtype": "bf16"}, "dtype='bf16', but recipes compute in bfloat16 or float32"),
        ({"dtype": torch.float16}, r"dtype=torch\.float16, but recipes compute in bfloat16 or float32"),
    ):
        with pytest.raises(UserError, match=why):
            quantize_frozen_weights(**{"model": layer} | given)  # type: ignore[arg-type]


@pytest.mark.parametrize("calls", [0, 1])
def test_a_failure_leaves_the_weight(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example out of memory, in either direction: the layer is the converted one, and a second call holds it."""
    layer, want, of = layer_of("mxfp8"), passes(layer_of("mxfp8")), Codes.of
    left = [of] * calls

    def fails(matrix: torch.Tensor, spec: QuantSpec) -> Codes:
        if not left:
            raise torch.OutOfMemoryError
        return left.pop()(matrix, spec)

    monkeypatch.setattr(Codes, "of", staticmethod(fails))
    with pytest.raises(torch.OutOfMemoryError):
        quantize_frozen_weights(layer)
    monkeypatch.undo()
    assert type(layer) is type(layer_of("mxfp8"))
    assert isinstance(layer.weight, nn.Parameter)
    assert equal(passes(layer), want)
    assert equal(passes(quantize_frozen_weights(layer)), want)


def test_a_released_weight_has_its_former_dtype() -> None:
    layer = convert(nn.Sequential(nn.Linear(IN, OUT)), "fp8_current", dtype=torch.bfloat16).requires_grad_(False)
    quantize_frozen_weights(layer, dtype=torch.bfloat16)
    with pytest.raises(UserError, match=r"dequantize_frozen_weights\(model\) first"):
        plain_state_dict(layer)
    assert dequantize_frozen_weights(layer)[0].weight.dtype == torch.float32


def test_weights_that_do_not_stay_tied_are_named() -> None:
    model = nn.Sequential(nn.Embedding(256, 256), *(nn.Linear(256, 256, bias=False) for _ in range(4)))
    model[2].weight = model[1].weight
    model[3].weight = model[0].weight
    model = convert(model.requires_grad_(False), "mxfp8", filter=lambda path, module: True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantize_frozen_weights(model)
    said = sorted(str(each.message).partition(" unties ")[2].partition(", which are")[0] for each in caught)
    assert said == ["0.weight, 3.weight", "1.weight, 2.weight"]
