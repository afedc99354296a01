"""Every reader of the repository, with small files as its writers write them."""

from __future__ import annotations

from pathlib import Path

from tools.fuzz.of_checkpoints import of_checkpoints
from tools.fuzz.of_corpora import of_corpora
from tools.fuzz.of_models import of_models, of_tools
from tools.fuzz.of_runs import of_runs
from tools.fuzz.of_text import of_text
from tools.fuzz.run import FuzzedReader


def readers(made: Path) -> list[FuzzedReader]:
    """All readers; ``made`` is the folder of ``template``."""
    return [*of_text(), *of_runs(made), *of_checkpoints(made), *of_corpora(), *of_models(made), *of_tools(made)]
