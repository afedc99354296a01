"""Quantiles against printed tables, the estimates against other ways to the same numbers."""

import itertools
import math
import statistics

import numpy as np
import pytest

from megatron_lowprec.report.statistics import BLOCKS, INDEPENDENT, NONE, PRIOR, Fit, t_quantile

# Two-sided 95% and 99%, and one-sided 90%, of any printed table of Student's t.
TABLE = {1: (12.706, 63.657, 3.078), 2: (4.303, 9.925, 1.886), 3: (3.182, 5.841, 1.638), 4: (2.776, 4.604, 1.533)}
TABLE |= {7: (2.365, 3.499, 1.415), 10: (2.228, 3.169, 1.372), 30: (2.042, 2.750, 1.310), 120: (1.980, 2.617, 1.289)}
TABLE |= {math.inf: (1.960, 2.576, 1.282)}


@pytest.mark.parametrize("dof", TABLE)
def test_quantiles_are_the_printed_ones(dof: float) -> None:
    found = [t_quantile(probability, dof) for probability in (0.975, 0.995, 0.9)]
    assert found == pytest.approx(TABLE[dof], abs=6e-4)


def results(**losses: list[float]) -> dict[tuple[str, int], float]:
    return {(label, seed): loss for label, values in losses.items() for seed, loss in enumerate(values)}


def test_unshared_seeds_pool_their_variances() -> None:
    a, b = [3.70, 3.72, 3.71], [3.80, 3.86]
    losses = {("a", seed): loss for seed, loss in enumerate(a)} | {("b", 10 + s): loss for s, loss in enumerate(b)}
    fit = Fit(losses, 0.95)
    pooled = math.sqrt((2 * statistics.variance(a) + 1 * statistics.variance(b)) / 3)
    assert (fit.method, fit.dof) == (INDEPENDENT, 3)
    assert fit.sigma == pytest.approx(pooled)
    found = fit.difference("b", "a")
    assert found.value == pytest.approx(3.83 - 3.71)
    assert found.error == pytest.approx(pooled * math.sqrt(1 / 3 + 1 / 2))
    assert found.half_width == pytest.approx(3.1824 * pooled * math.sqrt(1 / 3 + 1 / 2), rel=1e-4)
    assert found.counts == (2, 3)


def test_a_recipe_of_its_own_seeds_leaves_the_others_paired() -> None:
    losses = results(a=[3.70, 3.74, 3.72, 3.71], b=[3.80, 3.841, 3.822, 3.809], c=[3.75, 3.791, 3.769, 3.76])
    alone, beside = Fit(losses, 0.95), Fit(losses | {("d", 99): 3.9}, 0.95)
    assert (beside.method, beside.dof) == (alone.method, alone.dof) == (BLOCKS, 6)
    assert beside.sigma == pytest.approx(alone.sigma)
    assert beside.difference("b", "a").error == pytest.approx(alone.difference("b", "a").error)
    assert beside.difference("d", "a").error is None


def test_two_recipes_over_shared_seeds_are_the_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    a = 3.7 + 0.1 * rng.standard_normal(6)
    b = a + 0.02 + 0.003 * rng.standard_normal(6)
    fit = Fit(results(a=list(a), b=list(b)), 0.95)
    found = fit.difference("b", "a")
    differences = list(b - a)
    assert (fit.method, fit.dof) == (BLOCKS, 5)
    assert found.value == pytest.approx(statistics.mean(differences))
    assert found.error == pytest.approx(statistics.stdev(differences) / math.sqrt(6))
    assert found.quantile == pytest.approx(2.571, abs=1e-3)


def test_shared_seeds_too_few_to_spare_count_as_independent() -> None:
    fit = Fit(results(a=[3.70, 3.74], b=[3.71, 3.75]), 0.95)  # blocks would leave a single degree of freedom
    assert (fit.method, fit.dof) == (INDEPENDENT, 2)


