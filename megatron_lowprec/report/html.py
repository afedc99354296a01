"""Renders HTML pages that need no other file: a report by page.html.jinja, with the filters that it uses."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_lowprec.report.published.figures import published_difference, stated_words
from megatron_lowprec.report.verdict import Verdict


@dataclass(frozen=True)
class Picture:
    """A figure as PNG, for light and for dark pages."""

    light: bytes
    dark: bytes


REPORT = Path(__file__).with_name("page.html.jinja")


def page(template: Path = REPORT, **content: Any) -> str:
    """The whole HTML file of a template, which may import parts.html.jinja; all text is escaped."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "anchor": _anchor,
        "difference": published_difference,
        "stated": stated_words,
        "png": lambda data: f"data:image/png;base64,{base64.b64encode(data).decode()}",
    }
    return environment.get_template(template.name).render(zip=zip, **content)


def _anchor(verdict: Verdict) -> str:
    where = "" if verdict.group is None else "-" + "".join(c if c.isalnum() else "-" for c in verdict.group.name)
    return f"{verdict.claim.id}{where}"
