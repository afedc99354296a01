"""Delayed scales of a layer follow its training steps."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from megatron_lowprec import LowPrecLinear
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.linear.lowprec_linear import end_step
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from tests.kernels.exact import nearest
from tests.linear.layers import DELAYED, IN, OUT, T, assert_is, layer_of, step, tensors


@pytest.mark.parametrize("name", DELAYED)
def test_evaluation_leaves_no_trace(name: str, generator: torch.Generator) -> None:
    x, dy = tensors(torch.float32, generator)
    layer = layer_of(name)
    step(layer, x, dy)
    newest = [h.newest.clone() for h, _ in layer.linear_gemms.histories.values()]
    with torch.no_grad():
        layer(x * 1000)
    assert all(
        torch.equal(h.newest, n) for (h, _), n in zip(layer.linear_gemms.histories.values(), newest, strict=True)
    )


def test_delayed_scale_is_one_and_then_maximum_over_amax(generator: torch.Generator) -> None:
    layer, (x, dy) = layer_of("fp8_delayed"), tensors(torch.float32, generator)
    x[0, 0] = 500.0  # beyond 448: saturates while the scale is 1
    y, _, _ = step(layer, x, dy)
    saturated = nearest(x, FORMATS["e4m3"], "nearest_even")
    w = layer.weight.detach()
    plain = nearest(w, FORMATS["e4m3"], "nearest_even")
    assert float(saturated[0, 0]) == 448.0
    assert_is(y, (saturated @ plain.t(), saturated.abs() @ plain.t().abs()), IN)
    end_step(layer)
    history, slot = layer.linear_gemms.histories["input"]
    assert history.in_effect[slot].item() == 500.0
    history, slot = layer.linear_gemms.histories["grad_output"]
    assert history.in_effect[slot].item() == dy.abs().max().item()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "AdamW, tensor by tensor": partial(torch.optim.AdamW, foreach=False),
    "SGD": torch.optim.SGD,
    "SGD with momentum": partial(torch.optim.SGD, momentum=0.9),
}


def train(name: str, optimizer: Callable[..., torch.optim.Optimizer], told: bool, frozen: bool) -> list[torch.Tensor]:
    """Losses, an amax and a state dict of steps of two microbatches, an evaluation between; ``told`` by end_step."""
    layers = layer_of(name), LowPrecLinear(OUT, IN, recipe=name)
    model = torch.nn.Sequential(*layers)
    layers[1].weight.requires_grad_(not frozen)
    update = optimizer([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    found, generator = [], torch.Generator().manual_seed(5)
    torch.manual_seed(6)
    for number in range(4):
        update.zero_grad()
        for _ in range(2):
            x = torch.randn(T, IN, generator=generator) * 2.0**number
            loss = (model(x) - x).square().mean()
            loss.backward()
            found.append(loss.detach())
        update.step()
        if told:
            end_step(model)
        if number == 2:
            found += [state.clone() for state in model.state_dict().values()]
        else:
            with torch.no_grad():
                found.append(model(x))
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_mxfp4_rht_sr"])
def test_scales_follow_an_optimizer_without_being_told(
    name: str, frozen: bool, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    got, want = (train(name, optimizer, told, frozen) for told in (False, True))
    assert all(map(torch.equal, got, want))


def test_scales_stay_within_a_step_and_where_nothing_was_trained(generator: torch.Generator) -> None:
    layer, (x, dy) = layer_of("fp8_delayed"), tensors(torch.float32, generator)
    history, slot = layer.linear_gemms.histories["input"]
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    for _ in range(3):
        step(layer, x, dy)
    assert history.in_effect[slot] == 0.0
    other.step()  # of the layer's optimizer or not: an update ends what was observed
    layer(x)
    assert history.in_effect[slot] == x.abs().max()
    for _ in range(3):
        with torch.no_grad():
            layer(8 * x)
        other.step()
    layer(x)
    # what the training pass has seen came in once, and nothing of evaluations
    assert history.window[:3, slot].tolist() == [float(x.abs().max())] * 2 + [0.0]


def test_histories_that_move_each_microbatch_follow_the_forward_passes() -> None:
    overrides = [
        f"{gemm}.{operand}.history_update=microbatch" for gemm, pair in GEMM_OPERANDS.items() for operand in pair
    ]
    moving, held = (LowPrecLinear(64, 32, recipe=load_recipe("fp8_delayed", fields)) for fields in (overrides, []))
    for layer in (moving, held):
        for size in (1.0, 10.0, 1.0):
            layer(torch.full((16, 64), size)).sum().backward()
    amaxes = [
        {operand: float(history.in_effect[slot]) for operand, (history, slot) in layer.linear_gemms.histories.items()}
        for layer in (moving, held)
    ]
    assert amaxes[0]["input"] == 10.0
    assert set(amaxes[1].values()) == {0.0}
