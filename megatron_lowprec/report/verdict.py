"""Judges claims by runs. docs/guide/report.md states the rules in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from megatron_lowprec.report.amounts import DASH, amount, decimals, share, signed
from megatron_lowprec.report.claims import LOSS, QUANTITIES, RELATIONS, Claim, Claims, Rules, Scale, Test
from megatron_lowprec.report.curve import Status
from megatron_lowprec.report.groups import Group, differing_options
from megatron_lowprec.report.statistics import PRIOR, Difference, Fit

Interval = tuple[float, float]


class Held(Enum):
    """Outcome of one test."""

    YES = "holds"
    NO = "fails"
    OPEN = "open"
    UNPAIRED = "refused"
    MISSING = "not tested"


class Outcome(Enum):
    """Outcome of a claim; reports list them in this order."""

    REPRODUCED = "reproduced"
    REPRODUCED_AT_THIS_SCALE = "reproduced at this scale"
    CONTRADICTED = "contradicted"
    NOT_AT_THIS_SCALE = "not reproduced at this scale"
    OPEN = "open"
    TOO_FEW_TOKENS = "no verdict, too few tokens per parameter"
    UNPAIRED = "refused, runs are not paired"
    NOT_TESTED = "not tested by these runs"
    NOT_LOSSES = "open, not measured by losses"


@dataclass(frozen=True)
class Finding:
    """One test's result; ``measured`` and ``interval`` in the test's unit, None without numbers.

    ``words`` is the full text, ``unjudged`` the part without a ruling, ``brief`` the difference and the relation asked.
    """

    test: Test
    held: Held
    words: str
    unjudged: str = ""
    brief: str = ""
    measured: float | None = None
    interval: Interval | None = None
    # Shared seeds that resolve an open test: beside the group's other recipes, and of its two recipes alone.
    seeds: int | None = None
    seeds_alone: int | None = None

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """What was compared, the difference, its interval, and the relation asked, with the unit; for a table."""
        unit = QUANTITIES[self.test.quantity]
        low, high = (_number(end, self.test, unit=False) for end in self.interval or (math.nan, math.nan))
        number = DASH if self.measured is None else _number(self.measured, self.test, unit=False)
        interval = "unknown" if self.interval is None else f"{low} to {high}"
        return f"{self.test.left} less {self.test.right}", number, interval, _relation(self.test, f" {unit}")


@dataclass(frozen=True)
class Verdict:
    """Verdict on a claim by one group of runs; ``group`` is None if no group has its recipes."""

    claim: Claim
    group: Group | None
    outcome: Outcome
    findings: tuple[Finding, ...]
    scale: str
    note: str = ""  # the topic that measures a claim which is not about losses
    required: tuple[str, ...] = ()  # runs that would decide an open claim, with commands

    @property
    def measured(self) -> tuple[str, ...]:
        """The texts of the findings, each once: two tests may lack the same run."""
        judged = self.outcome is not Outcome.TOO_FEW_TOKENS
        return tuple(dict.fromkeys(each.words if judged else each.unjudged or each.words for each in self.findings))

    @property
    def margin(self) -> str:
        """What the claim's tests ask, and where that comes from; empty for a claim without tests."""
        asked = dict.fromkeys(_relation(test, f" {QUANTITIES[test.quantity]}") for test in self.claim.tests)
        return f"{', '.join(asked)}: {self.claim.threshold_from}" if asked else ""


def judge_all(claims: Claims, groups: Sequence[Group]) -> list[Verdict]:
    """A verdict for each claim and each group that has runs of all its recipes; "not tested" if none has."""
    verdicts = []
    for claim in claims.claims:
        if claim.kind != LOSS:
            verdicts.append(_not_losses(claim))
            continue
        found = [judge(claim, group, claims) for group in groups]
        tested = [verdict for verdict in found if verdict.outcome is not Outcome.NOT_TESTED]
        partly = [verdict for verdict in found if any(each.held is not Held.MISSING for each in verdict.findings)]
        verdicts += tested or partly or [_apart(claim, groups) or _untested(claim, found)]
    return verdicts


