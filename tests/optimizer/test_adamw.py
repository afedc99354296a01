"""Adam on narrow formats: against torch's in fp32, against float64, and a state that survives being moved."""

import math
from typing import Any

import pytest
import torch

from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.kernels.scaled_adam import reference
from megatron_lowprec.kernels.scaled_adam.reference import Stream, encode_scale
from megatron_lowprec.optimizer.adamw import Place, ScaledAdamW
from megatron_lowprec.recipe.recipe import OptimizerSpec
from megatron_lowprec.recipe.registry import get_recipe

FP8_LM = get_recipe("fp8_lm").optimizer
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) * 0.02 for shape in ((64, 48), (37,), (1,), (5, 130))]


def adam(groups: list[dict[str, Any]], spec: OptimizerSpec, reduce: Any = lambda amax: amax) -> ScaledAdamW:
    params = [param for group in groups for param in group["params"]]
    places = {param: Place(row) for row, param in enumerate(params)}
    return ScaledAdamW(groups, dict(OPTIONS), spec, places, torch.zeros(len(params), 3), reduce)


def optimizer(params: list[torch.Tensor], spec: OptimizerSpec) -> ScaledAdamW:
    halves = params[:2], params[2:]
    return adam([{**OPTIONS, "params": halves[0]}, {**OPTIONS, "weight_decay": 0.0, "params": halves[1]}], spec)


def give_gradients(params: list[torch.Tensor], seed: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.decoupled_grad = torch.randn(param.shape, generator=generator) * factor  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_scales_of_no_ordinary_amax(dtype: torch.dtype) -> None:
    # Of ordinary ones: the golden case scale_msamp.
    amax = torch.tensor([0.0, math.inf, math.nan, 1e-45, torch.finfo(torch.float32).max])
    found = encode_scale(amax, dtype)
    assert found[:4].tolist() == [1.0, 1.0, 1.0, 2.0**127]
    assert 0 < float(found[4] * amax[4]) <= torch.finfo(dtype).max
    assert encode_scale(amax, torch.float32).tolist() == [1.0] * 5


def test_in_fp32_it_is_torch_s_adamw() -> None:
    ours, theirs = weights(), [torch.nn.Parameter(w) for w in weights()]
    mine = optimizer(ours, OptimizerSpec())
    halves = [{"params": theirs[:2]}, {"params": theirs[2:], "weight_decay": 0.0}]
    other = torch.optim.AdamW(halves, **OPTIONS)
    for step in range(20):
        give_gradients(ours, step)
        for a, b in zip(ours, theirs, strict=True):
            b.grad = a.decoupled_grad.clone()  # type: ignore[attr-defined]
        mine.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=2e-6, atol=1e-8)
        torch.testing.assert_close(mine.state[a]["exp_avg"], other.state[b]["exp_avg"], rtol=1e-5, atol=1e-7)