@pytest.mark.parametrize(
    ("losses", "dof", "more"),
    [
        ({"a": [3.70, 3.74], "b": [3.71, 3.75]}, 1, 3),
        ({"a": [3.70, 3.74, 3.6], "b": [3.71, 3.75, 3.6], "c": [3.8]}, 2, 1),
        ({"a": [3.70, 3.74, 3.7, 3.6], "b": [3.71, 3.75, 3.6, 3.7]}, 3, 1),
    ],
)
def test_further_shared_seeds_make_blocks(losses: dict[str, list[float]], dof: int, more: int) -> None:
    fit = Fit(results(**losses), 0.95)
    assert (fit.method, fit.block_dof, fit.seeds_to_blocks) == (INDEPENDENT, dof, more)
    for seeds, method in ((more - 1, INDEPENDENT), (more, BLOCKS)):
        further = {(label, 100 + seed): 3.7 + 0.01 * seed for label in losses for seed in range(seeds)}
        assert Fit({**results(**losses), **further}, 0.95).method == method


def test_unshared_seeds_need_a_first_one_to_link_them() -> None:
    apart = {("a", 1): 3.7, ("a", 2): 3.8, ("b", 3): 3.7, ("b", 4): 3.9}
    assert Fit(apart, 0.95).seeds_to_blocks == 5
    assert Fit(results(a=[3.7, 3.8]), 0.95).seeds_to_blocks is None


def solved(losses: dict[tuple[str, int], float], left: str, right: str) -> tuple[float, float, float]:
    """Difference of two labels, its variance over a run's, and the residual squares: dummy variables, numpy's lstsq."""
    columns = [*dict.fromkeys(label for label, _ in losses), *dict.fromkeys(seed for _, seed in losses)]
    design = np.array([[float(column in key) for column in columns] for key in losses])
    values = np.array(list(losses.values()))
    solution = np.linalg.lstsq(design, values, rcond=None)[0]
    weights = np.array([float(column == left) - float(column == right) for column in columns])
    # of the estimates that are linear in the runs and have this mean, least squares has the shortest weights
    of_runs = np.linalg.lstsq(design.T, weights, rcond=None)[0]
    assert of_runs @ values == pytest.approx(weights @ solution)
    return float(weights @ solution), float(of_runs @ of_runs), float(((values - design @ solution) ** 2).sum())


UNBALANCED = {
    "two seeds beside eight": {"a": range(8), "b": range(8), "c": range(8), "few": (0, 1), "less": (3, 7)},
    "a lost seed": {"a": range(4), "b": range(4), "c": (0, 1, 3)},
    "seeds in common over a third label": {"a": (0, 1, 2), "b": range(6), "c": (3, 4, 5)},
}


@pytest.mark.parametrize("seeds", UNBALANCED.values(), ids=UNBALANCED)
@pytest.mark.parametrize("paired", [False, True])
def test_differences_are_least_squares_of_recipes_and_seeds(seeds: dict[str, range], paired: bool) -> None:
    """Each estimate, its error and the pooled noise are those of an independent solver."""
    rng = np.random.default_rng(20)
    effects = 0.05 * rng.standard_normal(8)
    losses = {(label, s): 3.7 + effects[s] + 0.003 * rng.standard_normal() for label in seeds for s in seeds[label]}
    fit = Fit(losses, 0.95, paired=paired)
    assert (fit.method, fit.aside) == (BLOCKS, ())
    assert fit.dof == len(losses) - len(seeds) - len({seed for _, seed in losses}) + 1
    for left, right in itertools.permutations(seeds, 2):
        value, variance, squares = solved(losses, left, right)
        found = fit.difference(left, right)
        assert found.value == pytest.approx(value, abs=1e-12)
        assert fit.sigma == pytest.approx(math.sqrt(squares / fit.dof))
        assert found.error == pytest.approx(fit.sigma * math.sqrt(variance))
        assert found.quantile == t_quantile(0.975, fit.dof)
        assert found.counts == (len(seeds[left]), len(seeds[right]))


def test_equal_seeds_are_the_mean_over_pairs() -> None:
    losses = results(a=[3.7, 3.7, 3.4, 3.71], b=[3.8, 3.8001, 3.5, 3.8], c=[3.9, 3.905, 3.6, 3.9])
    fit = Fit(losses, 0.95)
    pairs = [losses["b", seed] - losses["a", seed] for seed in range(4)]
    found = fit.difference("b", "a")
    assert (found.value, found.error) == (
        pytest.approx(statistics.mean(pairs)),
        pytest.approx(fit.sigma * math.sqrt(2 / 4)),
    )


def test_a_missing_seed_does_not_shift_the_gap() -> None:
    # Seed 2 ends 0.3 lower than the others under every recipe.
    losses = results(a=[3.7, 3.7, 3.4, 3.7], b=[3.8, 3.8001, 3.5, 3.8], c=[3.9, 3.9, 0, 3.9002])
    del losses["c", 2]
    assert Fit(losses, 0.95).difference("c", "a").value == pytest.approx(0.2, abs=2e-4)


