"""``Muon`` against torch's Muon and AdamW, with fused projections, and on converted layers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lowprec import convert
from megatron_lowprec.optimizer import muon
from megatron_lowprec.optimizer.muon import Matrix, Muon, matrices_of_linears

LR, DECAY = 0.02, 0.1


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((24, 16), (16, 40), (16,))]


def steps(*optimizers: torch.optim.Optimizer) -> None:
    """Four updates with the same gradients for the weights of each place."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for several in zip(*(o.param_groups[0]["params"] for o in optimizers), strict=True):
            grad = torch.randn(several[0].shape, generator=generator)
            for weight in several:
                weight.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_matrices_move_as_torch_s_muon_moves_them(adjust: str) -> None:
    """Within two roundings: torch scales and adds in one operation."""
    mine, theirs = weights()[:2], weights()[:2]
    options: dict[str, Any] = {"weight_decay": DECAY, "adjust_lr_fn": adjust, "momentum": 0.9, "ns_steps": 4}
    ours = Muon(mine, [Matrix(weight) for weight in mine], LR / 2, lr_ratio=2.0, **options)
    steps(ours, torch.optim.Muon(theirs, LR, **options))
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-22, atol=2**-24)


@pytest.mark.parametrize("at_once", [1, 500])
def test_matrices_at_once_move_as_one_by_one(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """All three in one call of torch's Muon, each in its own, or two and one."""
    together, apart = (
        [nn.Parameter(torch.randn(24, 16, generator=torch.Generator().manual_seed(seed))) for seed in range(3)]
        for _ in range(2)
    )
    steps(Muon(together, [Matrix(weight, (2, 1)) for weight in together]))
    monkeypatch.setattr(muon, "_AT_ONCE", at_once)
    steps(Muon(apart, [Matrix(weight, (2, 1)) for weight in apart]))
    assert all(torch.equal(got, want) for got, want in zip(apart, together, strict=True))


def test_each_group_has_its_rate_in_a_shared_call() -> None:
    together, apart = weights()[:2], weights()[:2]
    groups = [{"params": [weight], "lr": rate} for weight, rate in zip(together, (LR, LR / 8), strict=True)]
    ours = [Muon(groups, [Matrix(weight) for weight in together])]
    ours += [Muon([weight], [Matrix(weight)], rate) for weight, rate in zip(apart, (LR, LR / 8), strict=True)]
    for seed, weight in enumerate([*together, *apart]):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed % 2))
    for optimizer in ours:
        optimizer.step()
    assert all(torch.equal(got, want) for got, want in zip(together, apart, strict=True))


def test_other_weights_move_as_adamw_moves_them() -> None:
    mine, theirs = weights(), weights()
    steps(Muon(mine, [Matrix(mine[0])], LR, DECAY), torch.optim.AdamW(theirs, LR, weight_decay=DECAY, fused=True))
    assert not torch.equal(mine[0], theirs[0])
    assert all(torch.equal(got, want) for got, want in zip(mine[1:], theirs[1:], strict=True))


def test_queries_keys_and_values_are_three_matrices() -> None:
    """Two query groups of 8 rows: 4 of queries, 2 of keys, 2 of values."""
    fused = nn.Parameter(torch.randn(16, 6, generator=torch.Generator().manual_seed(2)))
    parts = [
        nn.Parameter(part.detach().flatten(0, 1).clone()) for part in fused.unflatten(0, (2, 8)).split([4, 2, 2], 1)
    ]
    grad = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
    fused.grad = grad
    for part, of_part in zip(parts, grad.unflatten(0, (2, 8)).split([4, 2, 2], 1), strict=True):
        part.grad = of_part.flatten(0, 1).clone()
    Muon([fused], [Matrix(fused, (4, 2, 2))], LR).step()
    Muon(parts, [Matrix(part) for part in parts], LR).step()
    for rows, part in zip(fused.unflatten(0, (2, 8)).split([4, 2, 2], 1), parts, strict=True):
        assert torch.equal(rows.flatten(0, 1), part)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp4_rht_sr"])
def test_converted_layers_train_and_resume(recipe: str) -> None:
    """The embedding's weight is the output layer's. One step of Muon is one of the amax histories."""

    def build() -> tuple[nn.Module, Muon]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(64, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 64)
        )
        model[4].weight = model[0].weight
        convert(model, recipe, seed=0)
        found = matrices_of_linears(model)
        assert [matrix.weight for matrix in found] == [model[1].weight, model[3].weight]
        return model, Muon(model.parameters(), found, lr=3e-3)

    def train(model: nn.Module, optimizer: Muon, steps: int) -> list[float]:
        tokens, found = torch.arange(64), []
        for _ in range(steps):
            loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    model, optimizer = build()
    first = train(model, optimizer, 4)
    saved = copy.deepcopy([each.state_dict() for each in (model, optimizer)])
    rest = train(model, optimizer, 4)
    assert rest[-1] < first[0]
    again, fresh = build()
    again.load_state_dict(saved[0])
    fresh.load_state_dict(saved[1])
    assert train(again, fresh, 4) == rest


