"""Claims of papers as data: the runs to compare, the quantity, and the test."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import build
from megatron_lowprec.recipe.yaml_text import read_yaml_file
from megatron_lowprec.shipped import SHIPPED

CLAIMS = SHIPPED / "configs" / "claims.yaml"

QUANTITIES = {
    "validation_loss": "nats a token",
    "perplexity": "perplexity",
    "perplexity_percent": "% of perplexity",
    "training_loss": "nats a token",
}
FINAL_LOSSES = ("validation_loss", "perplexity_percent")  # quantities that two final losses suffice for
RELATIONS = {
    "above": "above",
    "below": "below",
    "at_most": "at most",
    "within": "within plus or minus",
}
SIZES = ("parameters", "tokens")
BF16 = "bf16"
LOSS = "loss"
KINDS = (LOSS, "memory", "speed", "traffic", "snr", "tasks")


@dataclass(frozen=True)
class Rules:
    """Parameters of the verdicts; docs/guide/report.md.

    ``tokens_per_parameter``, without embeddings, are the fewest with which runs get a verdict. 20 are about those that
    spend a budget of compute best (arXiv 2203.15556); with fewer a gap may still grow or shrink.
    """

    confidence: float = 0.95
    comparable_scale: float = 0.5
    tokens_per_parameter: float = 20.0
    diverged_rise: float = 0.5


@dataclass(frozen=True)
class PriorNoise:
    """Assumed standard deviation between seeds in nats a token, for use without repeated seeds; None if unknown."""

    validation_loss: float | None = None
    training_loss: float | None = None
    source: str | None = None


@dataclass(frozen=True)
class Source:
    """An arXiv number and the location in the paper."""

    arxiv: str
    where: str


class Sizes(Protocol):
    """Of runs; NaN if not recorded. ``parameters`` count embeddings."""

    @property
    def parameters(self) -> float: ...
    @property
    def non_embedding_parameters(self) -> float: ...
    @property
    def tokens(self) -> float: ...


@dataclass(frozen=True)
class Scale:
    """The smallest sizes for which a paper makes its claim; None if it states none.

    ``essential`` names the sizes that are part of the claim ("from 2B parameters on"): runs below them cannot reproduce
    it. ``embeddings`` says whether its parameters count embeddings.
    """

    parameters: int | None
    tokens: int | None
    essential: tuple[str, ...] = ()
    embeddings: bool = True

    def beside(self, runs: Sizes) -> dict[str, tuple[int | None, float]]:
        """Each of ``SIZES``: the claim's, and that of runs, counted alike."""
        parameters = runs.parameters if self.embeddings else runs.non_embedding_parameters
        return dict(zip(SIZES, ((self.parameters, parameters), (self.tokens, runs.tokens)), strict=True))

    def words(self, size: str) -> str:
        """Name of a size, with what it leaves out."""
        return f"{size} without embeddings" if size == "parameters" and not self.embeddings else size

    @property
    def tokens_per_parameter(self) -> float:
        """Infinite if the source states one of the two numbers only."""
        return self.tokens / self.parameters if self.tokens and self.parameters else math.inf


@dataclass(frozen=True)
class Published:
    """Two numbers that a paper prints; ``values`` are left's and right's."""

    quantity: str
    left: str
    right: str
    values: tuple[float, float]
    parameters: int
    tokens: int
    where: str


@dataclass(frozen=True)
class Test:
    """``left`` minus ``right`` in ``quantity`` is in ``relation`` to ``threshold``; ``over`` is a share of the run."""

    __test__ = False  # pytest: not a test

    left: str
    right: str
    quantity: str
    relation: str
    threshold: float
    over: tuple[float, float] | None = None


@dataclass(frozen=True)
class SmallestDifference:
    """The smallest difference that would change a verdict, above 0 in ``unit``; stated before the runs."""

    value: float
    unit: str
    reason: str


