"""The experiments of `megatron-lowprec lab` against closed forms, an exact variance and figures measured before."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowprec.commands import lab as numerics
from megatron_lowprec.formats import ELEMENT_FORMATS
from megatron_lowprec.kernels.gemm.fp8_accumulator import HOPPER, Fp8Accumulator
from megatron_lowprec.lab import (
    accumulator,
    accumulator_probe,
    clipping,
    dot_snr,
    gemm_variance,
    number_formats,
    scale_rounding,
    simfloat_study,
    unbiasedness,
)
from megatron_lowprec.lab.dot_products import (
    Accumulator,
    ScaledVectors,
    Scheme,
    correlated_vectors,
    dot,
    energy_snr,
    expected_snr,
    quantized_pair,
    sample_snr,
    snr_row,
)
from megatron_lowprec.lab.experiment import Lab, pivot
from megatron_lowprec.lab.fp4_schemes import FP4_SCHEMES
from megatron_lowprec.recipe.registry import MXFP4, MXFP4_SR, MXFP8
from megatron_lowprec.recipe.schema import HadamardSpec, QuantSpec

LAB = Lab(torch.device("cpu"), seed=1234)
ONE = torch.ones(1, 1)


def products(terms: list[float], accumulator: Accumulator | Fp8Accumulator) -> float:
    a = torch.tensor([terms])
    return float(dot(ScaledVectors(a, ONE), ScaledVectors(torch.ones_like(a), ONE), accumulator))


# ---- dot products
def test_an_accumulator_stalls_where_a_term_is_half_of_its_step() -> None:
    ones = [1.0] * 192
    assert products(ones, Accumulator(6)) == 64.0  # 64 + 1 is a tie, and goes to the even 64
    assert products(ones, Accumulator(6, promote=32)) == 192.0
    assert products(ones, Accumulator(9)) == 192.0


def test_rounding_of_a_running_sum() -> None:
    assert products([64.0, 1.5], Accumulator(7)) == 66.0
    assert products([64.0, 1.5], Accumulator()) == 65.5
    assert products([64.0, 1.5], Fp8Accumulator(fraction_bits=6)) == 65.0


def test_scales_of_blocks_multiply_their_partial_sums() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64).mul(4).round().float()
    of_a, of_b = torch.tensor([[2.0, 0.5]] * 3), torch.tensor([[1.0, 4.0]] * 3)
    want = (a * of_a.repeat_interleave(4, 1) * b * of_b.repeat_interleave(4, 1)).double().sum(1)
    for each in (Accumulator(), Accumulator(20, promote=2), Accumulator(20, promote=64), HOPPER):
        assert torch.equal(dot(ScaledVectors(a, of_a), ScaledVectors(b, of_b), each), want)


def test_expected_snr_is_that_of_many_products() -> None:
    """Under Algorithm 1, whose error is not independent of the entry."""
    count = 4096
    a, b = correlated_vectors(LAB, count, 64, 0.0, 1.0)
    pair = quantized_pair(LAB, Scheme(MXFP4), a, b)
    found = energy_snr((a.double() * b.double()).sum(1), dot(*pair))
    assert abs(expected_snr(pair, a, b) - found) < 4 * 10 / math.log(10) * math.sqrt(2 * 2 / count)


def test_snr_of_known_errors() -> None:
    signal, result = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([3.3, 4.0], dtype=torch.float64)
    assert energy_snr(signal, result) == pytest.approx(10 * math.log10(25 / 0.09))
    assert sample_snr(signal, result).tolist() == [pytest.approx(20.0), math.inf]
    assert snr_row(signal, signal * torch.tensor([3.0, 0.5]))["below"] == 0.5


def test_a_pivot_has_a_line_a_name_and_a_column_a_value() -> None:
    rows = [{"name": n, "length": k, "mix": m, "low": k + m} for m in (0, 1) for k in (2, 4) for n in "ab"]
    table = pivot(rows, "low", "title", {"mix": 1}, "length")
    assert (table.name, table.title) == ("low-mix-1", "title, mix 1, by length")
    assert table.rows == [{"name": "a", "2": 3, "4": 5}, {"name": "b", "2": 3, "4": 5}]
    assert [column.key for column in table.columns] == ["name", "2", "4"]


def test_vectors_have_their_correlation_and_spread() -> None:
    a, b = (x.double().flatten() for x in correlated_vectors(LAB, 64, 1024, 0.9, 0.01))
    deviation = a.numel() ** -0.5
    assert abs(float(a.std() / 0.01) - 1) < 4 * deviation
    assert abs(float((a * b).mean() / (a.std() * b.std())) - 0.9) < 4 * deviation


@pytest.mark.slow
def test_energy_snr_agrees_with_an_earlier_simulation() -> None:
    """Within four standard deviations of the ratio of two sums of squares, over as many products."""
    count = 192
    table = dot_snr.compare(LAB, count, 4096)
    allowed = 4 * 10 / math.log(10) * math.sqrt(2 * 2 / count)
    for row in table.rows:
        for correlation in dot_snr.CHECKED:
            assert abs(row[f"{correlation}"] - row[f"before-{correlation}"]) < allowed, (row["name"], correlation)


# ---- the study's arithmetic
def test_unscaled_products_underflow_in_e4m3_sums() -> None:
    """So the study's 0 dB at scale 1 are those of a result of zero."""
    found = dict(simfloat_study.cases(LAB, *simfloat_study.mixed_vectors(LAB, 8, 128, 0.0)))
    assert torch.count_nonzero(found["scale 1, sums in E4M3 [notebook]"]) == 0
    assert torch.count_nonzero(found["scale 1, exact sums"]) == 8


