"""Runs that would decide an open claim, with the command of the shipped sweep."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from megatron_lowprec.report.amounts import amount
from megatron_lowprec.report.claims import SIZES, Claim, Claims, Rules, Sizes, Test
from megatron_lowprec.report.groups import Group, find_label
from megatron_lowprec.report.verdict import Held, Outcome, Verdict
from megatron_lowprec.sweep.budgets import Budget, budgets
from megatron_lowprec.sweep.slurm import indices


def required_runs(verdict: Verdict, claims: Claims) -> tuple[str, ...]:
    """Lines on the seeds, parameters and tokens that decide a claim, each followed by its command if a sweep has them.

    The runs are of the recipes that the claim compares, and of its control's where the sweep has them. Runs with too
    few tokens for a verdict are not continued at their own scale. Empty if the claim is decided, names no sweep, or if
    no number of seeds is known to decide it; findings say why.

    Raises:
        UserError: the claim's sweep is missing or wrong.
    """
    claim, group, rules = verdict.claim, verdict.group, claims.rules
    undecided = [each for each in verdict.findings if each.held is Held.OPEN]
    known = [each.seeds for each in undecided if each.seeds is not None]
    if verdict.outcome not in (Outcome.OPEN, Outcome.TOO_FEW_TOKENS) or group is None or claim.sweep is None:
        return ()
    if not undecided or len(known) < len(undecided):
        return ()
    path = f"configs/sweeps/{claim.sweep}.yaml"
    shipped = budgets(path)
    of_tests = [_seeds(group, test.left, test.right) for test in claim.tests]
    at_hand = set.intersection(*of_tests)
    seeds = extended(at_hand or set.union(*of_tests), max(known))
    shipped = [each for each in shipped if None not in _found(each, claim.tests)]
    tests = claim.tests + (claims.named(claim.control).tests if claim.control is not None else ())
    lines: list[str] = []
    if len(seeds) > len(at_hand) and verdict.outcome is Outcome.OPEN:
        same = [each for each in shipped if (each.parameters, each.tokens) == (group.parameters, group.tokens)]
        lines += _lines(f"next, at the scale of these runs: {max(known)} shared seeds", same, path, tests, seeds)
    alone = [each.seeds_alone for each in undecided if each.seeds_alone is not None]
    if not _comparable(claim, group, rules) and len(alone) == len(undecided):
        enough = [each for each in shipped if _comparable(claim, each, rules)]
        what = f"next, at the claim's scale: {_needed(claim, rules)} ({rules.comparable_scale:.0%} of the claim's)"
        new = extended(seeds, max(alone))[: max(alone)]  # runs at hand do not help there
        lines += _lines(f"{what}, {max(alone)} shared seeds", enough, path, tests, new)
    return tuple(lines)


def extended(at_hand: Iterable[int], number: int) -> list[int]:
    """Seeds at hand and as many following ones as make ``number``; all at hand if these are more."""
    seeds = sorted(at_hand)
    first = seeds[-1] + 1
    return [*seeds, *range(first, first + number - len(seeds))]


def _seeds(group: Group, left: str, right: str) -> set[int]:
    """Seeds shared by the two sides of a test."""
    return group.shared_seeds(group.find(left) or left, group.find(right) or right)


def _comparable(claim: Claim, runs: Sizes, rules: Rules) -> bool:
    """Whether the runs are large enough for a verdict at the claim's scale; not if a size is not recorded."""
    return all(here >= rules.comparable_scale * (claimed or 0) for claimed, here in claim.scale.beside(runs).values())


def _needed(claim: Claim, rules: Rules) -> str:
    stated = {name: claimed for name in SIZES if (claimed := getattr(claim.scale, name)) is not None}
    return "at least " + " and ".join(
        f"{amount(rules.comparable_scale * claimed)} {claim.scale.words(name)}" for name, claimed in stated.items()
    )


def _lines(what: str, fitting: list[Budget], path: str, tests: Iterable[Test], seeds: list[int]) -> list[str]:
    """The line, completed with the cheapest of the fitting budgets, and its command."""
    if not fitting:
        return [f"{what}; no size of {path} has such runs of these recipes"]
    budget = min(fitting, key=lambda each: each.parameters * each.tokens)
    at_size = f" at size {budget.size}" if budget.size else ""
    found = _found(budget, tests)
    labels = [label for label, _ in budget.recipes if label in found]
    runs = f"{len(labels) * len(seeds):,} runs of {budget.model}{at_size}"
    scale = f"{amount(budget.parameters)} parameters, {amount(budget.tokens)} tokens each"
    return [f"{what}; {runs} ({scale})", _command(budget, path, labels, seeds)]


def _found(budget: Budget, tests: Iterable[Test]) -> set[str | None]:
    """A budget's labels of the recipes that tests compare, with None if it lacks one."""
    return {find_label(side, budget.recipes) for test in tests for side in (test.left, test.right)}


def _command(budget: Budget, path: str, labels: list[str], seeds: list[int]) -> str:
    words = ["megatron-lowprec", "sweep", path, *(["--size", budget.size] if budget.size else [])]
    words += ["--seeds", indices(seeds)]
    words += [word for pattern in budget.only(labels) for word in ("--only", pattern)]
    for need in budget.needs:
        words += ["--data-path", "DATA"] if need == "data_path" else ["--set", f"{need.replace('_', '-')}=DATA"]
    return shlex.join(words)