@dataclass(frozen=True)
class Stated:
    """A published figure that is not a loss; ``values`` has none, one, or the ends of a range, in ``unit``."""

    left: str
    right: str
    direction: str
    values: tuple[float, ...]
    unit: str
    where: str


@dataclass(frozen=True)
class OthersRecipe:
    """The runs of a published ladder that stand for a recipe: those with all ``settings``, each "column=value"."""

    name: str
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Others:
    """Published runs of another project, to which the claim's tests are applied.

    ``file`` is a ladder (``report/published/ladder.py``), in the claims file relative to it, and ``source`` its
    citation. ``parameters`` are sizes as the ladder counts them. ``condition`` names what differs from the claim's
    recipes; runs that do not ``count`` are shown, but decide nothing.
    """

    file: str
    source: str
    recipes: tuple[OthersRecipe, ...]
    parameters: tuple[int, ...]
    condition: str
    count: bool = True


@dataclass(frozen=True)
class Claim:
    """One sentence of one paper.

    A claim of kind "loss" has tests, which must all hold; ``sweep`` names a sweep with the runs, and ``others`` runs
    of other projects. ``control`` is the id of a claim that must hold in the same runs before this one counts as
    reproduced. A claim of another kind has ``stated`` figures, and ``measured_by`` names the topic that will measure
    them.
    """

    id: str
    source: Source
    sentence: str
    scale: Scale
    smallest_difference: SmallestDifference
    sweep: str | None = None
    published: tuple[Published, ...] = ()
    tests: tuple[Test, ...] = ()
    threshold_from: str = ""
    unpublished: str | None = None
    kind: str = LOSS
    stated: tuple[Stated, ...] = ()
    measured_by: str | None = None
    others: tuple[Others, ...] = ()
    control: str | None = None


@dataclass(frozen=True)
class Claims:
    """A claims file."""

    rules: Rules
    prior_noise: PriorNoise
    claims: tuple[Claim, ...]

    def enough_tokens(self, claim: Claim) -> float:
        """Fewest tokens per parameter with which runs get a verdict on a claim: the rules', or fewer if its source
        has fewer.
        """
        return min(self.rules.tokens_per_parameter, claim.scale.tokens_per_parameter)

    def named(self, name: str) -> Claim:
        """The claim with this id."""
        return next(claim for claim in self.claims if claim.id == name)


