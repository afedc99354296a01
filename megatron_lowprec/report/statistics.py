"""Means over seeds, their differences, and the smallest significant difference.

One model serves a whole group of runs: a run's result is its recipe's mean, plus its seed's effect if seeds are shared,
plus noise of one standard deviation, pooled over the runs of all recipes but those whose own noise is clearly larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Results = Mapping[tuple[str, Hashable], float]

BLOCKS, INDEPENDENT, PRIOR, NONE = "seeds as blocks", "independent runs", "prior noise", "none"
_FEWEST = 4  # least degrees of freedom left by seeds as blocks
_POWER = 0.8
_CHANCE = 0.01  # probability of setting a recipe aside in a group whose recipes have equal noise
_COPIES = 1e-9  # nats: a smaller standard deviation is rounding
_MOST_SEEDS = 1000  # a comparison that needs more is out of reach


@dataclass(frozen=True)
class Difference:
    """Mean of one label minus that of another."""

    value: float
    error: float | None  # standard error; None if the noise is unknown
    quantile: float  # Student's t of the requested confidence (two-sided)
    dof: float  # degrees of freedom of the standard error; infinite for a prior one
    counts: tuple[int, int]  # seeds on either side

    @property
    def half_width(self) -> float:
        """Half width of the confidence interval: the smallest significant difference; infinite if unknown."""
        return math.inf if self.error is None else self.quantile * self.error

    @property
    def interval(self) -> tuple[float, float]:
        """The confidence interval."""
        return self.value - self.half_width, self.value + self.half_width

    @property
    def detected(self) -> float:
        """True difference that such a comparison detects with probability 0.8; infinite if the noise is unknown."""
        return math.inf if self.error is None else (self.quantile + t_quantile(_POWER, self.dof)) * self.error


class Fit:
    """The noise of one quantity over a group's runs, and differences between labels.

    Seeds are blocks (they share weights, data order and dropout over recipes) if the design allows: shared seeds
    connect all labels, and at least 4 degrees of freedom are left. Otherwise the runs count as independent. The results
    do not affect that choice.

    A label whose noise exceeds the others' (F test of the squares that it adds, at 1% for the whole group) is set
    aside: its runs do not count for the pooled noise, and its differences have the noise of their own pairs.

    Args:
        results: (label, seed) -> finite value; one per pair.
        confidence: of the intervals, such as 0.95.
        prior: assumed standard deviation between seeds if no label has two; None for none.
        paired: seeds are blocks with any degree of freedom left, and runs never count as independent.
    """

    def __init__(
        self, results: Results, confidence: float, prior: float | None = None, *, paired: bool = False
    ) -> None:
        self._results, self._confidence = results, confidence
        fewest = 1 if paired else _FEWEST
        independent, blocks = _independent(results), _blocks(results)
        self.aside: tuple[str, ...] = ()
        self.method, self._model = NONE, independent
        if blocks is not None and blocks.dof >= fewest:
            self.method, self._model = BLOCKS, blocks
            self._set_aside(_blocks, fewest)
        elif independent.dof and not paired:
            self.method = INDEPENDENT
            self._set_aside(_independent, _FEWEST)
        elif prior is not None and not independent.dof:
            self.method = PRIOR
        self.sigma, self.dof = math.nan, 0.0
        if self.method == PRIOR and prior is not None:
            self.sigma, self.dof = prior, math.inf
        elif self.method != NONE:
            self.sigma, self.dof = math.sqrt(self._model.variance), self._model.dof

    def _set_aside(self, model_of: Callable[[Results], _Model | None], fewest: int) -> None:
        """Move the label with the most noise from the model to ``aside`` until none has clearly more than the rest."""
        from scipy.special import fdtrc  # as in t_quantile

        while len(self._model.means) > 2:
            chances: list[tuple[float, str, _Model]] = []
            for label in self._model.means:
                rest = model_of(
                    {key: value for key, value in self._results.items() if key[0] not in (*self.aside, label)}
                )
                spare = 0.0 if rest is None else self._model.dof - rest.dof
                if rest is None or rest.dof < fewest or not spare or math.sqrt(rest.variance) <= _COPIES:
                    continue
                added = (self._model.squares - rest.squares) / spare
                chances.append((float(fdtrc(spare, rest.dof, added / rest.variance)), label, rest))
            least, label, rest = min(chances, key=lambda chance: chance[0], default=(1.0, "", self._model))
            if least * len(self._model.means) > _CHANCE:
                break
            self.aside, self._model = (*self.aside, label), rest

    @property
    def known(self) -> bool:
        """Whether the standard deviation is known; zero means copies instead of seeds, and counts as unknown."""
        return self.dof > 0 and self.sigma > _COPIES

    def difference(self, left: str, right: str) -> Difference:
        """Difference of two labels in the model; of labels with other noise, from their pairs or means alone."""
        counts = len(self._values(left)), len(self._values(right))
        if left not in self.aside and right not in self.aside:
            value = self._model.means[left] - self._model.means[right]
            variance, dof = self.sigma**2 * self._model.spread(left, right), self.dof
        elif self.method == BLOCKS:
            pairs = self._pairs(left, right)
            counts = len(pairs), len(pairs)
            value = float(pairs.mean()) if len(pairs) else self.mean(left) - self.mean(right)
            dof = max(0.0, len(pairs) - 1.0)
            variance = float(pairs.var(ddof=1)) / len(pairs) if dof else math.nan
        else:
            value = self.mean(left) - self.mean(right)
            variance, dof = self._welch(left, right)
        known = self.known and dof > 0
        quantile = t_quantile(0.5 + self._confidence / 2, dof) if known else math.inf
        return Difference(value, math.sqrt(variance) if known else None, quantile, dof, counts)

    def _welch(self, left: str, right: str) -> tuple[float, float]:
        """Variance and degrees of freedom of a difference of independent means with unequal noise."""
        parts = []
        for label in (left, right):
            values = self._values(label)
            own = label in self.aside
            parts.append(
                (
                    (float(values.var(ddof=1)) if own else self.sigma**2) / len(values),
                    len(values) - 1.0 if own else self.dof,
                )
            )
        variance = sum(part for part, _ in parts)
        return variance, variance**2 / sum(part**2 / dof for part, dof in parts)

    def _pairs(self, left: str, right: str) -> npt.NDArray[np.float64]:
        seeds = [seed for label, seed in self._results if label == left and (right, seed) in self._results]
        return np.array([self._results[left, seed] - self._results[right, seed] for seed in seeds])

    def seeds_needed(self, left: str, right: str, margin: float, both_sides: bool) -> int | None:
        """Fewest seeds per label, shared by all, that decide a test of two labels four times out of five.

        Power calculation at the measured standard deviation, as if the recipes differed from the threshold by
        ``margin``. An interval that must stay within two bounds (two one-sided tests) can miss on both sides.

        Args:
            left, right: the labels.
            margin: difference to tell apart, above 0, in the unit of the results.
            both_sides: whether both ends of the interval have a bound.

        Returns:
            At least 2; None if the standard deviation is unknown or over 1000 seeds are needed.
        """
        if not self.known:
            return None
        sigma, others = self.sigma, max(1, len(self._model.means) - 1)
        if left in self.aside or right in self.aside:
            difference = self.difference(left, right)
            if difference.error is None:
                return None
            sigma, others = difference.error / math.sqrt(sum(1 / count for count in difference.counts)), 1
        power = 1 - (1 - _POWER) / 2 if both_sides else _POWER
        for seeds in range(2, _MOST_SEEDS + 1):
            dof = math.inf if self.method == PRIOR else float(others * (seeds - 1))
            quantiles = t_quantile(0.5 + self._confidence / 2, dof) + t_quantile(power, dof)
            if quantiles * sigma * math.sqrt(2 / seeds) <= margin:
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


@dataclass(frozen=True)
class _Model:
    """Least squares of the labels' means."""

    means: dict[str, float]
    covariance: npt.NDArray[np.floating]  # of the means, over the variance of a run
    squares: float  # sum of the squared residuals
    dof: float

    @property
    def variance(self) -> float:
        return self.squares / self.dof

    def spread(self, left: str, right: str) -> float:
        """Variance of a difference of two means, over that of a run."""
        contrast = np.array([(label == left) - (label == right) for label in self.means], float)
        return float(contrast @ self.covariance @ contrast)


