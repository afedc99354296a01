"""Texts and differences of the figures that papers print."""

from __future__ import annotations

import math

from megatron_lowprec.report.amounts import amount, decimals, signed
from megatron_lowprec.report.claims import QUANTITIES, Claims, Published, Stated
from megatron_lowprec.report.groups import Group


def published_percent(row: Published) -> float:
    """Left's perplexity over right's, minus one, in percent."""
    left, right = row.values
    return 100 * (math.expm1(left - right) if row.quantity == "validation_loss" else left / right - 1)


def published_difference(row: Published) -> str:
    """Text with both numbers and their difference."""
    left, right = row.values
    shown = decimals(2, left, right)
    unit = {"validation_loss": "nats", "perplexity": "perplexity"}.get(row.quantity, QUANTITIES[row.quantity])
    return (
        f"{row.left} {left:.{shown}f}, {row.right} {right:.{shown}f}: {signed(left - right, shown)} {unit}, "
        f"{signed(published_percent(row), 1)}% of "
        f"perplexity ({row.where}; {amount(row.parameters)} parameters, {amount(row.tokens)} tokens)"
    )


def stated_words(row: Stated) -> str:
    """Text with a published figure that is not a loss, and its place."""
    figure = " to ".join(f"{value:g}" for value in row.values)
    return f"{row.left} against {row.right}: {row.direction}, {figure or 'no number printed'} {row.unit} ({row.where})"


def published_gaps(claims: Claims, group: Group) -> dict[str, list[float]]:
    """Label -> distinct published perplexity gaps to the group's reference, percent."""
    gaps: dict[str, list[float]] = {}
    for row in (row for claim in claims.claims for row in claim.published if row.right == group.reference):
        label = group.find(row.left)
        gap = published_percent(row)
        if label is not None and gap not in gaps.setdefault(label, []):
            gaps[label].append(gap)
    return gaps