def test_the_reference_s_further_seeds_narrow_the_interval_of_a_recipe_with_two() -> None:
    """A recipe with two of eight seeds: a smaller error than over its pairs, and the truth held as often as stated."""
    rng = np.random.default_rng(21)
    trials, held = 400, 0
    for _ in range(trials):
        losses = drawn(rng, dict.fromkeys(["a", "b", "c", "few"], 0.006), seeds=8)
        fit = Fit({(label, s): loss for (label, s), loss in losses.items() if label != "few" or s < 2}, 0.95)
        found = fit.difference("few", "a")
        held += found.interval[0] <= 0 <= found.interval[1]
        if not fit.aside:
            assert found.error is not None
            assert found.error < fit.sigma  # sigma * sqrt(2 / 2) over the pairs
    assert held / trials == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / trials))


def test_recipes_that_no_seeds_connect_are_not_compared() -> None:
    losses = results(a=[3.70, 3.71, 3.72], b=[3.70, 3.712, 3.722])
    losses |= {(label, 10 + seed): 3.8 + 0.01 * seed * seed for label in "cd" for seed in range(3)}
    losses["d", 10] += 0.001
    fit = Fit(losses, 0.95)
    assert (fit.method, fit.dof) == (BLOCKS, 12 - 4 - 6 + 2)
    assert fit.difference("b", "a").error is not None
    assert fit.difference("c", "d").error is not None
    assert fit.difference("c", "a").error is None
    assert math.isnan(fit.difference("c", "a").value)
    assert fit.difference("c", "a").interval == (-math.inf, math.inf)


@pytest.mark.parametrize("shared", [0.0, 0.05])
def test_intervals_have_their_nominal_coverage(shared: float) -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(1500):
        effects = shared * rng.standard_normal(2)
        losses = {(label, s): effects[s] + 0.002 * rng.standard_normal() for label in "abcde" for s in range(2)}
        low, high = Fit(losses, 0.95).difference("a", "b").interval
        held += low <= 0 <= high
    assert held / 1500 == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / 1500))


def test_the_detected_difference_is_found_four_times_out_of_five() -> None:
    rng = np.random.default_rng(2)
    sigma, found, trials = 0.002, 0, 1500
    fit = Fit(results(a=[0.0, 1.0, 3.0], b=[0.0, 2.0, 2.0], c=[1.0, 1.0, 3.0]), 0.95)
    truth = fit.difference("a", "b").detected * sigma / fit.sigma
    assert truth == pytest.approx((2.776 + 0.941) * sigma * math.sqrt(2 / 3), rel=1e-3)
    for _ in range(trials):
        values = {label: list(sigma * rng.standard_normal(3) + (truth if label == "a" else 0)) for label in "abc"}
        low, _ = Fit(results(**values), 0.95).difference("a", "b").interval
        found += low > 0
    assert found / trials == pytest.approx(0.8, abs=0.05)


def test_one_seed_has_no_deviation_without_a_prior() -> None:
    single = results(a=[3.7], b=[3.8])
    fit = Fit(single, 0.95)
    assert (fit.method, fit.known) == (NONE, False)
    assert fit.difference("b", "a").interval == (-math.inf, math.inf)
    assert math.isinf(fit.difference("b", "a").detected)
    prior = Fit(single, 0.95, prior=0.01)
    assert (prior.method, prior.dof) == (PRIOR, math.inf)
    assert prior.difference("b", "a").half_width == pytest.approx(1.96 * 0.01 * math.sqrt(2), rel=1e-4)
    assert Fit(results(a=[3.7, 3.71], b=[3.8]), 0.95, prior=0.01).method == INDEPENDENT  # measured beats assumed


def test_equal_losses_are_copies_and_resolve_nothing() -> None:
    for seeds in ([0.0, 0.0], [0.0, 1.0, 3.0, 0.1, 0.7, 0.2]):
        fit = Fit(results(a=[3.7 + seed for seed in seeds], b=[3.8 + seed for seed in seeds]), 0.95)
        assert not fit.known
    assert math.isinf(fit.difference("b", "a").half_width)


