"""Means over seeds, their differences, and the smallest significant difference.

One model serves a whole group of runs: a run's result is its recipe's mean, plus its seed's effect if seeds are shared,
plus noise of one standard deviation for all recipes. The standard deviation is pooled over all runs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np

Results = Mapping[tuple[str, Hashable], float]

BLOCKS, INDEPENDENT, PRIOR, NONE = "seeds as blocks", "independent runs", "prior noise", "none"
_FEWEST = 4  # least degrees of freedom left by seeds as blocks
_POWER = 0.8
_UNLIKE = 3.0  # times the others' standard deviation
_COPIES = 1e-9  # nats: a smaller standard deviation is rounding
_MOST_SEEDS = 1000  # a comparison that needs more is out of reach


@dataclass(frozen=True)
class Difference:
    """Mean of one label minus that of another."""

    value: float
    error: float | None  # standard error; None if the noise is unknown
    quantile: float  # Student's t of the requested confidence (two-sided)
    dof: float  # degrees of freedom of the standard deviation; infinite for a prior one
    counts: tuple[int, int]  # seeds on either side

    @property
    def half_width(self) -> float:
        """Half width of the confidence interval: the smallest significant difference; infinite if unknown."""
        return math.inf if self.error is None else self.quantile * self.error

    @property
    def interval(self) -> tuple[float, float]:
        """The confidence interval."""
        return self.value - self.half_width, self.value + self.half_width


class Fit:
    """The noise of one quantity over a group's runs, and differences between labels.

    Seeds are blocks (they share weights, data order and dropout over recipes) if the design allows: shared seeds
    connect all labels, and at least 4 degrees of freedom are left. Otherwise the runs count as independent. The results
    do not affect that choice.

    Args:
        results: (label, seed) -> finite value; one per pair.
        confidence: of the intervals, such as 0.95.
        prior: assumed standard deviation between seeds if no label has two; None for none.
        paired: seeds are blocks with any degree of freedom left, and runs never count as independent.
    """

    def __init__(
        self, results: Results, confidence: float, prior: float | None = None, *, paired: bool = False
    ) -> None:
        self._confidence = confidence
        self._fewest = 1 if paired else _FEWEST
        self._labels = list(dict.fromkeys(label for label, _ in results))
        self._values = {
            label: np.array([value for (other, _), value in results.items() if other == label])
            for label in self._labels
        }
        # Degrees of freedom and sum of squared deviations of each label.
        self._spare = {label: len(values) - 1 for label, values in self._values.items()}
        self._squares = {label: float(((values - values.mean()) ** 2).sum()) for label, values in self._values.items()}
        self.method, self.sigma, self.dof = NONE, math.nan, 0.0
        self._means = np.array([values.mean() for values in self._values.values()])
        self._covariance = np.diag([1.0 / len(values) for values in self._values.values()])
        if self._fit_blocks(results):
            return
        spare, squares = sum(self._spare.values()), sum(self._squares.values())
        if spare and not paired:
            self.method, self.sigma, self.dof = INDEPENDENT, math.sqrt(squares / spare), float(spare)
        elif prior is not None and not spare:
            self.method, self.sigma, self.dof = PRIOR, prior, math.inf

    def _fit_blocks(self, results: Results) -> bool:
        seeds = list(dict.fromkeys(seed for _, seed in results))
        if len(seeds) < 2 or len(self._labels) < 2:
            return False
        design = np.zeros((len(results), len(self._labels) + len(seeds) - 1))
        values = np.array(list(results.values()))
        for row, (label, seed) in enumerate(results):
            design[row, self._labels.index(label)] = 1.0
            if seeds.index(seed):
                design[row, len(self._labels) + seeds.index(seed) - 1] = 1.0
        # Without full rank some labels share no seeds, not even through others, and cannot be compared with them.
        if np.linalg.matrix_rank(design) < design.shape[1] or len(results) - design.shape[1] < self._fewest:
            return False
        inverse = np.linalg.inv(design.T @ design)
        effects = inverse @ design.T @ values
        residual = values - design @ effects
        count = len(self._labels)
        self.method, self.dof = BLOCKS, float(len(results) - design.shape[1])
        self.sigma = math.sqrt(float(residual @ residual) / self.dof)
        self._means, self._covariance = effects[:count], inverse[:count, :count]
        return True

    @property
    def known(self) -> bool:
        """Whether the standard deviation is known; zero means copies instead of seeds, and counts as unknown."""
        return self.dof > 0 and self.sigma > _COPIES

    def difference(self, left: str, right: str) -> Difference:
        """Difference of two labels in the model."""
        contrast = np.array([(label == left) - (label == right) for label in self._labels], float)
        error = self.sigma * math.sqrt(float(contrast @ self._covariance @ contrast)) if self.known else None
        quantile = t_quantile(0.5 + self._confidence / 2, self.dof) if self.known else math.inf
        counts = len(self._values[left]), len(self._values[right])
        return Difference(float(contrast @ self._means), error, quantile, self.dof, counts)

    def detected(self, difference: Difference) -> float:
        """True difference that such a comparison detects with probability 0.8."""
        if difference.error is None:
            return math.inf
        return (difference.quantile + t_quantile(_POWER, self.dof)) * difference.error

    def seeds_needed(self, margin: float, both_sides: bool) -> int | None:
        """Fewest seeds per label, shared by all, that decide a test four times out of five.

        Power calculation at the measured standard deviation, as if the recipes differed from the threshold by
        ``margin``. An interval that must stay within two bounds (two one-sided tests) can miss on both sides.

        Args:
            margin: difference to tell apart, above 0, in the unit of the results.
            both_sides: whether both ends of the interval have a bound.

        Returns:
            At least 2; None if the standard deviation is unknown or over 1000 seeds are needed.
        """
        if not self.known:
            return None
        power = 1 - (1 - _POWER) / 2 if both_sides else _POWER
        others = max(1, len(self._labels) - 1)
        for seeds in range(2, _MOST_SEEDS + 1):
            dof = math.inf if self.method == PRIOR else float(others * (seeds - 1))
            quantiles = t_quantile(0.5 + self._confidence / 2, dof) + t_quantile(power, dof)
            if quantiles * self.sigma * math.sqrt(2 / seeds) <= margin:
                return seeds
        return None

    def mean(self, label: str) -> float:
        """Plain mean over the label's seeds."""
        return float(self._values[label].mean())

    def deviation(self, label: str) -> float:
        """Standard deviation over the label's own seeds; NaN with one."""
        values = self._values[label]
        return float(values.std(ddof=1)) if len(values) > 1 else math.nan

    def unlike(self) -> list[str]:
        """Labels whose own standard deviation is over three times the others', against the model's assumption."""
        found = []
        for label, own in self._spare.items():
            others = sum(self._spare.values()) - own
            rest = sum(self._squares.values()) - self._squares[label]
            if own and others and self._squares[label] / own > _UNLIKE**2 * rest / others:
                found.append(label)
        return found


def t_quantile(probability: float, dof: float) -> float:
    """Quantile of Student's t for this probability; of the normal distribution for infinite ``dof``."""
    from scipy.special import stdtrit  # takes half a second, which most commands do not need

    return float(stdtrit(dof, probability))