def judge(claim: Claim, group: Group, claims: Claims) -> Verdict:
    """The verdict on a claim by one group of runs.

    All tests hold: reproduced, unless the runs are too small in a size that the claim is about, or the claim's control
    does not hold in them. One fails: contradicted. If model or tokens are not comparable with the claim's, these become
    reproduced and not reproduced at this scale. One lacks runs: not tested. One compares runs that are not paired:
    refused. The runs have too few tokens per parameter: no verdict. Otherwise open.
    """
    findings = tuple(_finding(test, claim, group, claims) for test in claim.tests)
    scale, too_small = _scale(claim, group, claims.rules)
    held = {finding.held for finding in findings}
    if Held.MISSING in held:
        outcome = Outcome.NOT_TESTED
    elif Held.UNPAIRED in held:
        outcome = Outcome.UNPAIRED
    elif not group.tokens_per_parameter >= claims.enough_tokens(claim):  # also if not known
        outcome = Outcome.TOO_FEW_TOKENS
        here = "unknown" if math.isnan(group.tokens_per_parameter) else f"{group.tokens_per_parameter:.1f}"
        scale += f"; {here} tokens per parameter without embeddings; a verdict takes {claims.enough_tokens(claim):.3g}"
    elif Held.NO in held:
        outcome = Outcome.NOT_AT_THIS_SCALE if too_small else Outcome.CONTRADICTED
    elif Held.OPEN in held:
        outcome = Outcome.OPEN
    elif too_small.intersection(claim.scale.essential):
        outcome = Outcome.NOT_AT_THIS_SCALE
        scale += f" (the claim itself is about its number of {' and '.join(claim.scale.essential)})"
    elif claim.control is not None and not _holds(claims.named(claim.control), group, claims):
        outcome = Outcome.NOT_AT_THIS_SCALE
        scale += f" (claim {claim.control} does not hold in these runs, so they cannot show that this recipe is better)"
    else:
        outcome = Outcome.REPRODUCED_AT_THIS_SCALE if too_small else Outcome.REPRODUCED
    return Verdict(claim, group, outcome, findings, scale)


def _holds(claim: Claim, group: Group, claims: Claims) -> bool:
    return all(_finding(test, claim, group, claims).held is Held.YES for test in claim.tests)


def decide(relation: str, threshold: float, interval: Interval, smallest: float = 0.0) -> Held:
    """Whether a difference with a known interval is in a relation to a threshold.

    YES if the relation holds in the whole interval, NO if it holds nowhere in it, else OPEN. ``above`` or ``below`` a
    threshold of 0 is NO as well if the whole interval is within plus or minus ``smallest``: the recipes are equivalent
    (two one-sided tests), whatever the sign. Interval ends may be infinite.
    """
    low, high = interval
    if relation in ("above", "below") and threshold == 0 and -smallest <= low and high <= smallest and smallest > 0:
        return Held.NO
    holds, fails = {
        "above": (low > threshold, high <= threshold),
        "below": (high < threshold, low >= threshold),
        "at_most": (high <= threshold, low > threshold),
        "within": (-threshold <= low and high <= threshold, low > threshold or high < -threshold),
    }[relation]
    return Held.YES if holds else Held.NO if fails else Held.OPEN


def _finding(test: Test, claim: Claim, group: Group, claims: Claims) -> Finding:
    labels = group.find(test.left), group.find(test.right)
    for asked, label in zip((test.left, test.right), labels):
        if label is None:
            return Finding(test, Held.MISSING, f"no run of {asked}")
    left, right = str(labels[0]), str(labels[1])
    if left == right:
        return Finding(test, Held.MISSING, f"{test.left} and {test.right} are the same runs, {left}")
    if test.over is not None:
        results, prior = group.training_losses(*test.over), claims.prior_noise.training_loss
    else:
        results, prior = group.final_losses(), claims.prior_noise.validation_loss
    seeds = group.shared_seeds(left, right)
    for label in (left, right):
        if not any(each == label for each, _ in results) and not _diverged(group, label, test):
            lacking = ", with half of its training losses finite" if test.over else ""
            return Finding(test, Held.MISSING, f"no run of {label} came far enough{lacking}")
    name = f"{left} less {right}"
    reason = group.unpaired(left, right)
    if reason is not None:
        return Finding(test, Held.UNPAIRED, f"{name}: not compared, {reason}", brief=f"{name} not paired")
    # A claim needs runs of one seed on both sides, which share weights, data order and dropout. All other runs of the
    # group add to the estimates of the noise and of the seeds' effects.
    have = {label: sum((label, seed) in results for seed in seeds) for label in (left, right)}
    diverged = {label: _diverged(group, label, test) for label in (left, right)}
    for label in (left, right):
        if not have[label] and not diverged[label]:
            return Finding(test, Held.MISSING, f"no run of {label} came far enough under a shared seed")
    if not have[left] or not have[right]:
        return _all_diverged(test, name, left, right, have, diverged)
    fit = Fit(results, claims.rules.confidence, prior, paired=True)
    difference = fit.difference(left, right)
    convert = _conversion(test.quantity, fit.mean(right))
    low, high = difference.interval
    # A diverged run has no final loss; it can only have been worse than any.
    interval = convert(-math.inf if diverged[right] else low), convert(math.inf if diverged[left] else high)
    smallest = claim.smallest_difference.value
    held = decide(test.relation, test.threshold, interval, smallest)
    measured = convert(difference.value)
    alike = constant(fit, left, right)
    how = "paired" if {left, right} & {*fit.aside} else fit.method
    unjudged = f"{name}: {_number(measured, test)}, {_basis(difference, fit, claims.rules, convert, test, how, alike)}"
    unjudged += _diverged_words(diverged)
    words = f"{unjudged}; {_relation(test)}: {held.value}"
    needed, alone = None, None
    if held is Held.OPEN and any(diverged.values()):
        words += "; diverged runs leave the difference without a bound, which more seeds do not mend"
    elif held is Held.OPEN and alike:
        words += "; more seeds would show the same"
    elif held is Held.OPEN:
        needed, alone, reason = _needed(test, smallest, fit, difference, (left, right))
        words += f"; {reason}"
    elif held is Held.NO and test.threshold == 0 and -smallest <= interval[0] and interval[1] <= smallest:
        words += f", within the smallest difference that matters, {_amount(smallest, test)}"
    brief = f"{name} {_number(measured, test)}, asked: {_relation(test)}"
    return Finding(test, held, words, unjudged, brief, measured, interval, needed, alone)


