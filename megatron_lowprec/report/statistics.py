"""Differences between recipes over seeds, and the smallest significant difference.

One model serves a whole group of runs: a run's result is its recipe's mean, plus its seed's effect if seeds are shared,
plus noise of one standard deviation, pooled over the runs of all recipes but those whose own noise is clearly larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Results = Mapping[tuple[str, Hashable], float]

BLOCKS, INDEPENDENT, PRIOR, NONE = "seeds as blocks", "independent runs", "prior noise", "none"
FEWEST = 4  # least degrees of freedom left by seeds as blocks
_POWER = 0.8
_CHANCE = 0.02  # probability of setting a recipe aside in a group whose recipes have equal noise, at most
_COPIES = 1e-9  # nats: a smaller standard deviation is rounding
_MOST_SEEDS = 1000  # a comparison that needs more is out of reach


@dataclass(frozen=True)
class Difference:
    """Mean of one label minus that of another."""

    value: float
    error: float | None  # standard error; None if the noise is unknown
    quantile: float  # Student's t of the requested confidence (two-sided)
    dof: float  # degrees of freedom of the standard error; infinite for a prior one
    counts: tuple[int, int]  # seeds on either side that the estimate rests on

    @property
    def half_width(self) -> float:
        """Half width of the confidence interval: the smallest significant difference; infinite if unknown."""
        return math.inf if self.error is None else self.quantile * self.error

    @property
    def interval(self) -> tuple[float, float]:
        """The confidence interval; without bounds if the noise is unknown."""
        if self.error is None:
            return -math.inf, math.inf
        return self.value - self.half_width, self.value + self.half_width

    @property
    def detected(self) -> float:
        """True difference that such a comparison detects with probability 0.8; infinite if the noise is unknown."""
        return math.inf if self.error is None else (self.quantile + t_quantile(_POWER, self.dof)) * self.error


class Fit:
    """The noise of one quantity over a group's runs, and differences between labels.

    Seeds are blocks (they share weights, data order and dropout over recipes) if that leaves at least 4 degrees of
    freedom. Otherwise the runs count as independent. The results do not affect that choice.

    Differences are least squares of the model. With seeds as blocks, all runs of the group estimate the seeds' effects,
    so a label with few seeds is compared with all runs of the other one, less the effects of their seeds.

    A label whose noise exceeds the others' (F test of the squares that it adds, at most 2% for the whole group) is set
    aside: its runs do not count for the pooled noise or the seeds' effects, and its differences are paired t-tests.

    Args:
        results: (label, seed) -> finite value; one per pair.
        confidence: of the intervals, such as 0.95.
        prior: assumed standard deviation between seeds if no label has two; None for none.
        paired: seeds are blocks with any degree of freedom left, and runs never count as independent.
    """

    def __init__(
        self, results: Results, confidence: float, prior: float | None = None, *, paired: bool = False
    ) -> None:
        self._results, self._confidence, self._paired = results, confidence, paired
        self._labels = list(dict.fromkeys(label for label, _ in results))
        self.aside: tuple[str, ...] = ()
        self.method, self.sigma, self.dof = NONE, math.nan, 0.0
        fewest = 1 if paired else FEWEST
        self._blocks, independent = _blocks(results), _independent(results)
        self.block_dof = self._blocks.dof  # that seeds as blocks leave, whether used or not
        if self.block_dof >= fewest:
            self.method = BLOCKS
            self.aside = self._pool(_blocks, fewest)
            if self.aside:
                self._blocks = _blocks({key: value for key, value in results.items() if key[0] not in self.aside})
        elif independent.dof and not paired:
            self.method = INDEPENDENT
            self.aside = self._pool(_independent, FEWEST)
        elif prior is not None and not independent.dof:
            self.method, self.sigma, self.dof = PRIOR, prior, math.inf

    def _pool(self, noise_of: Callable[[Results], _Noise], fewest: int) -> tuple[str, ...]:
        """Set ``sigma`` and ``dof``; returns the labels with clearly more noise than the rest, which go ``aside``.

        As in the generalized ESD test (Rosner, Technometrics 25, 1983), labels are removed one after the other, up to
        half of them, each the least likely to have the noise of the rest. All up to the last unlikely one go aside, so
        two labels do not mask each other. Step k, from 1, tests at 0.02 / 2^k over the labels left; two stay in any
        case.
        """
        from scipy.special import fdtrc  # as in t_quantile

        noise, labels, removed, kept = noise_of(self._results), self._labels, list[str](), 0
        self.sigma, self.dof = noise.sigma, noise.dof
        for step in range(1, 1 + min(len(labels) // 2, len(labels) - 2)):
            chances: list[tuple[float, str, _Noise]] = []
            for label in labels:
                left = {key: value for key, value in self._results.items() if key[0] in labels and key[0] != label}
                rest = noise_of(left)
                own = noise.dof - rest.dof
                if rest.dof >= fewest and own and rest.sigma > _COPIES:
                    ratio = (noise.squares - rest.squares) / own / rest.sigma**2
                    chances.append((float(fdtrc(own, rest.dof, ratio)), label, rest))
            if not chances:
                break
            least, label, noise = min(chances, key=lambda chance: chance[0])
            removed.append(label)
            if least * len(labels) <= _CHANCE / 2**step:
                kept, self.sigma, self.dof = len(removed), noise.sigma, noise.dof
            labels = [each for each in labels if each != label]
        return tuple(removed[:kept])

    @property
    def known(self) -> bool:
        """Whether the standard deviation is known; zero means copies instead of seeds, and counts as unknown."""
        return self.dof > 0 and self.sigma > _COPIES

    @property
    def seeds_to_blocks(self) -> int | None:
        """Fewest further seeds, trained under every label, for seeds as blocks; None with a single label."""
        if len(self._labels) < 2:
            return None
        # The first one links all labels, and each later one adds a degree of freedom or more.
        for more in range(1, FEWEST + 2):
            results = dict(self._results)
            results |= {(label, ("further", seed)): 0.0 for label in self._labels for seed in range(more)}
            if _blocks(results).dof >= FEWEST:
                return more
        raise AssertionError("more seeds than degrees of freedom")

    def difference(self, left: str, right: str) -> Difference:
        """Difference of two labels; NaN if the model does not connect them, or one is aside and they share no seed.

        Independent runs: the difference of their means.
        """
        own_noise = left in self.aside or right in self.aside
        measure = self._of_means
        if self.method == BLOCKS or self._paired:
            measure = self._of_pairs if own_noise else self._of_blocks
        value, variance, dof, counts = measure(left, right)
        if not self.known or not dof:
            return Difference(value, None, math.inf, 0.0, counts)
        return Difference(value, math.sqrt(variance), t_quantile(0.5 + self._confidence / 2, dof), dof, counts)

    def _of_blocks(self, left: str, right: str) -> _Estimate:
        """Least squares of label means plus seed effects."""
        value, variance = self._blocks.contrast(left, right)
        dof = 0.0 if math.isnan(value) else self.dof
        return value, variance * self.sigma**2, dof, (self._blocks.seeds(left), self._blocks.seeds(right))

    def _of_pairs(self, left: str, right: str) -> _Estimate:
        """The paired t-test over the seeds that both have."""
        seeds = [seed for label, seed in self._results if label == left and (right, seed) in self._results]
        pairs = np.array([self._results[left, seed] - self._results[right, seed] for seed in seeds])
        mean = float(pairs.mean()) if len(pairs) else math.nan
        variance = float(pairs.var(ddof=1)) / len(pairs) if len(pairs) > 1 else math.nan
        return mean, variance, max(0.0, len(pairs) - 1.0), (len(pairs), len(pairs))

    def _of_means(self, left: str, right: str) -> _Estimate:
        """The difference of two means; Welch's test if a label is aside."""
        parts, counts = [], (len(self._values(left)), len(self._values(right)))
        for label, count in zip((left, right), counts):
            aside = label in self.aside
            variance = float(self._values(label).var(ddof=1)) if aside else self.sigma**2
            parts.append((variance / count, count - 1.0 if aside else self.dof))
        variance = sum(part for part, _ in parts)
        dof = welch_dof(parts) if {left, right} & {*self.aside} else self.dof
        return self.mean(left) - self.mean(right), variance, dof, counts

    def seeds_needed(
        self, left: str, right: str, margin: float, both_sides: bool, *, alone: bool = False
    ) -> int | None:
        """Fewest seeds of two labels, shared by both, that decide a test of them four times out of five.

        Power calculation at the measured standard deviation, as if the recipes differed from the threshold by
        ``margin``. An interval that must stay within two bounds (two one-sided tests) can miss on both sides. Seeds
        that only one of the two has do not count, except where the runs at hand suffice.

        Args:
            left, right: the labels.
            margin: difference to tell apart, above 0, in the unit of the results.
            both_sides: whether both ends of the interval have a bound.
            alone: there are no runs of other labels, as in a new group; else those at hand add degrees of freedom.

        Returns:
            At least 2; None if the standard deviation is unknown or over 1000 seeds are needed.
        """
        if not self.known:
            return None
        others = [len(self._values(label)) - 1 for label in self._labels if label not in (left, right, *self.aside)]
        sigma, more = self.sigma, 0 if alone else sum(others)
        at_hand = self.difference(left, right)
        if left in self.aside or right in self.aside:
            if at_hand.error is None:
                return None
            sigma, more = at_hand.error / math.sqrt(sum(1 / count for count in at_hand.counts)), 0
        power = 1 - (1 - _POWER) / 2 if both_sides else _POWER
        suffice = not alone and at_hand.half_width + t_quantile(power, at_hand.dof) * (at_hand.error or 0.0) <= margin
        for seeds in range(2, _MOST_SEEDS + 1):
            dof = math.inf if self.method == PRIOR else float(seeds - 1 + more)
            quantiles = t_quantile(0.5 + self._confidence / 2, dof) + t_quantile(power, dof)
            if quantiles * sigma * math.sqrt(2 / seeds) <= margin or (suffice and seeds >= min(at_hand.counts)):
                return seeds
        return None

    def _values(self, label: str) -> npt.NDArray[np.float64]:
        return np.array([value for (other, _), value in self._results.items() if other == label])

    def mean(self, label: str) -> float:
        """Plain mean over the label's seeds."""
        return float(self._values(label).mean())

    def deviation(self, label: str) -> float:
        """Standard deviation over the label's own seeds; NaN with one."""
        values = self._values(label)
        return float(values.std(ddof=1)) if len(values) > 1 else math.nan


