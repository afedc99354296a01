"""Gradients summed in FP8 by three processes, against the sum that the definition gives for all of them at once; and
the error of the mean at up to 128 ranks, simulated in one process.

``python -m tests.comm.test_gradients`` prints the figures that docs/recipes/fp8_lm.md quotes.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lowprec.comm.gradient_codes import GradientCodes
from megatron_lowprec.comm.gradients import Bounds, GradientFactor, GradientSum, rounded_sum_warnings
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.multi_tensor_cast.reference import fp8_codes
from megatron_lowprec.kernels.quantize.reference import fp32_encode_scale, round_to_format
from megatron_lowprec.recipe.recipe import GradientSpec
from megatron_lowprec.recipe.registry import get_recipe
from tests.launch import forks
from tests.waiting import PATIENCE

RANKS = 3
# Odd sizes with gaps between them, tensors across the ends of the ranks' parts, one entry alone.
TENSORS: list[Bounds] = [(0, 37), (64, 65), (128, 460), (512, 891)]
SIZE = 900
SPECS = {
    "e4m3": GradientSpec("e4m3", "fp32"),
    "e5m2": GradientSpec("e5m2", "fp32"),
    "sums": GradientSpec("e4m3", "format", mu="automatic"),
}
STORED = {"stored": SPECS["e4m3"], "stored sums": SPECS["sums"]}
FIRST_MU = 1.75  # the largest codes saturate, those of later steps under 1/2 do not
SIZES = [1.0, 1e-6, 3e3, 0.0]


def gradients(rank: int, step: int, common: float = 0.0) -> torch.Tensor:
    """[SIZE] of one rank; ``common`` is the share that all ranks have alike."""
    flat = torch.zeros(SIZE)
    alike, own = torch.Generator().manual_seed(step), torch.Generator().manual_seed(1000 * step + rank + 1)
    for (start, end), size in zip(TENSORS, SIZES, strict=True):
        noise = torch.randn(end - start, generator=own) * torch.exp2(3 * torch.randn(end - start, generator=own))
        flat[start:end] = size * (common * torch.randn(end - start, generator=alike) + (1 - common) * noise)
    return flat


def stored(rank: int, flat: torch.Tensor, spec: GradientSpec, group: Any, left_out: int | None = None) -> torch.Tensor:
    """[SIZE // RANKS] of the mean, by gradients that are stored in FP8 before and after the exchange.

    In the last step tensor ``left_out`` has no gradient.
    """
    reduction = GradientSum(spec, GradientFactor(torch.device("cpu"), automatic=True))
    codes, part = GradientCodes(SIZE, TENSORS, reduction, torch.device("cpu")), SIZE // RANKS
    for step in range(2):  # nothing of a step is left in the next one
        codes.reset()
        for index, (start, end) in enumerate(TENSORS):
            if step == 0 or index != left_out:
                codes.cast(index, flat[start:end])
        codes.reduce(0.5 / RANKS, group)
        codes.scale_(2.0)
    own = torch.zeros(part)
    for index, (start, end) in enumerate(TENSORS):
        first, last = max(start, rank * part), min(end, (rank + 1) * part)
        if first < last:
            own[first - rank * part : last - rank * part] = codes.part(index, first - start, last - start)
    return own


def worker(rank: int, store: str, answers: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    group, found = dist.group.WORLD, {}
    alone = [dist.new_group([r]) for r in range(RANKS)][rank]
    part = SIZE // RANKS

    def fresh() -> GradientFactor:
        return GradientFactor(torch.device("cpu"), automatic=True)

    def reduced(name: str, flat: torch.Tensor, spec: GradientSpec, mu: GradientFactor, **more: Any) -> None:
        GradientSum(spec, mu).reduce_scatter_(flat, TENSORS, 1 / RANKS, group, **more)
        found[name] = flat[rank * part :][:part].float().numpy()

    for name, spec in SPECS.items():
        for dtype in (torch.float32, torch.bfloat16):
            reduced(f"{name} {dtype}", gradients(rank, 1).bfloat16().to(dtype), spec, fresh())
    reduced("sharers", gradients(rank, 1), SPECS["e4m3"], fresh(), sharers=[alone])
    broken = gradients(rank, 1)
    broken[130] = math.nan if rank == 1 else 1.0
    broken[64] = math.inf if rank == 2 else 1.0
    reduced("broken", broken.clone(), SPECS["e4m3"], fresh())
    for name, spec in STORED.items():
        for values, kind in ((gradients(rank, 1), name), (broken, f"{name}, broken")):
            found[kind] = stored(rank, values, spec, group).numpy()
        found[f"{name}, one left out"] = stored(rank, gradients(rank, 1), spec, group, left_out=2).numpy()
    mu, history = fresh(), []
    mu.mu.fill_(FIRST_MU)
    for step in range(6):
        reduced(f"step {step}", gradients(rank, step, 1.0 if step < 3 else 0.0), SPECS["sums"], mu)
        history.append(float(mu.mu))
        mu.end_step()
    found["mu"] = history
    answers.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the ranks hold afterwards, their parts joined; ``mu`` of each rank."""
    context = forks()
    answers, store = context.Queue(), tmp_path_factory.mktemp("gradients") / "store"
    processes = [context.Process(target=worker, args=(rank, str(store), answers)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    by_rank = dict(answers.get(timeout=PATIENCE) for _ in processes)
    for process in processes:
        process.join(timeout=PATIENCE)
        assert process.exitcode == 0
    joined = {
        name: torch.cat([torch.from_numpy(by_rank[rank][name]) for rank in range(RANKS)])
        for name in by_rank[0]
        if name != "mu"
    }
    return {**joined, "mu": [by_rank[rank]["mu"] for rank in range(RANKS)]}


def by_definition(
    ranks: list[torch.Tensor], spec: GradientSpec, mu: float = 1.0, requantized: bool = False
) -> tuple[torch.Tensor, int]:
    """The mean over the ranks as float64, and how many codes have saturated; ``requantized`` if each rank has first
    cast its gradient by a scale of its own.
    """
    fmt, out, saturated = FORMATS[spec.format], torch.zeros(SIZE, dtype=torch.float64), 0
    for start, end in TENSORS:
        amax = max(float(flat[start:end].abs().max()) for flat in ranks)
        scale = 2.0 ** math.floor(math.log2(fmt.max / amax)) if amax else 1.0
        scaled = [flat[start:end] * torch.tensor(scale * mu, dtype=torch.float32) for flat in ranks]
        if requantized:
            own = [
                2.0 ** math.floor(math.log2(fmt.max / a)) if (a := float(f[start:end].abs().max())) else 1.0
                for f in ranks
            ]
            first = [round_to_format(f[start:end] * s, fmt, "nearest_even") for f, s in zip(ranks, own, strict=True)]
            scaled = [values * (scale / s) for values, s in zip(first, own, strict=True)]
        codes = [round_to_format(values, fmt, "nearest_even") for values in scaled]
        saturated += sum(int((code.abs() == fmt.max).sum()) for code in codes)
        total = codes[0].double()
        for more in codes[1:]:
            total = total + more.double()
            if spec.sum == "format":
                total = round_to_format(total.float(), fmt, "nearest_even").double()
        out[start:end] = total / (scale * mu) / RANKS
    return out, saturated


def inside() -> torch.Tensor:
    mask = torch.zeros(SIZE, dtype=torch.bool)
    for start, end in TENSORS:
        mask[start:end] = True
    return mask


@pytest.mark.parametrize("name", STORED)
def test_a_tensor_without_a_gradient_has_none_of_the_step_before(found: dict[str, Any], name: str) -> None:
    start, end = TENSORS[2]
    expected = found[name].clone()
    assert expected[start:end].count_nonzero() > 0
    expected[start:end] = 0
    assert torch.equal(found[f"{name}, one left out"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_mean_of_what_was_cast(found: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    ranks = [gradients(rank, 1).bfloat16().float() for rank in range(RANKS)]
    expected, _ = by_definition(ranks, SPECS[name])
    # Sums of FP8 values are exact in fp32; times 1/3 and, in bf16, one rounding more.
    tolerance = 2.0**-22 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(found[f"{name} {dtype}"].double(), expected, rtol=tolerance, atol=0)
    assert torch.equal(found[f"{name} {dtype}"][~inside()], torch.zeros(int((~inside()).sum())))


@pytest.mark.slow
def test_it_is_near_the_mean(found: dict[str, Any]) -> None:
    exact = sum(gradients(rank, 1).double() for rank in range(RANKS)) / RANKS
    for name, most in (("e4m3 torch.float32", 0.04), ("e5m2 torch.float32", 0.08)):  # "sums" may saturate
        for (start, end), size in zip(TENSORS, SIZES, strict=True):
            error = (found[name][start:end] - exact[start:end]).norm() / max(float(exact[start:end].norm()), 1e-30)
            assert 0 < error < most if size else error == 0, name


@pytest.mark.slow
def test_ranks_that_share_a_scale_may_be_few(found: dict[str, Any]) -> None:
    ranks = [gradients(rank, 1) for rank in range(RANKS)]
    torch.testing.assert_close(found["sharers"].double(), by_definition(ranks, SPECS["e4m3"])[0], rtol=2.0**-22, atol=0)


@pytest.mark.slow
def test_non_finite_values_of_one_rank_reach_all(found: dict[str, Any]) -> None:
    broken = found["broken"]
    assert broken[128:460].isnan().all()
    assert broken[64:65].isnan().all()
    assert broken[:37].isfinite().all()
    assert broken[512:891].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", STORED)
def test_stored_codes_are_requantized_by_the_least_scale(found: dict[str, Any], name: str) -> None:
    ranks = [gradients(rank, 1) for rank in range(RANKS)]
    expected, _ = by_definition(ranks, STORED[name], requantized=True)
    torch.testing.assert_close(found[name].double(), expected, rtol=2.0**-21, atol=0)
    broken = found[f"{name}, broken"]
    assert broken[128:460].isnan().all()
    assert broken[64:65].isnan().all()
    assert torch.equal(broken[:37], found[name][:37])


@pytest.mark.slow
def test_mu_follows_how_many_codes_saturate(found: dict[str, Any]) -> None:
    mu, entries = FIRST_MU, RANKS * sum(end - start for start, end in TENSORS)
    for step in range(6):
        ranks = [gradients(rank, step, 1.0 if step < 3 else 0.0) for rank in range(RANKS)]
        assert [history[step] for history in found["mu"]] == [pytest.approx(mu, rel=1e-6)] * RANKS
        expected, saturated = by_definition(ranks, SPECS["sums"], found["mu"][0][step])
        torch.testing.assert_close(found[f"step {step}"].double(), expected, rtol=2.0**-21, atol=0)
        mu = 0.5 if saturated > 1e-5 * entries else min(2.0, mu * 4 ** (1 / 1000))
    assert 0.5 in found["mu"][0]
    assert any(after > before for before, after in zip(found["mu"][0], found["mu"][0][1:]))


def test_mu_rises_from_one_half_to_two_in_a_thousand_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    factor = GradientFactor(torch.device("cpu"), automatic=True)
    factor.count(torch.tensor(2), 100_000)
    factor.end_step()
    assert float(factor.mu) == 0.5
    assert float(factor.saturated) == 2e-5
    factor.count(torch.tensor(1), 100_000)  # exactly 0.001%
    factor.end_step()
    for _ in range(998):
        factor.end_step()
    assert float(factor.mu) == pytest.approx(2.0, rel=2e-3)
    assert float(factor.mu) < 2.0
    factor.end_step()
    factor.end_step()
    assert float(factor.mu) == 2.0


def test_a_tensor_without_a_gradient_is_empty_in_a_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    alone: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    factor = GradientFactor(torch.device("cpu"), automatic=False)
    codes = GradientCodes(8, [(0, 3), (4, 8)], GradientSum(SPECS["e4m3"], factor), torch.device("cpu"))
    for indices in ([0, 1], [1]):
        codes.reset()
        for index in indices:
            start, end = codes.tensors[index]
            codes.cast(index, torch.full((end - start,), 448.0))
        codes.reduce(1.0, alone)
        assert codes.part(1, 0, 4).tolist() == [448.0] * 4
        assert codes.part(0, 0, 3).tolist() == [448.0 if 0 in indices else 0.0] * 3
        factor.end_step()
        assert float(factor.saturated) == (7 if 0 in indices else 4) / 7


MANY = (2, 8, 32, 128)
TAILS = {"normal": 0.0, "heavy": 2.0}  # standard deviation of the exponent of an entry's size
SEEDS = (0, 1, 2)


def mean_of_many(spec: GradientSpec, ranks: int, tail: float, seed: int) -> tuple[float, float]:
    """Relative error of the mean that ``ranks`` ranks get, and the recovered fraction of the true one,
    <mean, true> / <true, true>. A rank's gradient is a common part of size 0.3 and noise of its own of size 1.
    """
    generator, entries = torch.Generator().manual_seed(seed), 4096
    common = 0.3 * torch.randn(entries, generator=generator)
    size = torch.exp2(tail * torch.randn(entries, generator=generator))
    flats = [size * (common + torch.randn(entries, generator=generator)) for _ in range(ranks)]
    amax = torch.stack([flat.abs().max() for flat in flats]).max().view(1)
    reduction = GradientSum(spec, GradientFactor(torch.device("cpu"), automatic=False))
    scale = fp32_encode_scale(amax, FORMATS[spec.format], "amax_pow2")
    codes = torch.stack([fp8_codes(flat, scale, FORMATS[spec.format]) for flat in flats])
    total = torch.empty(entries)
    reduction.sum_codes_(codes, [(0, entries)], torch.ones(1), total)
    mean = total.double() / scale.double() / ranks
    true = torch.stack(flats).double().mean(0)
    return float((mean - true).norm() / true.norm()), float((mean @ true) / (true @ true))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("ranks", MANY)
def test_the_default_sum_keeps_the_mean_at_any_number_of_ranks(ranks: int, tail: str) -> None:
    spec = get_recipe("fp8_lm").gradients
    for seed in SEEDS:
        error, recovered = mean_of_many(spec, ranks, TAILS[tail], seed)
        # one rounding to E4M3 an addend, a relative 2^-4 at most, independent between ranks
        assert error < 0.04
        assert recovered == pytest.approx(1.0, abs=0.01)


def test_rounded_sums_lose_the_mean_as_ranks_grow() -> None:
    """Why they are an option only, with a warning above 8 ranks."""
    recovered = [mean_of_many(GradientSpec("e4m3", "format"), ranks, 0.0, 0)[1] for ranks in MANY]
    assert recovered == sorted(recovered, reverse=True)
    assert recovered[0] > 0.98
    assert recovered[2] < 0.6


def test_rounded_sums_are_warned_of_above_8_ranks() -> None:
    rounded, exact = GradientSpec("e4m3", "format"), GradientSpec("e4m3", "fp32")
    assert rounded_sum_warnings(rounded, 8) == rounded_sum_warnings(exact, 128) == []
    (warning,) = rounded_sum_warnings(rounded, 9)
    assert "9 data-parallel ranks" in warning
    assert "gradients.sum=fp32" in warning


if __name__ == "__main__":
    for label, deviation in TAILS.items():
        for way in ("fp32", "format"):
            for number in MANY:
                found = [mean_of_many(GradientSpec("e4m3", way), number, deviation, seed) for seed in range(8)]  # type: ignore[arg-type]
                errors, fractions = (torch.tensor(values) for values in zip(*found))
                print(
                    f"{label}, sum {way}, {number} ranks: relative error {errors.mean():.3f} (std {errors.std():.3f}), "
                    f"recovered {fractions.mean():.3f} (std {fractions.std():.3f})"
                )
