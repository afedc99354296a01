"""Reads the scores of texts in a run's evaluation.json, for reports. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TextLoss:
    """Loss of a run's last checkpoint on a text, under the recipe that it was trained under."""

    nats: float  # a token
    bits: float  # a byte of the text; NaN if its bytes are not recorded
    how: tuple[str, ...]  # window, stride and number of tokens; scores that differ in one are not comparable


def read_scores(content: Mapping[str, Any], last: int, say: Callable[[str], None]) -> dict[str, TextLoss]:
    """Path -> loss under the checkpoint's own recipe; empty if there are none, or if any is damaged.

    Args:
        content: of evaluation.json. WikiText gets a path that ends in its name.
        last: the run's last iteration; scores of another one are dropped.
        say: called with what was dropped.
    """
    found: dict[str, TextLoss] = {}
    try:
        for each in content.get("evaluations", [content] if content else []):
            if each["recipe"] != each["trained_under"]:
                continue
            if each.get("iteration", last) != last:
                say(f"dropped, scores of iteration {each['iteration']}: the run ended at {last}; score that checkpoint")
                continue
            scores = dict(each["data"].items())
            if "wikitext" in each:
                scores[f"{each['wikitext'].get('file', '')}/WikiText"] = each["wikitext"]
            for path, score in scores.items():
                how = {"window": each.get("window"), "stride": each.get("stride"), "tokens": score.get("tokens")}
                words = tuple(f"{name} {'unrecorded' if value is None else value}" for name, value in how.items())
                found[path] = TextLoss(float(score["loss"]), float(score.get("bits_per_byte", math.nan)), words)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        say(f"dropped, no scores of megatron-lowprec eval ({type(error).__name__})")
        return {}
    return found