def _independent(results: Results) -> _Model:
    """Every label's runs scatter about its mean."""
    values: dict[str, list[float]] = {}
    for (label, _), value in results.items():
        values.setdefault(label, []).append(value)
    means = {label: float(np.mean(each)) for label, each in values.items()}
    squares = sum(float(((np.array(each) - means[label]) ** 2).sum()) for label, each in values.items())
    covariance = np.diag([1.0 / len(each) for each in values.values()])
    return _Model(means, covariance, squares, float(len(results) - len(values)))


def _blocks(results: Results) -> _Model | None:
    """Means of labels plus effects of seeds; None if shared seeds do not connect all labels, or no dof is left."""
    labels = list(dict.fromkeys(label for label, _ in results))
    seeds = list(dict.fromkeys(seed for _, seed in results))
    if len(seeds) < 2 or len(labels) < 2:
        return None
    design = np.zeros((len(results), len(labels) + len(seeds) - 1))
    values = np.array(list(results.values()))
    for row, (label, seed) in enumerate(results):
        design[row, labels.index(label)] = 1.0
        if seeds.index(seed):
            design[row, len(labels) + seeds.index(seed) - 1] = 1.0
    # Without full rank some labels share no seeds, not even through others, and cannot be compared with them.
    dof = len(results) - design.shape[1]
    if dof < 1 or np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    inverse = np.linalg.inv(design.T @ design)
    effects = inverse @ design.T @ values
    residual = values - design @ effects
    count = len(labels)
    means = dict(zip(labels, map(float, effects)))
    return _Model(means, inverse[:count, :count], float(residual @ residual), float(dof))


def t_quantile(probability: float, dof: float) -> float:
    """Quantile of Student's t for this probability; of the normal distribution for infinite ``dof``."""
    from scipy.special import stdtrit  # takes half a second, which most commands do not need

    return float(stdtrit(dof, probability))
