"""A report as one HTML file that needs nothing else: styles inline, figures as data, no scripts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from megatron_lowprec.report.claims import QUANTITIES
from megatron_lowprec.report.tables import Table
from megatron_lowprec.report.verdict import Outcome, Verdict, published_difference

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --muted: #59636e; --line: #d8dee4; --back: #f6f8fa; --card: #ffffff;
  --good: #1a7f37; --bad: #c62828; --warn: #9a6700; --open: #59636e; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --muted: #9da7b1; --line: #30363d; --back: #0d1117;
  --card: #161b22; --good: #4ac26b; --bad: #ff7b72; --warn: #e3b341; --open: #9da7b1; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif;
  overflow-wrap: break-word; }
main { max-width: 68rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { margin: .5rem 0; }
.muted { color: var(--muted); font-size: .9rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .75rem 1rem;
  margin: .75rem 0; }
.card p { margin: .35rem 0; }
.badge { display: inline-block; border: 1.5px solid; border-radius: 1rem; padding: .05rem .65rem; font-size: .85rem;
  font-weight: 600; margin-right: .5rem; }
.reproduced { color: var(--good); } .contradicted { color: var(--bad); } .scale { color: var(--warn); }
.open { color: var(--open); }
.wide { overflow-x: auto; margin: .75rem 0; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .4rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top;
  white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
th { vertical-align: bottom; font-weight: 600; } th small { display: block; color: var(--muted); font-weight: 400; }
.word { text-align: left; }
td.long { white-space: normal; min-width: 16rem; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--card); }
.overview { list-style: none; padding: 0; margin: .75rem 0; }
.overview li { margin: .4rem 0; } .overview a { text-decoration-color: var(--line); }
a { color: inherit; }
.figures { display: grid; gap: .75rem; margin: .75rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .5rem; }
figure.one { max-width: 44rem; }
img { max-width: 100%; height: auto; display: block; margin: 0 auto; }
figcaption { color: var(--muted); font-size: .85rem; padding: .35rem .25rem 0; }
dl { display: grid; grid-template-columns: minmax(5rem, max-content) 1fr; gap: .15rem .75rem; margin: .35rem 0;
  font-size: .9rem; }
dt { color: var(--muted); } dd { margin: 0; }
"""

_CLASSES = {
    Outcome.REPRODUCED: "reproduced",
    Outcome.CONTRADICTED: "contradicted",
    Outcome.NOT_AT_THIS_SCALE: "scale",
    Outcome.NOT_RESOLVABLE: "open",
    Outcome.NOT_TESTED: "open",
}


@dataclass(frozen=True)
class Picture:
    """A figure as PNG for light and for dark pages, and what it shows."""

    light: bytes
    dark: bytes
    caption: str


def page(title: str, body: Sequence[str]) -> str:
    """The whole file."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )


def heading(words: str, level: int = 2) -> str:
    """h2 or h3."""
    return f"<h{level}>{escape(words)}</h{level}>"


def paragraph(words: str, *, muted: bool = False) -> str:
    """One."""
    return f"<p{' class=muted' if muted else ''}>{escape(words)}</p>"


def table(content: Table) -> str:
    """Scrolls sideways where it is wider than the page; its first column stays."""

    def name(column: str) -> str:
        first, _, unit = column.partition("\n")
        small = f"<small>{escape(unit)}</small>" if unit else ""
        return f"<th{_kinds(word=column in content.left)}>{escape(first)}{small}</th>"

    def cell(column: str, words: str) -> str:
        return f"<td{_kinds(word=column in content.left, long=len(words) > 48)}>{escape(words)}</td>"

    head = "".join(map(name, content.columns))
    rows = ["".join(map(cell, content.columns, row)) for row in content.rows]
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody><tr>{'</tr><tr>'.join(rows)}</tr></tbody></table></div>"
    )


def picture(content: Picture, *, alone: bool = False) -> str:
    """Light or dark, as the page is shown."""
    light, dark = (base64.b64encode(data).decode() for data in (content.light, content.dark))
    return (
        f'<figure{" class=one" if alone else ""}><picture><source media="(prefers-color-scheme: dark)" '
        f'srcset="data:image/png;base64,{dark}"><img alt="{escape(content.caption, quote=True)}" '
        f'src="data:image/png;base64,{light}"></picture><figcaption>{escape(content.caption)}</figcaption></figure>'
    )


def figures(parts: Sequence[str]) -> str:
    """Side by side where there is room."""
    return f'<div class="figures">{"".join(parts)}</div>'


def overview(verdicts: Sequence[Verdict]) -> str:
    """Every verdict in a line that leads to its card."""
    lines = [
        f'<li>{_badge(found)}<a href="#{_anchor(found)}">{escape(found.claim.sentence)}</a> '
        f'<span class="muted">{escape(_measured(found))}</span></li>'
        for found in verdicts
    ]
    return f'<ul class="overview">{"".join(lines)}</ul>'


def verdict(found: Verdict) -> str:
    """A claim's card."""
    claim = found.claim
    published = [published_difference(row) for row in claim.published] or [str(claim.unpublished)]
    rows = [
        ("published", published),
        ("measured", [finding.words for finding in found.findings]),
        ("scale", [found.scale]),
        ("threshold", [f"{_thresholds(found)}: {claim.threshold_from}"]),
    ]
    if found.group is not None:
        rows.insert(0, ("runs", [found.group.name]))
    elif claim.sweep is not None:
        rows.append(("sweep", [f"configs/sweeps/{claim.sweep}.yaml has such runs"]))
    lines = "".join(f"<dt>{name}</dt><dd>{'<br>'.join(map(escape, words))}</dd>" for name, words in rows)
    link = f'<a href="https://arxiv.org/abs/{escape(claim.source.arxiv)}">arXiv {escape(claim.source.arxiv)}</a>'
    return (
        f'<div class="card" id="{_anchor(found)}"><p>{_badge(found)}{escape(claim.sentence)}</p><dl>{lines}</dl>'
        f'<p class="muted">{link}, {escape(claim.source.where)}; claim {escape(claim.id)}</p></div>'
    )


def _badge(found: Verdict) -> str:
    return f'<span class="badge {_CLASSES[found.outcome]}">{found.outcome.value}</span>'


def _anchor(found: Verdict) -> str:
    where = "" if found.group is None else "-" + "".join(c if c.isalnum() else "-" for c in found.group.name)
    return escape(f"{found.claim.id}{where}", quote=True)


def _measured(found: Verdict) -> str:
    """The measured differences alone; why there are none is on the card."""
    return "; ".join(finding.brief for finding in found.findings if finding.brief)


def _thresholds(found: Verdict) -> str:
    units = dict.fromkeys(f"{test.threshold:g} {QUANTITIES[test.quantity]}" for test in found.claim.tests)
    return ", ".join(units)


def _kinds(**kinds: bool) -> str:
    names = " ".join(name for name, holds in kinds.items() if holds)
    return f' class="{names}"' if names else ""
