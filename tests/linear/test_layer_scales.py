"""Delayed scales of a layer follow its training steps."""

import copy
import re
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from megatron_lowprec import LowPrecLinear, convert, get_recipe
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.linear import layer_histories
from megatron_lowprec.linear.convert import plain_state_dict
from megatron_lowprec.linear.lowprec_linear import end_step
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.recipe.coverage import with_current_scales
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
def test_scales_follow_any_optimizer(name: str, frozen: bool, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    got, want = (train(name, optimizer, told, frozen) for told in (False, True))
    assert all(map(torch.equal, got, want))


def test_only_an_optimizer_that_holds_the_layer_ends_its_step(generator: torch.Generator) -> None:
    """Another model's, between two microbatches, does not. An evaluation is not recorded."""
    layer, (x, dy) = layer_of("fp8_delayed"), tensors(torch.float32, generator)
    other, own = (torch.optim.SGD(given) for given in ([torch.nn.Parameter(torch.zeros(1))], layer.parameters()))
    history, slot = layer.linear_gemms.histories["input"]
    for factor in (2.0, 1.0):
        step(layer, factor * x, dy)
        other.step()
        assert history.in_effect[slot] == 0.0
    own.step()
    amax = float(x.abs().max())
    assert history.in_effect[slot] == 2 * amax
    for _ in range(3):
        with torch.no_grad():
            layer(8 * x)
        own.step()
    assert history.window[:2, slot].tolist() == [2 * amax, 0.0]


def test_any_optimizer_ends_the_step_of_a_frozen_layer(generator: torch.Generator) -> None:
    """None holds it, if adapters or a head behind it are trained."""
    layer, (x, _) = layer_of("fp8_delayed").requires_grad_(False), tensors(torch.float32, generator)
    layer(x)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()
    assert layer.amax.input[0] == x.abs().max()


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


def test_replays_of_a_cuda_graph_are_steps(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    """They record amaxes without a call of the layer; so each step of the optimizer ends one."""
    layer, (x, dy) = layer_of("fp8_delayed"), tensors(torch.float32, generator)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    with monkeypatch.context() as capture:
        capture.setattr(layer_histories, "capturing", lambda: True)
        step(layer, x, dy)
    history, slot = layer.linear_gemms.histories["input"]
    for amax in (20.0, 30.0):
        history.newest[slot] = amax
        optimizer.step()
    assert layer.amax.input[:4].tolist() == [30.0, 30.0, 20.0, 0.0]


def test_newest_amaxes_are_checked_where_there_may_be_some(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """Not in the first pass of a step, which would launch for nothing, but in each if replays of a graph record."""
    layer, (x, dy), checked = layer_of("fp8_delayed"), tensors(torch.float32, generator), list[AmaxHistory]()
    monkeypatch.setattr(AmaxHistory, "drop_not_finite", lambda history: checked.append(history))
    found = []
    for captures in (False, False, True, False):
        with monkeypatch.context() as capture:
            capture.setattr(layer_histories, "capturing", lambda captures=captures: captures)
            for _ in range(2):
                checked.clear()
                step(layer, x, dy)
                found.append(len(checked))
        end_step(layer)
    assert found[2:] == [0, 1, 1, 1, 1, 1]


# ---- recorded in training only, whether or not something needs a gradient
SAID = ".* scales by current amaxes"


def trunk_and_head(name: str = "fp8_delayed") -> nn.Sequential:
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(IN, IN), nn.ReLU(), nn.Linear(IN, IN)), name)


def scaled_by_current_amaxes(model: nn.Sequential) -> nn.Sequential:
    """The same model under current scales."""
    recipe = get_recipe("fp8_delayed")
    found = nn.Sequential(nn.Linear(IN, IN), nn.ReLU(), nn.Linear(IN, IN))
    found.load_state_dict(plain_state_dict(model))
    return convert(found, with_current_scales(recipe, recipe.delayed_operands()))


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_a_frozen_layer_below_the_trained_ones_records(how: str) -> None:
    """Its input needs no gradient, unless a reentrant checkpoint needs one to recompute."""
    model = trunk_and_head()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.0)
    x = torch.full((T, IN), 2000.0, requires_grad=how == "reentrant")
    y = model(x) if how == "plain" else checkpoint(model, x, use_reentrant=how == "reentrant")
    y.square().mean().backward()
    optimizer.step()
    assert model[0].amax.input[0] == 2000.0
    assert model[0].amax.weight[0] == model[0].weight.abs().max()
    assert model[2].amax.grad_output[0] > 0


@pytest.mark.parametrize("evaluates", [nn.Module.eval, lambda model: model], ids=["eval", "no_grad"])
def test_a_model_in_evaluation_only_scales_by_current_amaxes(
    evaluates: Callable[[nn.Module], nn.Module], generator: torch.Generator
) -> None:
    model = trunk_and_head()
    x = torch.randn(T, IN, generator=generator) * 2000
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        y = [evaluates(model)(x) for _ in range(2)]
    assert [str(each.message) for each in said] == [
        "fp8_delayed scales by current amaxes: no step in training has recorded any yet"
    ]
    with torch.no_grad():
        want = scaled_by_current_amaxes(model)(x)
    assert all(torch.equal(each, want) for each in y)
    assert not any(model.state_dict()[key].any() for key in model.state_dict() if ".amax." in key)