def test_a_step_is_fp32_s_on_the_decoded_state_and_rounded_once() -> None:
    params = weights(1)
    mine = optimizer(params, FP8_LM)
    for step in range(5):
        give_gradients(params, step)
        before = {
            p: {n: mine.get_unscaled_state(p, n).double() for n in ("exp_avg", "exp_avg_sq", "master_param")}
            for p in params
        }
        mine.step()
        for group in mine.param_groups:
            for p in group["params"]:
                g, old = p.decoupled_grad.double(), before[p]
                m = 0.9 * old["exp_avg"] + 0.1 * g
                v = 0.95 * old["exp_avg_sq"] + 0.05 * g * g
                t = step + 1
                denominator = (v / (1 - 0.95**t)).sqrt() + 1e-8
                w = old["master_param"] * (1 - 1e-2 * group["weight_decay"]) - 1e-2 * m / (1 - 0.9**t) / denominator
                for name, exact, bits in (("exp_avg", m, 3), ("exp_avg_sq", v, 10), ("master_param", w, 10)):
                    found = mine.get_unscaled_state(p, name).double()
                    dtype = mine.state[p][name].dtype
                    # half a step of the format at each value, and the smallest step of the tensor
                    smallest = (
                        exact.abs().max() / torch.finfo(dtype).max * 2 * torch.finfo(dtype).smallest_normal * 2.0**-bits
                    )
                    bound = exact.abs() * 2.0 ** -(bits + 1) * 1.001 + smallest
                    assert bool(((found - exact).abs() <= bound).all()), name
                assert torch.equal(p, mine.get_unscaled_state(p, "master_param"))
                assert mine.state[p]["exp_avg"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("value", [1.001, 3.1e-39, 3.38e38, 0.0])
def test_bf16_is_rounded_stochastically_without_bias(value: float, sign: float) -> None:
    """Over all 2^16 draws the mean is the value, subnormal or not; results are its neighbours in bf16."""
    values = torch.full((1 << 16,), sign * value)
    rounded = reference._stochastic_bf16(values, torch.arange(1 << 16))
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert float(rounded.double().mean()) == float(values[0].double())
    assert len(rounded.unique()) == (2 if value else 1)


def test_bf16_rounding_keeps_what_it_cannot_round() -> None:
    values = torch.tensor([math.nan, 3.4e38, -math.inf])
    found = reference._stochastic_bf16(values, torch.full((3,), 65535))
    largest = torch.finfo(torch.bfloat16).max
    assert found[0].isnan()
    assert found[1:].tolist() == [largest, -largest]


def test_bf16_moments_leave_the_main_weight_exact() -> None:
    """DeepSeek-V3's choice, with ``nearest_even``: torch's AdamW up to the rounding of its moments."""
    ours, theirs = weights(), [torch.nn.Parameter(w) for w in weights()]
    mine = optimizer(ours, OptimizerSpec(exp_avg="bf16", exp_avg_sq="bf16"))
    other = torch.optim.AdamW([{"params": theirs[:2]}, {"params": theirs[2:], "weight_decay": 0.0}], **OPTIONS)
    for step in range(10):
        give_gradients(ours, step)
        for a, b in zip(ours, theirs, strict=True):
            b.grad = a.decoupled_grad.clone()  # type: ignore[attr-defined]
        mine.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        state = mine.state[a]
        assert [state[n].dtype for n in ("exp_avg", "exp_avg_sq", "master_param")] == [torch.bfloat16] * 2 + [
            torch.float32
        ]
        assert state["decode_scale"].tolist() == [1.0] * 3
        assert torch.equal(a, state["master_param"])
        moment = other.state[b]["exp_avg"]
        # ten roundings of at most 2^-8 each, of which later ones weigh most
        assert (state["exp_avg"].float() - moment).norm() < 2.0**-8 * moment.norm()
        assert (a - b.detach()).norm() < 1e-2 * (b.detach() - weights()[[p is a for p in ours].index(True)]).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_use_the_whole_range_whatever_the_size(dtype: torch.dtype) -> None:
    params = weights(2, dtype)
    mine = optimizer(params, FP8_LM)
    give_gradients(params, 0, 1e-9)
    mine.step()
    for p in params:
        for name in ("exp_avg", "exp_avg_sq", "master_param"):
            codes = mine.state[p][name].float().abs()
            assert (
                torch.finfo(mine.state[p][name].dtype).max / 2.2
                < codes.max()
                <= torch.finfo(mine.state[p][name].dtype).max
            )
        assert torch.equal(p, mine.get_unscaled_state(p, "master_param").to(dtype))


def test_a_tensor_in_two_parts_is_the_tensor() -> None:
    """The parts share a scale, so that codes and values do not depend on where a tensor is cut."""
    whole, cut = [weights(3)[0]], weights(3)[0]
    first, second = [cut.view(-1)[:1000].clone()], [cut.view(-1)[1000:].clone()]
    seen: list[torch.Tensor] = []

    def shared(amax: torch.Tensor) -> torch.Tensor:
        return seen.pop(0)

    one = adam([{**OPTIONS, "params": whole}], FP8_LM)
    parts = [adam([{**OPTIONS, "params": part}], FP8_LM, shared) for part in (first, second)]
    for step in range(4):
        give_gradients(whole, step)
        grad = whole[0].decoupled_grad.view(-1)  # type: ignore[attr-defined]
        first[0].decoupled_grad, second[0].decoupled_grad = grad[:1000], grad[1000:]  # type: ignore[attr-defined]
        found: list[torch.Tensor] = []
        one._reduce_amax = lambda amax, found=found: found.append(amax.clone()) or amax  # type: ignore[func-returns-value]
        one.step()
        for part in parts:
            seen.append(found[0])
            part.step()
        assert torch.equal(torch.cat([first[0], second[0]]), whole[0].view(-1))
        for name in ("exp_avg", "exp_avg_sq", "master_param"):
            codes = torch.cat([part.state[p[0]][name].view(-1) for part, p in zip(parts, (first, second), strict=True)])
            assert torch.equal(codes.view(torch.uint8), one.state[whole[0]][name].view(-1).view(torch.uint8))


def test_a_decoded_state_comes_back_to_the_bit() -> None:
    params, others = weights(4), weights(4)
    mine, other = optimizer(params, FP8_LM), optimizer(others, FP8_LM)
    for step in range(6):
        give_gradients(params, step)
        mine.step()
    other.load_state_dict(mine.state_dict())
    for p, q in zip(params, others, strict=True):
        q.copy_(p)
        for name in ("exp_avg", "exp_avg_sq", "master_param"):
            other.set_scaled_state(q, name, mine.get_unscaled_state(p, name))
            assert torch.equal(other.get_unscaled_state(q, name), mine.get_unscaled_state(p, name))
    for step in range(6, 9):
        give_gradients(params, step)
        give_gradients(others, step)
        mine.step()
        other.step()
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
        assert int(other.state[q]["step"]) == 9


def test_a_weight_without_a_gradient_stays() -> None:
    params = weights(5)
    mine = optimizer(params, FP8_LM)
    give_gradients(params, 0)
    del params[1].decoupled_grad
    before = params[1].clone()
    mine.step()
    assert torch.equal(params[1], before)
    assert not torch.equal(params[0], weights(5)[0])


KEY = (0x12345678, 0x9ABCDEF0)
CUTS = {  # how ranks hold [24, 48]: (rows, columns) of a part, and its stream
    "flat": ((slice(0, 24), slice(0, 48)), Stream(KEY, columns=24 * 48)),
    "rows": ((slice(8, 16), slice(0, 48)), Stream(KEY, columns=48, whole_columns=48, rows=ShardSlice(8))),
    "columns": ((slice(0, 24), slice(24, 48)), Stream(KEY, columns=24, whole_columns=48, first_column=24)),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("first", [0, 13, 64])
def test_a_part_takes_the_draws_of_its_entries(cut: str, first: int) -> None:
    whole = Stream(KEY, columns=24 * 48).draw(24 * 48, 7, 2, torch.device("cpu")).view(24, 48)
    place, stream = CUTS[cut]
    expected = whole[place].flatten()[first:]
    assert torch.equal(stream._replace(first=first).draw(len(expected), 7, 2, torch.device("cpu")), expected)


def test_a_gated_part_takes_the_draws_of_its_two_halves() -> None:
    whole = Stream(KEY, columns=24 * 48).draw(24 * 48, 7, 2, torch.device("cpu")).view(24, 48)
    stream = Stream(KEY, columns=48, whole_columns=48, rows=ShardSlice(6, gate_offset=6, gate_stride=6))  # rank 1 of 2
    assert torch.equal(
        stream.draw(12 * 48, 7, 2, torch.device("cpu")).view(12, 48), whole[[*range(6, 12), *range(18, 24)]]
    )


def test_draws_differ_by_step_part_and_key() -> None:
    stream = Stream(KEY, columns=4096)
    first, *others = (
        stream.draw(4096, 7, 2, torch.device("cpu")),
        stream.draw(4096, 8, 2, torch.device("cpu")),
        stream.draw(4096, 7, 1, torch.device("cpu")),
        stream._replace(key=(1, 2)).draw(4096, 7, 2, torch.device("cpu")),
    )
    for other in others:
        assert int((first == other).sum()) < 8
    assert 0 <= int(first.min()) < 64
    assert (1 << 16) - 64 < int(first.max()) < 1 << 16


@pytest.mark.parametrize("rounding", ["stochastic", "nearest_even"])
def test_a_second_moment_below_its_format_does_not_become_zero(rounding: str) -> None:
    """Else eps alone would divide a first moment that E4M3 still holds, and the step would be 1/eps too long."""
    weight = torch.zeros(256)
    spec = OptimizerSpec("e4m3", "e4m3", "fp32", rounding=rounding)  # type: ignore[arg-type]
    stream = Stream(KEY, columns=256) if rounding == "stochastic" else None
    options = {**OPTIONS, "weight_decay": 0.0, "params": [weight]}
    mine = ScaledAdamW(
        [options], dict(OPTIONS), spec, {weight: Place(0, stream=stream)}, torch.zeros(1, 3), lambda a: a
    )
    gradient = torch.full((256,), 1e3)
    gradient[1:] = 1.0  # its square is a millionth of the largest: E4M3 has 2^-18 of it
    for _ in range(3):
        weight.decoupled_grad = gradient  # type: ignore[attr-defined]
        mine.step()
    assert float(mine.get_unscaled_state(weight, "exp_avg_sq").min()) > 0
    assert float(weight.abs().max()) < 3 * 3 * OPTIONS["lr"]
    loaded = gradient.square()
    loaded[-1] = 0
    mine.set_scaled_state(weight, "exp_avg_sq", loaded)
    got = mine.get_unscaled_state(weight, "exp_avg_sq")
    assert float(got[:-1].min()) > 0
    assert float(got[-1]) == 0
