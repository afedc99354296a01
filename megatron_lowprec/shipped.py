"""Files that the package ships: configurations of models, recipes, sweeps and claims, vocabularies and small texts."""

from __future__ import annotations

import difflib
from pathlib import Path

SHIPPED = Path(__file__).parent
"""Folder with ``configs/`` and ``data/``, which options and YAML files name by these paths."""


def find(path: str, folder: str = "") -> Path:
    """An existing path as it is, else the shipped file: ``configs/models/gpt_tiny.yaml``, or ``gpt_tiny`` of a folder.

    A folder in the working folder, such as a run's, does not hide the shipped file of its name.

    Args:
        path: of a user's file, or of a shipped one; relative to the working folder first.
        folder: of shipped YAML files that are known by their names, such as ``configs/models``.
    """
    here = Path(path)
    short = bool(folder) and here.name == path
    if here.is_file() or here.is_absolute() or (here.exists() and not short):
        return here
    for name in (path, f"{folder}/{path}.yaml") if short else (path,):
        if name.startswith(("configs/", "data/")) and (SHIPPED / name).exists():
            return SHIPPED / name
    return here


def names_in(folder: str) -> list[str]:
    """Names of a folder's shipped YAML files, sorted."""
    return sorted(path.stem for path in (SHIPPED / folder).glob("*.yaml"))


def shipped_like(path: str, folder: str) -> str:
    """Hint for a missing file: the shipped one of a similar name in a folder, else the folder."""
    near = difflib.get_close_matches(Path(path).stem, names_in(folder), n=1)
    return f"did you mean {folder}/{near[0]}.yaml?" if near else f"the shipped ones are in {folder}/"
