"""Claims of papers as data: the runs to compare, the quantity, and the test."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.yaml_text import read_yaml_text

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
    """How verdicts are found; docs/guide/report.md."""

    confidence: float = 0.95
    comparable_scale: float = 0.5
    diverged_rise: float = 0.5


@dataclass(frozen=True)
class PriorNoise:
    """Standard deviation between seeds, nats a token, to assume where nothing repeats; None for unknown."""

    validation_loss: float | None = None
    training_loss: float | None = None
    source: str | None = None


@dataclass(frozen=True)
class Source:
    """An arXiv number and the place in it."""

    arxiv: str
    where: str


@dataclass(frozen=True)
class Scale:
    """The smallest sizes that a paper makes its claim for; None if it states none.

    ``essential`` names the sizes that the sentence itself is about ("from 2B parameters on"): runs that are smaller in
    them cannot reproduce it.
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
    """``left`` less ``right`` in ``quantity`` is in ``relation`` to ``threshold``; ``over`` is a share of the run."""

    __test__ = False  # pytest: not a test

    left: str
    right: str
    quantity: str
    relation: str
    threshold: float
    over: tuple[float, float] | None = None


@dataclass(frozen=True)
class Claim:
    """One sentence of one paper, and the tests that must all hold for it; ``sweep`` is one that has the runs."""

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
    """Read a claims file; configs/claims.yaml explains itself.

    Raises:
        UserError: no such file, no YAML, or a field that is missing, unknown or not among its choices.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise UserError(f"{path}: no such file; --claims names a YAML file such as configs/claims.yaml") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is no UTF-8 text; --claims names a YAML file such as configs/claims.yaml") from None
    found = _build(Claims, read_yaml_text(text, str(path)), str(path))
    assert isinstance(found, Claims)
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


def _build(cls: type, data: Any, where: str) -> Any:
    """A dataclass from a mapping, nested; lists become tuples."""
    if not isinstance(data, Mapping):
        raise UserError(f"{where} is {data!r}, but must be a mapping of {', '.join(get_type_hints(cls))}")
    hints = get_type_hints(cls)
    for key in data:
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1)
            raise UserError(f"{where} has no field {key!r}: {f'did you mean {near[0]}?' if near else ', '.join(hints)}")
    fields = dataclasses.fields(cls)
    missing = [each.name for each in fields if each.default is dataclasses.MISSING and each.name not in data]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}")
    return cls(**{key: _value(hints[key], value, f"{where}: {key}") for key, value in data.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, value, where)
    options = get_args(hint)
    if type(None) in options:
        return None if value is None else _value(options[0], value, where)
    if options:  # tuples
        if not isinstance(value, list) or (options[-1] is not ... and len(value) != len(options)):
            raise UserError(f"{where} is {value!r}, but must be a list{'' if options[-1] is ... else ' of two'}")
        return tuple(_value(options[0], item, where) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or isinstance(value, bool):
        hurt = " (write 33_000_000_000, for YAML reads 33e9 as text)" if hint in (int, float) else ""
        raise UserError(f"{where} is {value!r}, but must be of type {hint.__name__}{hurt}")
    return value