def drawn(rng: np.random.Generator, noise: dict[str, float], seeds: int) -> dict[tuple[str, int], float]:
    """Losses of recipes that share their seeds' effects and have noise of their own."""
    effects = 0.01 * rng.standard_normal(seeds)
    return results(**{label: list(effects + own * rng.standard_normal(seeds)) for label, own in noise.items()})


def test_a_recipe_that_scatters_more_is_compared_by_its_own_pairs() -> None:
    rng = np.random.default_rng(4)
    losses = drawn(rng, dict.fromkeys("abcd", 0.003) | {"wild": 0.03}, seeds=6)
    fit = Fit(losses, 0.95)
    rest = Fit({key: loss for key, loss in losses.items() if key[0] != "wild"}, 0.95)
    assert (fit.aside, rest.aside) == (("wild",), ())
    assert (fit.sigma, fit.dof) == (rest.sigma, rest.dof)
    assert fit.difference("b", "a") == rest.difference("b", "a")
    pairs = [losses["wild", seed] - losses["a", seed] for seed in range(6)]
    found = fit.difference("wild", "a")
    assert (found.value, found.dof, found.counts) == (pytest.approx(statistics.mean(pairs)), 5, (6, 6))
    assert found.error == pytest.approx(statistics.stdev(pairs) / math.sqrt(6))
    margin = 0.02
    assert fit.seeds_needed("b", "a", margin, False) == rest.seeds_needed("b", "a", margin, False) == 2
    needed = fit.seeds_needed("wild", "a", margin, False)
    assert needed == Fit(
        {key: loss for key, loss in losses.items() if key[0] in ("wild", "a")}, 0.95, paired=True
    ).seeds_needed("wild", "a", margin, False)
    assert needed is not None
    assert needed > 6


def test_two_recipes_that_scatter_more_do_not_hide_each_other() -> None:
    rng = np.random.default_rng(11)
    losses = drawn(rng, dict.fromkeys("abcdef", 0.004) | {"wild": 0.1, "also": 0.1}, seeds=2)
    calm = {key: loss for key, loss in losses.items() if key[0] in "abcdef"}
    fit, rest = Fit(losses, 0.95), Fit(calm, 0.95)
    assert Fit({**calm, ("wild", 0): losses["wild", 0], ("wild", 1): losses["wild", 1]}, 0.95).aside == ("wild",)
    assert sorted(fit.aside) == ["also", "wild"]
    assert (fit.sigma, fit.dof) == (rest.sigma, rest.dof)
    assert fit.difference("b", "a") == rest.difference("b", "a")


def test_half_of_the_recipes_stay_and_two_in_any_case() -> None:
    rng = np.random.default_rng(12)
    scattered = drawn(rng, dict.fromkeys("ab", 0.001) | {"wild": 0.1, "more": 0.1, "most": 10.0}, seeds=8)
    assert Fit(scattered, 0.95).aside == ("most",)  # of five two may go, and the second is no rarer beside a third
    runs = {("calm", seed): 0.001 * rng.standard_normal() for seed in range(8)}
    runs |= {("noisy", 100 + seed): rng.standard_normal() for seed in range(4)}
    fit = Fit(runs, 0.95)
    assert (fit.method, fit.aside) == (INDEPENDENT, ())


def test_a_recipe_set_aside_needs_a_shared_pair() -> None:
    rng = np.random.default_rng(5)
    losses = drawn(rng, dict.fromkeys("abcd", 0.003) | {"wild": 0.05}, seeds=6)
    for seed in (0, 1, 2, 3, 4):
        del losses["d", seed]
    fit = Fit(losses, 0.95)
    assert fit.aside == ("wild",)
    assert fit.difference("wild", "d").value == losses["wild", 5] - losses["d", 5]
    assert (fit.difference("wild", "d").error, fit.seeds_needed("wild", "d", 0.01, False)) == (None, None)
    assert fit.difference("a", "d").error is not None


def test_independent_runs_with_unequal_noise_are_welch_s_test() -> None:
    rng = np.random.default_rng(6)
    losses = {
        (label, 100 * n + seed): 0.003 * rng.standard_normal() for n, label in enumerate("abc") for seed in range(4)
    }
    losses |= {("wild", 900 + seed): 0.1 * rng.standard_normal() for seed in range(4)}
    fit = Fit(losses, 0.95)
    assert (fit.method, fit.aside, fit.dof) == (INDEPENDENT, ("wild",), 9)
    own, other = (
        statistics.variance([loss for (label, _), loss in losses.items() if label == "wild"]) / 4,
        fit.sigma**2 / 4,
    )
    found = fit.difference("wild", "a")
    assert found.error == pytest.approx(math.sqrt(own + other))
    assert found.dof == pytest.approx((own + other) ** 2 / (own**2 / 3 + other**2 / 9))