def test_a_power_of_two_scale_does_not_change_sums_of_significand_bits() -> None:
    found = dict(simfloat_study.cases(LAB, *simfloat_study.mixed_vectors(LAB, 8, 256, 0.1)))
    assert torch.equal(found["scale 64, sums of 9 bits to 512"], found["scale 64, sums of 9 bits"])
    assert not torch.equal(found["scale 64, sums of 9 bits to 128"], found["scale 64, sums of 9 bits"])


# ---- formats, scales, clipping
@pytest.mark.parametrize("fmt", ELEMENT_FORMATS.values(), ids=ELEMENT_FORMATS)
def test_relative_errors_of_a_grid(fmt: number_formats.Format) -> None:
    row = number_formats.grid_row(fmt, LAB)
    assert row["published"] == "yes"
    half = 2.0 ** -(fmt.mantissa_bits + 1)
    assert 0.99 * half / (1 + half) < row["worst"] <= half / (1 + half) * (1 + 1e-6)
    # log-uniform numbers of one binade, against the nearest of its grid points
    x = torch.exp2((torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16)
    grid = 1 + torch.arange(2**fmt.mantissa_bits + 1, dtype=torch.float64) * 2 * half
    rms = float(((x - grid[:, None]).abs().amin(0) / x).square().mean().sqrt())
    # the top binade of a format with a NaN or an odd largest number is not whole
    assert row["rms"] == pytest.approx(rms, rel=0.06)


@pytest.mark.parametrize(("spec", "share"), [(MXFP8, math.log2(2 / 1.75)), (MXFP4, math.log2(2 / 1.5))])
def test_share_of_blocks_that_the_floor_rule_saturates(spec: scale_rounding.QuantSpec, share: float) -> None:
    blocks = 4096
    operand = scale_rounding.operand_of(LAB, blocks)
    row = scale_rounding.tensor_row(operand, replace(spec, scale_rule="floor"))
    assert abs(row["blocks"] - share) < 4 * math.sqrt(share * (1 - share) / blocks)
    assert scale_rounding.tensor_row(operand, replace(spec, scale_rule="round_up"))["blocks"] == 0.0


def test_snr_falls_where_the_floor_rule_saturates() -> None:
    operand = scale_rounding.operand_of(LAB, 2048)
    positions, floor = scale_rounding.by_position(operand, replace(MXFP8, scale_rule="floor"))
    _, up = scale_rounding.by_position(operand, MXFP8)
    # below 1.75 times a power of two both rules give the same scale; well above it, floor cuts the largest entries
    half_bin = 0.5 / scale_rounding.BINS
    same = [at for at, position in enumerate(positions) if position + half_bin < math.log2(1.75)]
    cut = [at for at, position in enumerate(positions) if position > 0.93]
    assert same
    assert cut
    assert [floor[at] for at in same] == [up[at] for at in same]
    assert all(floor[at] < up[at] - 1 for at in cut)


def test_clipped_share_of_equal_magnitudes_is_that_of_the_scale() -> None:
    signs = torch.where(torch.arange(clipping.STEPS * 32).reshape(-1, 32) % 3 == 0, 1.0, -1.0)
    x = signs * torch.exp2((torch.arange(clipping.STEPS) + 0.5) / clipping.STEPS)[:, None]
    shares = {case: clipping.clipped(x, spec) for case, spec in clipping.CASES.items()}
    assert shares["MXFP4, floor"] == pytest.approx(math.log2(8 / 6), abs=1 / clipping.STEPS)
    assert shares["MXFP8, floor"] == pytest.approx(math.log2(512 / 448), abs=1 / clipping.STEPS)
    assert shares["MXFP4, floor, times 3/4"] == shares["MXFP4, round_up"] == 0.0


# ---- variance
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def exact_variance(x: torch.Tensor) -> torch.Tensor:
    """float64 variance of each entry of [N, K] under Algorithm 2, from the neighbours in the grid."""
    blocks = x.double().reshape(len(x), -1, 32)
    unit = 4 / 3 * 2.0 ** (blocks.abs().amax(2, keepdim=True).log2().floor() - 2)
    v = blocks.abs() / unit
    above = torch.searchsorted(GRID, v.clamp(max=6 - 1e-12), right=True)
    low, high = GRID[above - 1], GRID[above]
    return ((v - low) * (high - v) * unit.square()).reshape(x.shape)


def test_variance_of_a_product_is_that_of_independent_rounding_and_below_the_bound() -> None:
    pairs, draws = 16, 256
    a, b = (gemm_variance.with_outliers(LAB, name, pairs, 64, 0.1) for name in "ab")
    signal = (a.double() * b.double()).sum(1)
    errors = gemm_variance.product_draws(LAB, a, b, Scheme(MXFP4_SR), 1, draws) - signal
    of_a, of_b = exact_variance(a), exact_variance(b)
    exact = (of_a * of_b + of_a * b.double().square() + of_b * a.double().square()).sum(1)
    standardized = errors / exact.sqrt()
    assert abs(float(standardized.mean())) < 4 * (pairs * draws) ** -0.5
    # the fourth moment of a sum of 64 bounded terms is near that of a normal number
    assert abs(float(standardized.square().mean()) - 1) < 4 * math.sqrt(2.5 / (pairs * draws))
    assert bool((exact <= gemm_variance.bound(a, b, None)).all())


def test_the_transform_is_unbiased_and_lowers_the_variance_of_outliers_alone() -> None:
    found = {}
    for outliers in (0.0, 0.1):
        a, b = (gemm_variance.with_outliers(LAB, name, 32, 1024, outliers) for name in "ab")
        signal = (a.double() * b.double()).sum(1)
        for hadamard in (None, HadamardSpec(64)):
            errors = gemm_variance.product_draws(LAB, a, b, Scheme(MXFP4_SR, hadamard=hadamard), 4, 8) - signal
            found[outliers, hadamard is None] = float(errors.square().mean())
            assert abs(float(errors.mean() / errors.std())) < 4 * errors.numel() ** -0.5
    assert found[0.1, False] < 0.7 * found[0.1, True]
    assert found[0.0, False] == pytest.approx(found[0.0, True], rel=0.25)


def test_operands_do_not_share_rounding_noise() -> None:
    """A product of two equal operands is biased by the variance if they do."""
    a = gemm_variance.with_outliers(LAB, "a", 16, 64, 0.0)
    errors = gemm_variance.product_draws(LAB, a, a, Scheme(MXFP4_SR), 1, 256) - a.double().square().sum(1)
    assert abs(float(errors.mean() / errors.std())) < 4 * errors.numel() ** -0.5


# ---- accumulator
@pytest.mark.parametrize(
    ("found", "changes"),
    [
        (["13", "1 units", "1 units", "0 units", "2 x 2^-13", "0-223"], {}),
        (["13", "1 units", "1 units", "0 units", "2 x 2^-13", "128-223"], {"promote": 128}),
        (
            ["12", "1 units", "1 units", "-1 units", "2 x 2^-12", "0-255"],
            {"fraction_bits": 12, "group": 64, "dropping": "floor"},
        ),
        (
            ["13", "1 units", "2 units", "0 units", "2 x 2^-13", "194-207"],
            {"group": 16, "dropping": "nearest_even", "promote": 64},
        ),
    ],
)
def test_probes_find_the_parameters_of_an_accumulator(found: list[str], changes: dict[str, Any]) -> None:
    product = accumulator_probe.reference_product(Fp8Accumulator(**changes))
    assert list(accumulator_probe.findings(product).values()) == found


def test_the_search_finds_the_parameters_of_an_accumulator() -> None:
    native = {"fast": accumulator_probe.reference_product(Fp8Accumulator(dropping="floor", promote=128))}
    rows = list(accumulator.search_rows(LAB, native, length=512))
    # positive addends are cut alike by floor and truncation
    for kind, right in (("normal", {"floor"}), ("uniform", {"floor", "as above"})):
        best = [row for row in rows if row["operands"] == kind and row["fp32"] == 1.0]
        assert {(row["reference"], row["promote"]) for row in best} == {(name, "128") for name in right}
    (equal, *_) = accumulator.equal_rows(LAB, native, (512,))
    assert 0 < equal["fp32"] < 1.0
    assert equal["fp32"] < equal["bf16"]


def test_error_of_the_accumulator_grows_without_promotion() -> None:
    rows = list(accumulator.error_rows(LAB, (128, 1024)))
    found = {(row["operands"], row["accumulation"], row["length"]): row["snr"] for row in rows}
    for kind in ("normal", "uniform"):
        assert found[kind, "fast", 128] == found[kind, "promoted every 128", 128]
        assert found[kind, "fast", 1024] < found[kind, "promoted every 128", 1024] - 6 < found[kind, "fp32", 1024] - 50


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False])
def test_native_sums_of_small_integers_are_exact(fast: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randint(-3, 4, (32, 128), generator=generator).float() for _ in range(2))
    assert torch.equal(accumulator_probe.native_product(torch.device("cuda"), fast)(a, b), a @ b.t())


