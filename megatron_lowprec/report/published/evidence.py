"""Applies the tests of claims to runs that other projects published. docs/guide/report.md states the rule in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from megatron_lowprec.errors import UserError
from megatron_lowprec.report.amounts import amount, percent, share, signed
from megatron_lowprec.report.claims import BF16, QUANTITIES, RELATIONS, Claim, Claims, Others, Rules, Test
from megatron_lowprec.report.published.ladder import BASELINE, PublishedRun, loss_ladder, read_ladder
from megatron_lowprec.report.verdict import Held, Outcome, decide

LEFT_OPEN = (
    Outcome.NOT_AT_THIS_SCALE,
    Outcome.OPEN,
    Outcome.TOO_FEW_TOKENS,
    Outcome.UNPAIRED,
    Outcome.NOT_TESTED,
)
"""Outcomes of own runs that others' evidence stands beside."""


class Said(Enum):
    """What others' runs say of a claim."""

    SUPPORTED = "supported by others' runs"
    CONTRADICTED = "contradicted by others' runs"
    NOT_AT_THEIR_SCALE = "not reproduced by others' runs at their scale"
    DISAGREE = "others' runs disagree"
    UNDECIDED = "not decided by others' runs"


@dataclass(frozen=True)
class Evidence:
    """What others' runs say of a claim, and the lines that it follows from. It never changes the own verdict."""

    said: Said
    words: tuple[str, ...]


def evidence(claims: Claims) -> dict[str, Evidence]:
    """Claim id -> evidence, for the claims that name published runs.

    Raises:
        UserError: a ladder that cannot be read, or without long enough runs of a claim's recipes, or with several.
    """
    files = {others.file for claim in claims.claims for others in claim.others}
    ladders = {file: read_ladder(Path(file)) for file in sorted(files)}
    return {claim.id: _evidence(claim, claims.rules, ladders) for claim in claims.claims if claim.others}


def _evidence(claim: Claim, rules: Rules, ladders: Mapping[str, list[PublishedRun]]) -> Evidence:
    smallest = claim.smallest_difference
    words = [
        f"one seed each, spread unknown: each difference is taken as uncertain by {smallest.value:g} {smallest.unit}"
    ]
    found: set[Said] = set()
    for others in claim.others:
        words.append(f"{others.source}: {others.condition}")
        for parameters in others.parameters:
            losses = _losses(claim, others, ladders[others.file], parameters)
            findings = [(test, *_applied(test, losses, smallest.value)) for test in claim.tests]
            ignored = _ignored(claim, others, parameters, rules)
            words.append(_sizes(claim, parameters, losses[BF16]) + (f"; not counted: {ignored}" if ignored else ""))
            words += [_finding(*finding) for finding in findings]
            if not ignored:
                held = _together({held for *_, held in findings})
                found.add(_at_scale(held, claim, rules, parameters))
    return Evidence(_said(found), tuple(words))


def _losses(claim: Claim, others: Others, runs: list[PublishedRun], parameters: int) -> dict[str, dict[int, float]]:
    """Recipe -> tokens -> final loss in nats, bf16 included, of runs as long for their size as the claim's."""
    settings = {recipe.name: dict(each.split("=", 1) for each in recipe.settings) for recipe in others.recipes}
    settings[BF16] = {"group": BASELINE}
    losses = {name: loss_ladder(runs, parameters, **each) for name, each in settings.items()}
    assert claim.scale.parameters is not None  # load_claims has checked both
    assert claim.scale.tokens is not None
    least = claim.scale.tokens / claim.scale.parameters
    shared = [
        tokens
        for tokens in losses[BF16]
        if tokens / parameters >= least and all(tokens in ladder for ladder in losses.values())
    ]
    if not shared:
        counts = ", ".join(f"{len(ladder)} of {name}" for name, ladder in losses.items())
        raise UserError(
            f"claim {claim.id}: {others.file} has no runs of {parameters} parameters with equal tokens, at least "
            f"{least:.0f} a parameter, of all recipes (of any length: {counts}); change parameters or settings"
        )
    return {name: {tokens: ladder[tokens] for tokens in shared} for name, ladder in losses.items()}


def _applied(test: Test, losses: Mapping[str, Mapping[int, float]], smallest: float) -> tuple[list[float], Held]:
    """Differences in the test's unit by rising tokens, and what all of them say; OPEN if they do not say the same."""
    left, right = losses[test.left], losses[test.right]
    nats = [left[tokens] - right[tokens] for tokens in left]
    differences = [percent(each) for each in nats] if test.quantity == "perplexity_percent" else nats
    held = {decide(test.relation, test.threshold, (each - smallest, each + smallest)) for each in differences}
    return differences, held.pop() if len(held) == 1 else Held.OPEN


def _together(held: Collection[Held]) -> Held:
    """Of a claim's tests all must hold, and one that fails suffices."""
    if Held.NO in held:
        return Held.NO
    return Held.OPEN if Held.OPEN in held else Held.YES


def _at_scale(held: Held, claim: Claim, rules: Rules, parameters: int) -> Said:
    """What the runs of one size say; as with own runs, only those of comparable scale contradict."""
    if held is not Held.NO:
        return Said.SUPPORTED if held is Held.YES else Said.UNDECIDED
    # They have the claim's tokens a parameter at the least, so the parameters alone tell.
    comparable = parameters >= rules.comparable_scale * (claim.scale.parameters or 0)
    return Said.CONTRADICTED if comparable else Said.NOT_AT_THEIR_SCALE


def _said(found: Collection[Said]) -> Said:
    against = [each for each in (Said.CONTRADICTED, Said.NOT_AT_THEIR_SCALE) if each in found]
    if against and Said.SUPPORTED in found:
        return Said.DISAGREE
    return against[0] if against else Said.SUPPORTED if Said.SUPPORTED in found else Said.UNDECIDED


def _ignored(claim: Claim, others: Others, parameters: int, rules: Rules) -> str:
    """Why runs of a size decide nothing; empty if they may."""
    if not others.count:
        return "their recipe is another"
    claimed = claim.scale.parameters or 0
    if "parameters" in claim.scale.essential and parameters < rules.comparable_scale * claimed:
        return "the claim is about its number of parameters"
    return ""


def _sizes(claim: Claim, parameters: int, tokens: Collection[int]) -> str:
    ratios = ", ".join(f"{each / parameters:.0f}" for each in tokens)
    parts = []
    for name, most in (("parameters", parameters), ("tokens", max(tokens))):
        claimed = getattr(claim.scale, name)
        parts.append(f"{amount(most)} {name} for {amount(claimed)}, {share(most / claimed)}")
    return f"{parts[0]}; up to {parts[1]}; at {ratios} tokens a parameter"


def _finding(test: Test, differences: list[float], held: Held) -> str:
    decimals = 2 if test.quantity == "perplexity_percent" else 4
    numbers = ", ".join(signed(each, decimals) for each in differences)
    asked = f"{RELATIONS[test.relation]} {test.threshold:g}"
    return f"{test.left} less {test.right}: {numbers} {QUANTITIES[test.quantity]}; {asked}: {held.value}"
