"""Differences between recipes over seeds, and the smallest significant difference.

One model serves a whole group of runs: a run's result is its recipe's mean, plus its seed's effect if seeds are shared,
plus noise of one standard deviation, pooled over the runs of all recipes but those whose own noise is clearly larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    counts: tuple[int, int]  # seeds on either side

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

    A label whose noise exceeds the others' (F test of the squares that it adds, at most 2% for the whole group) is set
    aside: its runs do not count for the pooled noise, and its differences have noise of their own.

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
        self._labels = list(dict.fromkeys(label for label, _ in results))
        self.aside: tuple[str, ...] = ()
        self.method, self.sigma, self.dof = NONE, math.nan, 0.0
        fewest = 1 if paired else FEWEST
        blocks, independent = _blocks(results), _independent(results)
        self.block_dof = blocks.dof  # that seeds as blocks leave, whether used or not
        if blocks.dof >= fewest:
            self.method = BLOCKS
            self._pool(_blocks, fewest)
        elif independent.dof and not paired:
            self.method = INDEPENDENT
            self._pool(_independent, FEWEST)
        elif prior is not None and not independent.dof:
            self.method, self.sigma, self.dof = PRIOR, prior, math.inf

    def _pool(self, noise_of: Callable[[Results], _Noise], fewest: int) -> None:
        """Set ``sigma`` and ``dof``; labels with clearly more noise than the rest go ``aside``.

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
        self.aside = tuple(removed[:kept])

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
        """Mean difference of two labels over the seeds that both have, NaN without one; of independent runs, the
        difference of their means.
        """
        own_noise = left in self.aside or right in self.aside
        measure = self._of_pairs if self.method == BLOCKS else self._of_means
        value, variance, dof, counts = measure(left, right, own_noise)
        if not self.known or not dof:
            return Difference(value, None, math.inf, 0.0, counts)
        return Difference(value, math.sqrt(variance), t_quantile(0.5 + self._confidence / 2, dof), dof, counts)

    def _of_pairs(self, left: str, right: str, own_noise: bool) -> tuple[float, float, float, tuple[int, int]]:
        """Value, its variance and degrees of freedom, and seeds; own noise: the paired t-test."""
        seeds = [seed for label, seed in self._results if label == left and (right, seed) in self._results]
        pairs = np.array([self._results[left, seed] - self._results[right, seed] for seed in seeds])
        counts = len(pairs), len(pairs)
        dof = len(pairs) - 1.0 if own_noise else self.dof
        if not len(pairs) or not dof:
            return float(pairs.mean()) if len(pairs) else math.nan, math.nan, 0.0, counts
        variance = float(pairs.var(ddof=1)) if own_noise else 2 * self.sigma**2
        return float(pairs.mean()), variance / len(pairs), dof, counts

    def _of_means(self, left: str, right: str, own_noise: bool) -> tuple[float, float, float, tuple[int, int]]:
        """Value, its variance and degrees of freedom, and seeds; own noise: Welch's test."""
        parts, counts = [], (len(self._values(left)), len(self._values(right)))
        for label, count in zip((left, right), counts):
            aside = label in self.aside
            variance = float(self._values(label).var(ddof=1)) if aside else self.sigma**2
            parts.append((variance / count, count - 1.0 if aside else self.dof))
        variance = sum(part for part, _ in parts)
        dof = welch_dof(parts) if own_noise else self.dof
        return self.mean(left) - self.mean(right), variance, dof, counts

    def seeds_needed(
        self, left: str, right: str, margin: float, both_sides: bool, *, alone: bool = False
    ) -> int | None:
        """Fewest seeds of two labels, shared by both, that decide a test of them four times out of five.

        Power calculation at the measured standard deviation, as if the recipes differed from the threshold by
        ``margin``. An interval that must stay within two bounds (two one-sided tests) can miss on both sides.

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
        if left in self.aside or right in self.aside:
            difference = self.difference(left, right)
            if difference.error is None:
                return None
            sigma, more = difference.error / math.sqrt(sum(1 / count for count in difference.counts)), 0
        power = 1 - (1 - _POWER) / 2 if both_sides else _POWER
        for seeds in range(2, _MOST_SEEDS + 1):
            dof = math.inf if self.method == PRIOR else float(seeds - 1 + more)
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


class _Noise(NamedTuple):
    """Residual sum of squares with its degrees of freedom."""

    squares: float  # sum of the squared residuals
    dof: float

    @property
    def sigma(self) -> float:
        return math.sqrt(self.squares / self.dof)


def _independent(results: Results) -> _Noise:
    """Residual noise about each label's mean."""
    values: dict[str, list[float]] = {}
    for (label, _), value in results.items():
        values.setdefault(label, []).append(value)
    squares = sum(float(((np.array(each) - np.mean(each)) ** 2).sum()) for each in values.values())
    return _Noise(squares, float(len(results) - len(values)))


def _blocks(results: Results) -> _Noise:
    """Residual noise about label means plus seed effects."""
    labels = list(dict.fromkeys(label for label, _ in results))
    seeds = list(dict.fromkeys(seed for _, seed in results))
    design = np.zeros((len(results), len(labels) + len(seeds) - 1))
    for row, (label, seed) in enumerate(results):
        design[row, labels.index(label)] = 1.0
        if seeds.index(seed):
            design[row, len(labels) + seeds.index(seed) - 1] = 1.0
    dof = len(results) - int(np.linalg.matrix_rank(design))  # labels that share no seeds lower the rank
    if len(labels) < 2 or not dof:
        return _Noise(0.0, 0.0)
    values = np.array(list(results.values()))
    residual = values - design @ np.linalg.lstsq(design, values)[0]
    return _Noise(float(residual @ residual), float(dof))


def welch_dof(parts: Sequence[tuple[float, float]]) -> float:
    """Welch's degrees of freedom of a sum of independent variances, each given with its own."""
    share = sum(variance**2 / dof for variance, dof in parts)
    return sum(variance for variance, _ in parts) ** 2 / share if share else math.inf


def t_quantile(probability: float, dof: float) -> float:
    """Quantile of Student's t for this probability; of the normal distribution for infinite ``dof``."""
    from scipy.special import stdtrit  # takes half a second, which most commands do not need

    return float(stdtrit(dof, probability))