def _diverged(group: Group, label: str, test: Test) -> int:
    """Diverged runs of a label that count for a test; of any seed, since they only weaken a finding if unshared."""
    return 0 if test.over else len(group.of(label, Status.DIVERGED))


def _needed(
    test: Test, smallest: float, fit: Fit, difference: Difference, labels: tuple[str, str]
) -> tuple[int | None, int | None, str]:
    """Seeds that decide a difference of the smallest size that matters, those of the two recipes alone, and a text.

    A number is 2 if the spread is unknown, and None if it is over 1,000. ``labels`` are the test's left and right.
    """
    unit = _amount(smallest, test)
    if difference.error is None:
        words = f"the spread over seeds is unknown; train two shared seeds or more to learn how many resolve {unit}"
        return 2, 2, words
    margin = _in_nats(smallest, test.quantity, fit.mean(labels[1]))
    seeds = fit.seeds_needed(*labels, margin, test.relation == "within")
    alone = fit.seeds_needed(*labels, margin, test.relation == "within", alone=True)
    spread = f"resolve {unit} at the measured spread"
    if seeds is None:
        return None, alone, f"over 1,000 shared seeds are needed to {spread}"
    if seeds <= min(difference.counts):
        return seeds, alone, f"{seeds} shared seeds {spread}, but the difference is closer to the threshold"
    return seeds, alone, f"at least {seeds} shared seeds are needed to {spread}"


def _all_diverged(
    test: Test, name: str, left: str, right: str, have: dict[str, int], diverged: dict[str, int]
) -> Finding:
    """Finding if no run of one side has a final loss. Two diverged runs count as a gap beyond any, unless runs of the
    other side diverged as well; a single one may be chance.
    """
    label = right if not have[right] else left
    words = f"{name}: every run of {label} that came to an end diverged ({diverged[label]})"
    if not have[right]:
        return Finding(test, Held.OPEN, f"{words}, so there is nothing to compare with")
    if diverged[left] < 2:
        return Finding(test, Held.OPEN, f"{words}; one run may be chance")
    if diverged[right]:
        return Finding(test, Held.OPEN, f"{words}, and so did {diverged[right]} of {right}")
    held = decide(test.relation, test.threshold, (math.inf, math.inf))
    ruling = f"{words}; {_relation(test)}: {held.value}"
    return Finding(test, held, ruling, words, f"{label} diverged", math.inf, (math.inf, math.inf))


def _conversion(quantity: str, right: float) -> Callable[[float], float]:
    """From a difference of losses to the test's unit; increasing, so it maps intervals by their ends."""
    if quantity == "perplexity_percent":
        return lambda loss: 100 * math.expm1(loss) if loss < 700 else math.inf
    if quantity == "perplexity":
        return lambda loss: math.exp(right) * math.expm1(loss) if loss < 700 else math.inf
    return lambda loss: loss


def _in_nats(value: float, quantity: str, right: float) -> float:
    """A difference in the test's unit as a difference of losses; ``right`` is the mean loss of the right side."""
    if quantity == "perplexity_percent":
        return math.log1p(value / 100)
    return math.log1p(value / math.exp(right)) if quantity == "perplexity" else value


def constant(fit: Fit, left: str, right: str) -> str:
    """How two recipes compare if their difference is the same under seeds that differ, else empty."""
    gap = fit.difference(left, right).value
    differ = any(round(fit.deviation(label), 9) > 0 for label in (left, right))
    if fit.known or not fit.dof or not differ or math.isnan(gap):
        return ""
    return "equally far apart" if round(gap, 9) else "equal bit for bit"