def manual(model: nn.Module, how: str) -> None:
    """An update without a torch optimizer."""
    for weight in model.parameters():
        assert weight.grad is not None
        if how == "of data":
            weight.data -= 0.1 * weight.grad
        elif how == "another tensor as data":
            weight.data = weight.data - 0.1 * weight.grad
        else:
            with torch.no_grad():
                weight -= 0.1 * weight.grad
        weight.grad = None
    if how == "told":
        end_step(model)


@pytest.mark.parametrize("how", ["in place", "of data", "another tensor as data", "told"])
def test_updates_without_an_optimizer(how: str, generator: torch.Generator) -> None:
    """Scales are current from the second step on, with one warning, or follow ``end_step`` without one."""
    model = trunk_and_head()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(3):
            x = torch.randn(T, IN, generator=generator) * 1000 * (number + 1)
            y = model(x)
            y.square().mean().backward()
            if number and how != "told":
                want = scaled_by_current_amaxes(model)
                assert torch.equal(y, want(x))
                want(x).square().mean().backward()
                assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), want.parameters()))
            manual(model, how)
    assert [bool(re.match(SAID, str(each.message))) for each in said] == [True] * (how != "told")
    assert model[0].amax.input[:4].count_nonzero() == (4 if how == "told" else 0)


def test_a_weight_that_changes_without_a_step_is_scaled_by_its_amax(generator: torch.Generator) -> None:
    """In the middle of a step; after it, delayed scales again."""
    model = trunk_and_head()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(T, IN, generator=generator)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
    model(x).square().mean().backward()
    with torch.no_grad():
        model[0].weight *= 1000
    with pytest.warns(UserWarning, match=SAID):
        y = model[0](x)
    assert torch.equal(y, scaled_by_current_amaxes(model)[0](x))
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not torch.equal(model[0](x), y)


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("starts", [0, 1])
def test_an_average_of_weights_has_the_amaxes_of_the_model(
    use_buffers: bool, starts: int, generator: torch.Generator
) -> None:
    """They are copied, not averaged; so is an average that was made before the first step. Other copies keep theirs."""
    model = trunk_and_head()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for number in range(3):
        if number == starts:
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
            snapshot = copy.deepcopy(model)
        optimizer.zero_grad()
        model(torch.randn(T, IN, generator=generator) * 10.0**number).square().mean().backward()
        optimizer.step()
        if number >= starts:
            average.update_parameters(model)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        average(torch.randn(T, IN, generator=generator))
    for mine, theirs, old in zip(average.module[::2], model[::2], snapshot[::2], strict=True):
        assert all(map(torch.equal, vars(mine.amax).values(), vars(theirs.amax).values()))
        assert torch.equal(old.amax.input[1 : 1 + starts], theirs.amax.input[3 - starts + 1 : 4])


def test_a_checkpoint_that_is_never_recomputed_scales_by_current_amaxes(generator: torch.Generator) -> None:
    """A reentrant one, whose input needs no gradient: no pass has gradients, so none is recorded."""
    model = trunk_and_head().requires_grad_(False)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    for number in range(2):
        x = torch.randn(T, IN, generator=generator) * 2000
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            y = checkpoint(model, x, use_reentrant=True)
        assert sum(bool(re.match(SAID, str(each.message))) for each in said) == number
        optimizer.step()
    assert torch.equal(y, scaled_by_current_amaxes(model)(x))


def test_an_idle_layer_keeps_its_amaxes() -> None:
    model = convert(nn.Sequential(nn.Linear(IN, IN), nn.Linear(IN, IN)), "fp8_delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number, used in enumerate((model, model[:1], model[:1], model)):
        for layer in used:
            layer(torch.full((T, IN), 2.0**number)).sum().backward()
        optimizer.step()
    assert [layer.amax.input[1:5].tolist() for layer in model] == [[8.0, 4.0, 2.0, 1.0], [8.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("update", ["step", "microbatch"])
def test_the_step_after_a_skipped_one_is_recorded(update: str, generator: torch.Generator) -> None:
    """An Inf of the step that the loop skipped hides no amax of the next one."""
    fields = [f"{gemm}.{operand}.history_update={update}" for gemm, pair in GEMM_OPERANDS.items() for operand in pair]
    layer = LowPrecLinear(IN, OUT, recipe=load_recipe("fp8_delayed", fields))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    x, dy = tensors(torch.float32, generator)
    for factor in (1.0, torch.inf, 100.0):
        step(layer, x, factor * dy)
        if factor < torch.inf:  # as a GradScaler does
            optimizer.step()
    assert layer.amax.grad_output[1:4].tolist() == [*(float((f * dy).abs().max()) for f in (100.0, 1.0)), 0.0]
