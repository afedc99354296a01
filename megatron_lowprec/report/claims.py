"""Claims of papers as data: the runs to compare, the quantity, and the test."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import build
from megatron_lowprec.recipe.yaml_text import read_yaml_file

QUANTITIES = {
    "validation_loss": "nats a token",
    "perplexity": "perplexity",
    "perplexity_percent": "% of perplexity",
    "training_loss": "nats a token",
}
RELATIONS = {
    "above": "above",
    "below": "below",
    "at_most": "at most",
    "within": "within plus or minus",
}
SIZES = ("parameters", "tokens")


@dataclass(frozen=True)
class Rules:
    """Parameters of the verdicts; docs/guide/report.md."""

    confidence: float = 0.95
    comparable_scale: float = 0.5
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


@dataclass(frozen=True)
class Scale:
    """The smallest sizes for which a paper makes its claim; None if it states none.

    ``essential`` names the sizes that are part of the claim ("from 2B parameters on"): runs below them cannot reproduce
    it.
    """

    parameters: int | None
    tokens: int | None
    essential: tuple[str, ...] = ()


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
class Claim:
    """One sentence of one paper, and the tests that must all hold for it; ``sweep`` names a sweep with the runs."""

    id: str
    source: Source
    sentence: str
    sweep: str | None
    scale: Scale
    published: tuple[Published, ...]
    tests: tuple[Test, ...]
    threshold_from: str
    unpublished: str | None = None


@dataclass(frozen=True)
class Claims:
    """A claims file."""

    rules: Rules
    prior_noise: PriorNoise
    claims: tuple[Claim, ...]


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
    return found


def _check(claim: Claim, where: str) -> None:
    for quantity in [test.quantity for test in claim.tests] + [row.quantity for row in claim.published]:
        _choice(where, "quantity", quantity, QUANTITIES)
    for test in claim.tests:
        _choice(where, "relation", test.relation, RELATIONS)
        if (test.quantity == "training_loss") != (test.over is not None):
            raise UserError(
                f"{where}: training_loss needs a share of the run, `over: [0.05, 0.2]`, and nothing else does"
            )
        if test.over is not None and not 0 <= test.over[0] < test.over[1] <= 1:
            raise UserError(f"{where}: over is {list(test.over)}, but must be two rising shares from 0 to 1")
        if test.relation == "within" and test.threshold <= 0:
            raise UserError(f"{where}: within needs a threshold above 0, not {test.threshold}")
    for size in claim.scale.essential:
        _choice(where, "an essential size", size, SIZES)
        if getattr(claim.scale, size) is None:
            raise UserError(f"{where}: {size} cannot be essential to its scale, which gives no number of them")
    if not claim.tests:
        raise UserError(f"{where} has no tests; a claim that nothing can test belongs elsewhere")
    if not claim.published and not claim.unpublished:
        raise UserError(f"{where} has no published number: say in `unpublished` why")


def _choice(where: str, name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise UserError(f"{where}: {name} is {value!r}, but must be one of {', '.join(choices)}")