_Estimate = tuple[float, float, float, tuple[int, int]]
"""A difference, its variance, the variance's degrees of freedom, and the seeds of either label."""


@dataclass(frozen=True)
class _Noise:
    """Residual sum of squares with its degrees of freedom."""

    squares: float  # sum of the squared residuals
    dof: float

    @property
    def sigma(self) -> float:
        return math.sqrt(self.squares / self.dof)


@dataclass(frozen=True)
class _Blocks(_Noise):
    """Least squares of label means plus seed effects, of an unbalanced design."""

    labels: Mapping[str, int]  # label -> row
    shared: npt.NDArray[np.float64]  # runs of each label whose seed another label has; the others estimate nothing
    means: npt.NDArray[np.float64]  # of each label; only differences of labels that seeds connect are determined
    variances: npt.NDArray[np.float64]  # of the means over that of a run, with their covariances
    determined: npt.NDArray[np.float64]  # projects onto the differences that are determined

    def seeds(self, label: str) -> int:
        """Seeds of a label that estimate its mean."""
        return int(self.shared[self.labels[label]]) if label in self.labels else 0

    def contrast(self, left: str, right: str) -> tuple[float, float]:
        """Difference of two label means and its variance over that of a run; NaN if no seeds connect the two."""
        if left not in self.labels or right not in self.labels:
            return math.nan, math.nan
        weights = np.zeros(len(self.labels))
        weights[self.labels[left]] += 1.0
        weights[self.labels[right]] -= 1.0
        if not np.allclose(self.determined @ weights, weights):
            return math.nan, math.nan
        return float(weights @ self.means), float(weights @ self.variances @ weights)


