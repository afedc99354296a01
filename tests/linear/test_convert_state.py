"""Draws, scales and state of a converted model."""

import copy
import io
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from megatron_lowprec import LowPrecLinear, convert
from megatron_lowprec.linear.compiled import begin_pass
from megatron_lowprec.linear.convert import plain_state_dict
from megatron_lowprec.linear.lowprec_linear import end_step
from tests.launch import fork_ranks
from tests.linear.conversions import forms, gradients
from tests.linear.tiny_models import TinyModel, build, tokens_of, train


def test_each_layer_has_its_own_draws() -> None:
    model = nn.ModuleDict({name: nn.ModuleList(nn.Linear(64, 64) for _ in "ab") for name in ("encoder", "decoder")})
    layers = [layer for name in model for layer in model[name]]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    convert(model, "mxfp4_rht_sr")
    x, found = torch.randn(32, 64), []
    for layer in layers:
        layer(x).square().sum().backward()
        found.append(layer.weight.grad)
    assert not any(torch.equal(a, b) for n, a in enumerate(found) for b in found[:n])


def test_seed_rank_and_pass_decide_the_draws() -> None:
    """And nothing else: not torch's generator."""

    def of(passes: int = 1, state: int = 1, **options: Any) -> list[torch.Tensor]:
        model = convert(build(), "mxfp4_rht_sr", **options)
        return [gradients(model, state) for _ in range(passes)][-1]

    first = of()
    assert all(map(torch.equal, first, of(state=2)))
    for other in (of(2), of(seed=1), of(data_parallel_rank=1)):
        assert not all(map(torch.equal, first, other))


def test_a_recipe_changes_no_order_of_the_data() -> None:
    """A shuffled data set and dropout draw from torch's generator, from which layers took their draws."""

    def seen(recipe: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
        if recipe is not None:
            convert(model, recipe)
        data = TensorDataset(torch.arange(16.0)[:, None].expand(16, 64).contiguous())
        batches = [x for _ in range(2) for (x,) in DataLoader(data, batch_size=4, shuffle=True) if model(x) is not None]
        return [*batches, torch.get_rng_state()]

    for recipe in ("fp8_delayed", "mxfp4_rht_sr"):
        assert all(map(torch.equal, seen(None), seen(recipe)))


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
    draws = {key for key in model.state_dict() if key.endswith(".draws")}
    assert set(model.state_dict()) - amaxes - draws == set(plain.state_dict())
    assert (bool(amaxes), bool(draws)) == (name == "fp8_delayed", name == "mxfp4_rht_sr")
    plain.load_state_dict(plain_state_dict(model), strict=True)
    assert all(torch.equal(plain.state_dict()[key], model.state_dict()[key]) for key in plain.state_dict())
    again = convert(TinyModel(block), name)
    again.load_state_dict(model.state_dict(), strict=True)
    assert train(again, 2) == train(model, 2)


@pytest.mark.slow
def test_histories_advance_in_the_process_that_loads_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.pkl"
    file.write_bytes(pickle.dumps(convert(build(), "fp8_delayed")))
    (tmp_path / "load.py").write_text(
        "import pickle, sys; from tests.linear.tiny_models import train; "
        "model = pickle.load(open(sys.argv[1], 'rb')); train(model, 2); "
        "print('least amax', min(float(state[0]) for name, state in model.state_dict().items() if '.amax.' in name))"
    )
    printed = fork_ranks(1, [str(tmp_path / "load.py"), str(file)])
    assert float(printed.rpartition("least amax")[2]) > 0


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


def of_a_state_dict(model: nn.Module) -> nn.Module:
    found = convert(TinyModel(blocks=1), model.layers[0].q_proj.recipe)
    found.load_state_dict(model.state_dict())
    return found


COPIES = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded, of_a_state_dict]


@pytest.mark.parametrize("name", ["mxfp8", "fp8_delayed", "fp8_mxfp4_rht_sr"])
@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle", "torch.save", "state dict"])
def test_a_copy_continues_as_the_model(name: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    """It has the amaxes of the step before and the next draws, and its steps are its own."""
    model = convert(build(blocks=1), name)
    train(model, 2)
    other = copied(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    losses = train(other, 3)
    assert all(map(torch.equal, model.state_dict().values(), state.values()))
    assert train(model, 3) == losses
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
    assert not all(map(torch.equal, state.values(), model.state_dict().values()))


def test_a_copy_has_a_step_that_ended_in_the_backward_pass() -> None:
    model = convert(nn.Sequential(nn.Linear(64, 64)), "fp8_delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    model(torch.full((32, 64), 5.0)).sum().backward()
    assert copy.deepcopy(model)[0].amax.input[0] == 5.0
    assert model.state_dict()["0.amax.input"][0] == 5.0


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_mxfp4_rht_sr"])
def test_a_rollback_is_the_start_of_a_process(name: str) -> None:
    """Nothing of the abandoned steps is left, the one in progress included."""
    live, fresh = (convert(build(blocks=1), name) for _ in range(2))
    optimizer = torch.optim.AdamW(live.parameters())
    train(live, 1)
    saved = {key: value.clone() for key, value in live.state_dict().items()}
    for factor in (1e3, 1e6):
        (live(tokens_of(1)) * factor).backward()
        if factor == 1e3:
            optimizer.step()
    for model in (live, fresh):
        model.load_state_dict(saved)
        model.zero_grad()
    assert train(live, 3) == train(fresh, 3)
    assert all(map(torch.equal, live.state_dict().values(), fresh.state_dict().values()))


def test_a_state_dict_without_state_loads() -> None:
    """As that of the unconverted model: amaxes begin anew, also in a process that has some."""
    model = convert(build(), "fp8_mxfp4_rht_sr")
    train(model, 1)
    model.load_state_dict(plain_state_dict(model), strict=True)
    assert not any(value.any() for key, value in model.state_dict().items() if ".amax." in key)


def test_state_of_another_recipe_is_dropped_with_a_warning() -> None:
    """Also that of layers which are not converted here; keys of others stay an error."""
    source = convert(build(), "fp8_mxfp4_rht_sr", filter=lambda *_: True)
    train(source, 1)
    state = source.state_dict()
    for name in ("fp8_current", "mxfp8", "fp8_delayed", "mxfp4_rht_sr"):
        model = convert(TinyModel(), name)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model.load_state_dict(state, strict=True)
        used = [key for key in model.state_dict() if key not in plain_state_dict(model)]
        assert all(torch.equal(model.state_dict()[key], state[key]) for key in used if key in state)
        (message,) = [str(each.message) for each in said]
        assert re.fullmatch(r"load_state_dict drops (amax|counts).*, \d+ keys that this recipe does not use", message)
        assert f", {len(state) - len(set(state) & set(model.state_dict()))} keys" in message
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"embed\.amax\.other\""):
        model.load_state_dict({**model.state_dict(), "embed.amax.other": torch.zeros(2)})


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


def test_what_the_host_reads_in_a_graph_is_on_the_cpu() -> None:
    """Whatever torch's default device: a read elsewhere waits for it in each pass."""
    with torch.device("meta"):
        layer = LowPrecLinear(32, 32, recipe="fp8_delayed").to_empty(device="cpu")
        assert layer.identity is not None
        assert begin_pass(layer.identity, False).tolist()[1:] == [0, 0]