def _basis(
    difference: Difference, fit: Fit, rules: Rules, convert: Callable[[float], float], test: Test, how: str, alike: str
) -> str:
    seeds = "{} and {} seeds".format(*difference.counts)
    if difference.error is None:
        reason = "their losses are equal to the last bit" if fit.dof > 0 else "no recipe has two to pair"
        if fit.known:
            reason = "a recipe that scatters more needs two pairs of its own"
        elif alike:
            reason = f"{alike} under each"
        return f"of unknown uncertainty ({seeds}; {reason})"
    low, high = (_number(convert(end), test, unit=False) for end in difference.interval)
    noise = "a prior standard deviation" if fit.method == PRIOR else f"{difference.dof:.0f} degrees of freedom"
    how = "" if fit.method == PRIOR else f"{how}, "
    return f"{rules.confidence:.0%} interval {low} to {high} ({how}{seeds}, {noise})"


def _relation(test: Test, unit: str = "") -> str:
    shown = decimals(3 if test.quantity in ("validation_loss", "training_loss") else 2, test.threshold)
    over = f" over {test.over[0]:.0%} to {test.over[1]:.0%} of the run" if test.over else ""
    return f"{RELATIONS[test.relation]} {test.threshold:.{shown}f}{unit}{over}"


def _amount(value: float, test: Test) -> str:
    return f"{value:g} {QUANTITIES[test.quantity]}"


def _number(value: float, test: Test, unit: bool = True) -> str:
    shown = decimals(4 if test.quantity in ("validation_loss", "training_loss") else 2, test.threshold)
    return signed(value, shown) + (f" {QUANTITIES[test.quantity]}" if unit else "")


def _diverged_words(diverged: dict[str, int]) -> str:
    parts = [f"{count} of {label} diverged" for label, count in diverged.items() if count]
    return f" of those that finished, while {' and '.join(parts)}" if parts else ""


def _scale(claim: Claim, group: Group, rules: Rules) -> tuple[str, set[str]]:
    """Text on how far the runs' sizes are from the claim's, and the sizes too small to contradict it."""
    parts, too_small = [], set()
    for name, (claimed, here) in claim.scale.beside(group).items():
        what = claim.scale.words(name)
        if claimed is None:
            parts.append(f"{amount(here)} {what} (the source does not say on how many)")
        elif math.isnan(here):
            parts.append(f"an unrecorded number of {what} for {amount(claimed)}")
            too_small.add(name)
        else:
            parts.append(f"{amount(here)} {what} for {amount(claimed)}, {share(here / claimed)}")
            if here < rules.comparable_scale * claimed:
                too_small.add(name)
    return "; ".join(parts), too_small


def _not_losses(claim: Claim) -> Verdict:
    """The verdict on a claim that is not about losses: open, with the topic that measures it."""
    note = f"{claim.kind}, not measured by losses; measured by: {claim.measured_by}"
    return Verdict(claim, None, Outcome.NOT_LOSSES, (), _claimed(claim), note)


def _apart(claim: Claim, groups: Sequence[Group]) -> Verdict | None:
    """The verdict "refused" if runs of all recipes exist, but of different groups; names the options that differ.

    None if a recipe has no runs, or if a group has all of them.
    """
    findings = []
    for test in claim.tests:
        lefts, rights = ([group for group in groups if group.find(name)] for name in (test.left, test.right))
        if not lefts or not rights:
            return None
        pairs = [(a, b) for a in lefts for b in rights if a is not b]
        if not pairs or any(a is b for a in lefts for b in rights):
            continue
        options, a, b = min(((differing_options(a, b), a, b) for a, b in pairs), key=lambda each: len(each[0]))
        words = f"{test.left} of {a.name} and {test.right} of {b.name} are not compared: {', '.join(options)}"
        words += "; train both with equal model, data, tokens and schedule"
        findings.append(Finding(test, Held.UNPAIRED, words))
    return Verdict(claim, None, Outcome.UNPAIRED, tuple(findings), _claimed(claim)) if findings else None


def _claimed(claim: Claim) -> str:
    return f"made for {_words(claim.scale)}"


def _words(scale: Scale) -> str:
    return f"{amount(scale.parameters)} {scale.words('parameters')} and {amount(scale.tokens)} tokens"


def _untested(claim: Claim, found: Sequence[Verdict]) -> Verdict:
    """The verdict "not tested", with what is missing in the group that lacks the fewest of the claim's runs."""

    def lacking(verdict: Verdict) -> int:
        asked = {name for test in claim.tests for name in (test.left, test.right)}
        return sum(verdict.group is not None and verdict.group.find(name) is None for name in asked)

    closest = min(found, key=lacking, default=None)
    findings = closest.findings if closest is not None else ()
    if closest is not None and closest.group is not None and len(found) > 1:
        findings = tuple(replace(each, words=f"{each.words} among {closest.group.name}") for each in findings)
    scale = f"would need about {_words(claim.scale)}"
    return Verdict(claim, None, Outcome.NOT_TESTED, findings, scale)