def _independent(results: Results) -> _Noise:
    """Residual noise about each label's mean."""
    values: dict[str, list[float]] = {}
    for (label, _), value in results.items():
        values.setdefault(label, []).append(value)
    squares = sum(float(((np.array(each) - np.mean(each)) ** 2).sum()) for each in values.values())
    return _Noise(squares, float(len(results) - len(values)))


def _blocks(results: Results) -> _Blocks:
    """The fit of label means plus seed effects; without degrees of freedom for fewer than two labels."""
    labels = {label: row for row, label in enumerate(dict.fromkeys(label for label, _ in results))}
    seeds = {seed: column for column, seed in enumerate(dict.fromkeys(seed for _, seed in results))}
    runs, values = np.zeros((2, len(labels), len(seeds)))
    for (label, seed), value in results.items():
        runs[labels[label], seeds[seed]] = 1.0
        values[labels[label], seeds[seed]] = value
    of_seed = runs.sum(axis=0)
    # The seeds' effects are eliminated; what remains is as wide as there are labels, whatever the number of seeds.
    information = np.diag(runs.sum(axis=1)) - runs / of_seed @ runs.T
    eigenvalues, vectors = np.linalg.eigh(information)
    kept = vectors[:, eigenvalues > 1e-9 * len(results)]  # a zero for each set of labels that seeds connect
    variances = kept / eigenvalues[len(labels) - kept.shape[1] :] @ kept.T
    means = variances @ (values - runs * (values.sum(axis=0) / of_seed)).sum(axis=1)
    effects = (values - runs * means[:, None]).sum(axis=0) / of_seed
    residual = values - runs * (means[:, None] + effects)
    dof = len(results) - len(seeds) - kept.shape[1] if len(labels) > 1 else 0
    squares = float((residual**2).sum()) if dof else 0.0
    shared = (runs * (of_seed > 1)).sum(axis=1)
    return _Blocks(squares, float(dof), labels, shared, means, variances, kept @ kept.T)


def welch_dof(parts: Sequence[tuple[float, float]]) -> float:
    """Welch's degrees of freedom of a sum of independent variances, each given with its own."""
    share = sum(variance**2 / dof for variance, dof in parts)
    return sum(variance for variance, _ in parts) ** 2 / share if share else math.inf


def t_quantile(probability: float, dof: float) -> float:
    """Quantile of Student's t for this probability; of the normal distribution for infinite ``dof``."""
    from scipy.special import stdtrit  # takes half a second, which most commands do not need

    return float(stdtrit(dof, probability))
