"""Reads the archives of result pages by numpy and safetensors, without any code of this project."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from safetensors.numpy import load

RESULTS = Path(__file__).parents[2] / "docs" / "results"

Series = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]


class Archive:
    """Texts and columns of archives below docs/results, as of one; names have spaces between them."""

    def __init__(self, names: str) -> None:
        self.texts: dict[str, str] = {}
        self._tables: list[tuple[dict[str, Any], int, dict[str, Any]]] = []
        """Arrays of its archive, number and description of a table."""
        for name in names.split():
            arrays = load(lzma.decompress((RESULTS / f"{name}.safetensors.xz").read_bytes()))
            header = json.loads(arrays["header"].tobytes())
            self.texts |= header["texts"]
            self._tables += [(arrays, number, table) for number, table in enumerate(header["tables"])]

    def options(self, run: str) -> dict[str, Any]:
        """Options of a run's config.yaml."""
        found: dict[str, Any] = yaml.safe_load(self.texts[f"{run}/config.yaml"])["options"]
        return found

    def metrics(self, key: str) -> dict[str, Series]:
        """Folder of a run -> iterations and values of a column of its metrics.jsonl."""
        found: dict[str, Series] = {}
        for arrays, number, table in self._tables:
            if table["file"] != "metrics.jsonl" or key not in table["columns"]:
                continue
            iterations = arrays[f"{number}/iteration"]
            values = _floats(arrays[f"{number}/{key}"], table["columns"][key])
            ends = np.cumsum(list(table["rows"].values()))
            for run, end, rows in zip(table["rows"], ends, table["rows"].values(), strict=True):
                assert run not in found, f"{run} has {key} in two tables"
                found[run] = iterations[end - rows : end], values[end - rows : end]
        return found

    def last(self, key: str) -> dict[str, float]:
        """Last part of a run's folder -> the last value of a column."""
        return {run.rpartition("/")[2]: float(values[-1]) for run, (_, values) in self.metrics(key).items()}


def _floats(array: npt.NDArray[Any], kind: str) -> npt.NDArray[np.float64]:
    if kind == "int":
        return array.astype(np.float64)
    values: npt.NDArray[Any] = np.frombuffer(array.T.tobytes(), f"<f{len(array)}")
    return values.astype(np.float64)