def load_claims(path: Path) -> Claims:
    """Read a claims file; configs/claims.yaml documents the format.

    Raises:
        UserError: no such file, invalid YAML, or a field that is missing, unknown or not among its choices.
    """
    content = read_yaml_file(path, str(path), "--claims names a YAML file such as configs/claims.yaml")
    try:
        found = build(Claims, content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    for claim in found.claims:
        _check(claim, f"{path}: claim {claim.id}")
    ids = [claim.id for claim in found.claims]
    for twice in {name for name in ids if ids.count(name) > 1}:
        raise UserError(f"{path} has two claims {twice!r}; give each its own id")
    for claim in found.claims:
        if claim.control is not None:
            where = f"{path}: claim {claim.id}"
            _choice(where, "control", claim.control, [each.id for each in found.claims if each.tests and each != claim])
    return replace(found, claims=tuple(_with_paths(claim, path.parent) for claim in found.claims))


def _with_paths(claim: Claim, folder: Path) -> Claim:
    return replace(claim, others=tuple(replace(each, file=str(folder / each.file)) for each in claim.others))


def _check(claim: Claim, where: str) -> None:
    _choice(where, "kind", claim.kind, KINDS)
    if claim.smallest_difference.value <= 0:
        raise UserError(
            f"{where}: smallest_difference is {claim.smallest_difference.value:g}, but must be above 0: name the "
            "smallest difference that would change the verdict"
        )
    for size in claim.scale.essential:
        _choice(where, "an essential size", size, SIZES)
        if getattr(claim.scale, size) is None:
            raise UserError(f"{where}: {size} cannot be essential to its scale, which gives no number of them")
    if claim.scale.parameters is None and not claim.scale.embeddings:
        raise UserError(f"{where}: embeddings are left out of parameters that its scale does not give; remove one")
    if claim.kind != LOSS:
        _check_other(claim, where)
        return
    for quantity in [test.quantity for test in claim.tests] + [row.quantity for row in claim.published]:
        _choice(where, "quantity", quantity, QUANTITIES)
    if not claim.tests:
        raise UserError(f"{where} has no tests; give it tests of losses, or another kind and measured_by")
    for test in claim.tests:
        _check_test(test, claim.smallest_difference, where)
    if claim.stated or claim.measured_by is not None:
        raise UserError(f"{where}: stated and measured_by are for claims of another kind than {LOSS}; remove them")
    if not claim.threshold_from:
        raise UserError(f"{where} lacks threshold_from: state the origin of its thresholds")
    if not claim.published and not claim.unpublished:
        raise UserError(f"{where} has no published number: say in `unpublished` why")
    for others in claim.others:
        _check_others(others, claim, where)


def _check_others(others: Others, claim: Claim, where: str) -> None:
    where = f"{where}: others"
    if claim.scale.parameters is None or claim.scale.tokens is None:
        raise UserError(f"{where} need the claim's tokens per parameter; give its scale both numbers, or remove others")
    if not others.parameters:
        raise UserError(f"{where} name no size; give `parameters` as the ladder counts them")
    named = [recipe.name for recipe in others.recipes]
    for test in claim.tests:
        _choice(where, "quantity of a test", test.quantity, FINAL_LOSSES)
        for side in (test.left, test.right):
            if side != BF16:
                _choice(where, "a recipe of a test", side, named)
    for setting in (setting for recipe in others.recipes for setting in recipe.settings):
        if "=" not in setting:
            raise UserError(f"{where}: setting {setting!r} must be column=value, such as bstochastic=True")


def _check_other(claim: Claim, where: str) -> None:
    """A claim that is not about losses: no tests, but what was published and the topic that measures it."""
    if claim.tests or claim.published or claim.threshold_from or claim.others:
        raise UserError(
            f"{where} is of kind {claim.kind}, but has tests of losses; remove tests, published, threshold_from, others"
        )
    if not claim.stated or not claim.measured_by:
        raise UserError(f"{where} is of kind {claim.kind}: give `stated` figures and the topic in `measured_by`")
    for row in claim.stated:
        if len(row.values) > 2:
            raise UserError(f"{where}: stated has {len(row.values)} values, but takes none, one, or a range of two")


def _check_test(test: Test, smallest: SmallestDifference, where: str) -> None:
    _choice(where, "relation", test.relation, RELATIONS)
    if (test.quantity == "training_loss") != (test.over is not None):
        raise UserError(f"{where}: training_loss needs a share of the run, `over: [0.05, 0.2]`, and nothing else does")
    if test.over is not None and not 0 <= test.over[0] < test.over[1] <= 1:
        raise UserError(f"{where}: over is {list(test.over)}, but must be two rising shares from 0 to 1")
    if test.relation == "within" and test.threshold <= 0:
        raise UserError(f"{where}: within needs a threshold above 0, not {test.threshold}")
    unit = QUANTITIES[test.quantity]
    if smallest.unit != unit:
        raise UserError(
            f"{where}: smallest_difference is in {smallest.unit!r}, but its test of {test.quantity} in {unit!r}; use "
            "one unit for both"
        )
    if 0 < abs(test.threshold) < smallest.value:
        raise UserError(
            f"{where}: threshold {test.threshold:g} is below the smallest difference that matters, "
            f"{smallest.value:g} {unit}; raise the one, lower the other, or test only the direction (threshold 0)"
        )


def _choice(where: str, name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise UserError(f"{where}: {name} is {value!r}, but must be one of {', '.join(choices)}")
