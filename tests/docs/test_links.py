"""What the pages point at is there: pages, headings, files, modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_lowprec.shipped import SHIPPED
from tests.docs.markdown import PAGES, ROOT, fences, name_of, prose, spans

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.M)
_FOLDERS = ("configs", "data", "docs", "megatron_lowprec", "requirements", "scripts", "tests", "tools")
# Names in the pages that are made by what the page describes, or that are the reader's own.
_MADE = ("data/cache", "data/wikipedia", "runs/", "reports/", "SAVE/", "corpus", "my_")
_FILE = re.compile(r"(?:[\w.*{},-]+/)*[\w.*{},-]+\.(?:py|yaml|yml|sbatch|toml|txt|md|jsonl?|xz|png)\b(?!\.)")
# Written by a run, a tool or another project's model.
_OUTPUTS = {
    *("config.yaml", "run.json", "sweep.json", "metrics.jsonl", "metadata.json", "model.yaml", "requeue", "loss.png"),
    *(
        "log.txt",
        "cell.json",
        "sweep.sbatch",
        "bad_numbers.md",
        "latest_checkpointed_iteration.txt",
        "config.json",
        "tokenizer.json",
        "vocab.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
    ),
    *("quantization.jsonl", "quantization.png", "gap_by_tokens.png", "evaluation.json", "norms.json"),
    *("checksums.json", "verified.json"),
    *("merges.txt", "wikitext.json", "recipes.json", "encoder.json", "mine.yaml", "my_recipe.yaml"),
}


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    found: set[str] = set()
    for heading in _HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = 0
        while (unique := slug if not number else f"{slug}-{number}") in found:
            number += 1
        found.add(unique)
    return found


def links(page: Path) -> list[str]:
    return _LINK.findall(prose(page))


def test_pages_and_links_are_found() -> None:
    assert len(PAGES) > 10
    assert sum(len(links(page)) for page in PAGES) > 20


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        assert target.exists(), f"{link} is not there"
        if anchor:
            assert anchor in anchors(target), f"{link}: {name_of(target)} has the headings {sorted(anchors(target))}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_web_address_is_of_a_private_host(page: Path) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            assert link.startswith("https://"), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    missing = [span for span in spans(page) for name in _named(span) if not _exists(page, name)]
    assert missing == []


def _named(span: str) -> list[str]:
    """Files in a code span; a folder's name counts where it is one of the repository's."""
    names = [match[0] for match in _FILE.finditer(span) if _stands_alone(span, match)]
    return names + [word for word in span.split() if word.split("/")[0] in _FOLDERS and "/" in word]


def _stands_alone(span: str, match: re.Match[str]) -> bool:
    """Not a part of a longer path, such as one that starts at a variable, nor a pattern in capitals."""
    before, after = span[: match.start()][-1:], span[match.end() :][:1]
    return before not in ("/", "$", "_", "…", "<", "]") and after not in ("/", "[") and not match[0].isupper()


def _exists(page: Path, name: str) -> bool:
    name = name.rstrip(":,").partition(":")[0]
    if name.startswith(_MADE) or name in _OUTPUTS or name.split(".")[0].isupper():
        return True
    patterns = [name]
    if match := re.search(r"\{([^}]*)\}", name):
        patterns = [name.replace(match[0], word) for word in match[1].split(",")]
    # Modules are named as seen from the package, pages and results as seen from the page.
    bases = (ROOT, ROOT / "megatron_lowprec", SHIPPED / "data", page.parent)
    if name.endswith(".py") and "/" not in name:
        return (
            any(any((ROOT / folder).rglob(name)) for folder in ("megatron_lowprec", "tools")) or (ROOT / name).exists()
        )
    return all(any(any(base.glob(pattern.rstrip("/"))) for base in bases) for pattern in patterns)


def test_pages_that_the_code_names_exist() -> None:
    code = [
        file for folder in _FOLDERS for suffix in ("py", "yaml", "sh") for file in (ROOT / folder).rglob(f"*.{suffix}")
    ]
    named = {name for file in code for name in re.findall(r"\bdocs/[\w/.-]+\.md\b", file.read_text(encoding="utf-8"))}
    assert len(named) > 8
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_a_missing_name_is_noticed() -> None:
    page = ROOT / "README.md"
    assert _exists(page, "configs/models/gpt_tiny.yaml")
    assert _exists(page, "configs/recipes/*.yaml")
    assert _exists(page, "kernels/cast_fp8/triton.py")
    assert not _exists(page, "configs/models/gpt_none.yaml")
    assert not _exists(page, "tools/none.py")
    assert _named("python tools/none.py --recipe mxfp8") == ["tools/none.py", "tools/none.py"]
    assert _named("runs/x/iter_…") == []


def test_fences_are_closed_and_of_known_kinds() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(re.findall(r"^```", text, re.M)) == 2 * len(fences(page)), name_of(page)
        assert {fence.language for fence in fences(page)} <= {"", "text", "python", "yaml", "mermaid"}, name_of(page)