# ---- the command
def test_an_experiment_writes_json_text_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert numerics.main(["simfloat", "--out", str(tmp_path / "new"), "--quick"]) == 0
    assert capsys.readouterr().out.startswith("simfloat: ")
    found = json.loads((tmp_path / "new" / "simfloat.json").read_text(), parse_constant=pytest.fail)
    assert found["header"]["command"] == ("megatron-lowprec lab simfloat --out DIR --seed 1234 --device cpu --quick")
    table = found["tables"]["below-mix-0.0"]
    assert [column["key"] for column in table["columns"]] == ["name", "128"]
    (unscaled,) = [row for row in table["rows"] if row["name"].startswith("scale 1, exact")]
    assert 0 <= unscaled["128"] < 1
    assert len(found["rows"]) > 30
    assert "scale 64, sums in E4M3 [notebook]" in (tmp_path / "new" / "simfloat.txt").read_text()
    assert (tmp_path / "new" / "simfloat.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_all_experiments_run(tmp_path: Path) -> None:
    assert numerics.main(["all", "--out", str(tmp_path), "--quick"]) == 0
    for suffix, without in (("json", set()), ("txt", set()), ("png", {"unbiasedness"})):
        assert {path.stem for path in tmp_path.glob(f"*.{suffix}")} >= set(numerics.EXPERIMENTS) - without
    assert (tmp_path / "dot-snr-histograms.png").is_file()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert numerics.main(["formats", "--out", str(tmp_path / "file" / "x"), "--quick"]) == 2
    assert f"--out {tmp_path / 'file' / 'x'}: " in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert numerics.main(["formats", "--out", str(tmp_path), "--device", "cuda"]) == 2
    assert "torch sees no GPU; leave it out to run on the CPU" in capsys.readouterr().err


# ---- FP4 of recipes
def operand_of(name: str) -> tuple[QuantSpec, HadamardSpec | None]:
    """A format of the laboratory, or the first operand of a recipe that has it."""
    scheme = FP4_SCHEMES.get(name)
    if scheme is None:
        return unbiasedness.operands()[name]
    assert scheme.spec is not None
    return scheme.spec, scheme.hadamard


@pytest.mark.parametrize(
    "name", ["mxfp4_sr.dgrad.grad_output", "mxfp4_rht_sr.dgrad.grad_output", "UFP4, SR", "TetraJet, SR"]
)
def test_quantizers_without_saturation_are_unbiased(name: str) -> None:
    found = unbiasedness.measure(LAB, *operand_of(name), seeds=8, draws=8)
    # of 8 seeds: Student's t of 7 degrees of freedom exceeds 5.4 in 1 of 1000 cases
    assert abs(found["z"]) < 5.4
    assert abs(found["shared_z"]) < 5.4


@pytest.mark.parametrize(
    ("name", "slope"), [("NVFP4, SR", 0.9968), ("four over six, SR", 0.9966), ("UE5M3, SR", 0.9968)]
)
def test_a_scale_that_is_rounded_down_saturates_and_biases(name: str, slope: float) -> None:
    found = unbiasedness.measure(LAB, *operand_of(name), seeds=8, draws=8)
    assert found["z"] < -5.4
    # the slope on the page has a standard error of 0.0002, this one of no more
    assert found["slope"] == pytest.approx(slope, abs=0.001)


def test_the_scales_correction_takes_most_of_the_gain_error() -> None:
    """MS-EDEN beside the same format without its correction; draws of the transform are part of the mean."""
    spec, hadamard = operand_of("MS-EDEN")
    plain = replace(spec, correction=None, scale=replace(spec.scale, rounding="nearest_even"))
    with_it, without = (unbiasedness.measure(LAB, each, hadamard, 4, 8)["slope"] - 1 for each in (spec, plain))
    assert abs(with_it) < 0.002 < abs(without)


def test_formats_of_recipes_have_their_bits_and_order() -> None:
    rows = {row["name"]: row for row in number_formats.block_table(LAB, 64).rows}
    assert set(FP4_SCHEMES) < set(rows)
    bits = {"NVFP4": 4.5, "NVFP4, 16x16": 4 + 8 / 256, "UFP4": 6.0, "TetraJet": 4.25, "TetraJet-v2's scales": 4.75}
    assert {name: rows[name]["bits"] for name in bits} == bits
    snr = {name: row["snr"] for name, row in rows.items()}
    # 0.05 dB is 8 standard deviations of 64 vectors of 4096 entries, whose data are common
    assert snr["four over six"] > snr["NVFP4"] + 0.5 > snr["NVFP4, 16x16"] + 1.5
    assert snr["TetraJet"] == pytest.approx(snr["MXFP4, round_up"], abs=1e-9)
    assert snr["MS-EDEN"] > snr["NVFP4, SR"] + 2.0


def test_products_of_blocks_that_span_vectors() -> None:
    a, b = (torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    pair = quantized_pair(LAB, FP4_SCHEMES["NVFP4, 16x16"], a, b)
    assert [each.scale.shape for each in pair] == [(32, 4)] * 2
    assert torch.equal(pair[0].scale[0], pair[0].scale[15])
    want = (pair[0].values().double() * pair[1].values().double()).sum(1)
    # values are rounded to fp32: 64 terms of at most 25
    assert torch.allclose(dot(*pair), want, rtol=0, atol=64 * 25 * 2.0**-23)