def test_a_weight_of_two_layers_is_updated_once() -> None:
    layers = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
    shared = layers[1].weight = layers[0].weight
    alone = nn.Parameter(shared.detach().clone())
    steps(Muon([shared], matrices_of_linears(nn.Sequential(*layers)), LR), Muon([alone], [Matrix(alone)], LR))
    assert torch.equal(shared, alone)


@pytest.mark.parametrize("recipe", ["", "fp8_current"])
@pytest.mark.parametrize("sizes", [(64, 128), (128, 64)])
def test_a_conv1d_moves_as_the_linear_layer_that_it_is(sizes: tuple[int, int], recipe: str) -> None:
    """The rate follows from rows and columns of the layer's matrix, which is stored transposed."""
    utils = pytest.importorskip("transformers.pytorch_utils")
    model = nn.Sequential(utils.Conv1D(sizes[1], sizes[0]))
    if recipe:
        convert(model, recipe)
    stored = model.get_parameter("0.weight")
    plain = nn.Parameter(stored.detach().t().clone())
    ours = Muon(model.parameters(), matrices_of_linears(model), LR, adjust_lr_fn="original")
    theirs = Muon([plain], [Matrix(plain)], LR, adjust_lr_fn="original")
    for seed in range(3):
        plain.grad = torch.randn(plain.shape, generator=torch.Generator().manual_seed(seed))
        stored.grad = plain.grad.t().contiguous()
        ours.step()
        theirs.step()
    torch.testing.assert_close(stored, plain.t(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("number", [0, 2])
def test_a_weight_whose_first_gradient_is_late_counts_its_own_updates(number: int) -> None:
    """Also behind a checkpoint."""
    mine, theirs = weights(), weights()
    ours, torchs = Muon(mine, [], LR, DECAY), torch.optim.AdamW(theirs, LR, weight_decay=DECAY, fused=True)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        for place, several in enumerate(zip(mine, theirs, strict=True)):
            grad = torch.randn(several[0].shape, generator=generator)
            for weight in several:
                weight.grad = None if place == number and step < 2 else grad.clone()
        if step == 4:
            saved = ours.state_dict()
            ours = Muon(mine, [], LR, DECAY)
            ours.load_state_dict(saved)
        ours.step()
        torchs.step()
    assert all(torch.equal(got, want) for got, want in zip(mine, theirs, strict=True))


def test_a_checkpoint_may_have_the_count_in_groups_alone() -> None:
    """As Megatron-core's distributed optimizer loads it beside TransformerEngine."""
    mine = weights()
    first = Muon(mine, [Matrix(mine[0])])
    steps(first)
    saved = copy.deepcopy(first.state_dict())
    for state in saved["state"].values():
        state["step"].zero_()
    again = Muon(mine, [Matrix(mine[0])])
    again.load_state_dict(saved)
    assert [float(again.state[weight]["step"]) for weight in mine] == [4.0] * 3


def test_a_closure_computes_gradients_and_loss() -> None:
    layer = nn.Linear(4, 4)
    optimizer = Muon(layer.parameters(), matrices_of_linears(layer), LR)
    before = layer.weight.detach().clone()

    def closure() -> float:
        loss = layer(torch.ones(2, 4)).square().mean()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) > 0
    assert not torch.equal(layer.weight, before)
    assert optimizer.step() is None


def test_a_compiled_step_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        mine = weights()
        optimizer = Muon(mine, [Matrix(mine[0])], LR)
        if compiled:
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        steps(optimizer)
        found.append(mine)
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))


@pytest.mark.parametrize("what", ["weight", "part of a tensor", "gradient", "averages"])
def test_other_weights_move_alike_however_tensors_are_stored(what: str) -> None:
    values, grads = (torch.randn(4, 8, 3, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    weight, want = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    if what == "weight":
        weight.data = weight.data.to(memory_format=torch.channels_last)
    if what == "part of a tensor":
        weight.data = torch.cat([weight.data, weight.data], dim=1)[:, :8]
    ours, theirs = (Muon([each], [], LR) for each in (weight, want))
    for step in range(3):
        weight.grad, want.grad = grads.clone(), grads.clone()
        if what == "gradient":
            weight.grad = weight.grad.to(memory_format=torch.channels_last)
        if what == "averages" and step == 1:
            saved = copy.deepcopy(ours.state_dict())
            for name in ("exp_avg", "exp_avg_sq"):
                saved["state"][0][name] = saved["state"][0][name].to(memory_format=torch.channels_last)
            ours.load_state_dict(saved)
        ours.step()
        theirs.step()
        assert torch.equal(weight, want)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(ours.state[weight][name], theirs.state[want][name])


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_goes_on_as_the_optimizer(how: str) -> None:
    mine = weights()
    optimizer = Muon(mine, [Matrix(mine[0], (2, 1))], LR, lr_ratio=2.0, momentum=0.5, nesterov=False)
    steps(optimizer)
    copied = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    steps(optimizer, copied)
    theirs = copied.param_groups[0]["params"]
    assert all(got is not want and torch.equal(got, want) for got, want in zip(theirs, mine, strict=True))
    assert copied.matrices == {theirs[0]}