def test_recipes_of_equal_noise_are_set_aside_at_the_stated_rate() -> None:
    rng = np.random.default_rng(7)
    groups = 1500
    found = sum(bool(Fit(drawn(rng, dict.fromkeys("abcdefgh", 0.006), seeds=4), 0.95).aside) for _ in range(groups))
    assert found / groups < 0.01 + 3 * math.sqrt(0.01 / groups)
    assert found  # the test can set one aside


def test_intervals_hold_the_truth_under_unequal_noise() -> None:
    rng = np.random.default_rng(8)
    trials, held = 1500, {"wild": 0, "b": 0}
    for _ in range(trials):
        fit = Fit(drawn(rng, dict.fromkeys("abcdef", 0.006) | {"wild": 0.03}, seeds=6), 0.95)
        for label in held:
            low, high = fit.difference(label, "a").interval
            held[label] += low <= 0 <= high
    spread = 3 * math.sqrt(0.95 * 0.05 / trials)
    assert held["b"] / trials == pytest.approx(0.95, abs=spread)
    assert held["wild"] / trials == pytest.approx(0.95, abs=0.01 + spread)  # the choice itself costs up to a percent


def test_means_and_deviations_are_plain() -> None:
    fit = Fit(results(a=[3.70, 3.74], b=[3.8]), 0.95)
    assert fit.mean("a") == pytest.approx(3.72)
    assert fit.deviation("a") == pytest.approx(0.04 / math.sqrt(2))
    assert math.isnan(fit.deviation("b"))


def test_paired_fits_use_any_degree_of_freedom_and_never_independent_runs() -> None:
    few = results(a=[3.70, 3.74], b=[3.71, 3.754])
    fit = Fit(few, 0.95, paired=True)
    assert (fit.method, fit.dof) == (BLOCKS, 1)
    assert fit.difference("b", "a").error == pytest.approx(statistics.stdev([0.01, 0.014]) / math.sqrt(2))
    apart = {("a", 1): 3.70, ("a", 2): 3.71, ("b", 3): 3.72, ("b", 4): 3.74}
    assert Fit(apart, 0.95, paired=True).method == NONE
    assert Fit(apart, 0.95, prior=0.01, paired=True).method == NONE  # a prior is for single seeds


@pytest.mark.parametrize(("both_sides", "alone"), [(False, False), (True, False), (False, True)])
def test_the_seeds_needed_decide_four_times_out_of_five(both_sides: bool, alone: bool) -> None:
    """Two recipes get new seeds; the others, unless these are ``alone``, add the degrees of freedom that they have."""
    rng = np.random.default_rng(3)
    pilot = Fit(results(a=[0.0, 0.004, 0.001], b=[0.003, 0.0, 0.002], c=[0.001, 0.002, 0.006]), 0.95, paired=True)
    margin, decided, trials = 2 * pilot.sigma, 0, 800
    seeds = pilot.seeds_needed("a", "b", margin, both_sides, alone=alone)
    fewer = pilot.seeds_needed("a", "b", 1.5 * margin, both_sides, alone=alone)
    beside = pilot.seeds_needed("a", "b", margin, both_sides)
    assert seeds is not None
    assert fewer is not None
    assert beside is not None
    assert fewer < seeds
    assert (seeds > beside) == alone
    counts = {"a": seeds, "b": seeds} | ({} if alone else {"c": 3})
    for _ in range(trials):
        drawn = {label: list(pilot.sigma * rng.standard_normal(count)) for label, count in counts.items()}
        low, high = Fit(results(**drawn), 0.95, paired=True).difference("a", "b").interval
        decided += high < margin and (low > -margin or not both_sides)
    # whole seeds, and for two sides a bound, lie above 0.8
    assert (0.75 if both_sides else 0.78) < decided / trials < 0.95
    assert pilot.seeds_needed("a", "b", 1e-3 * pilot.sigma, both_sides) is None


def test_unknown_noise_needs_an_unknown_number_of_seeds() -> None:
    assert Fit(results(a=[3.7], b=[3.8]), 0.95, paired=True).seeds_needed("b", "a", 0.1, False) is None
