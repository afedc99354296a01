"""Reads the archives of result pages by numpy and safetensors, without any code of this project."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from safetensors.numpy import load

RESULTS = Path(__file__).parents[2] / "docs" / "results"

Series = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]


class Archive:
    """Texts and columns of an archive below docs/results."""

    def __init__(self, name: str) -> None:
        self._arrays: dict[str, Any] = load(lzma.decompress((RESULTS / f"{name}.safetensors.xz").read_bytes()))
        header = json.loads(self._arrays["header"].tobytes())
        self.texts: dict[str, str] = header["texts"]
        self._tables = list(enumerate(header["tables"]))

    def options(self, run: str) -> dict[str, Any]:
        """Options of a run's config.yaml."""
        found: dict[str, Any] = yaml.safe_load(self.texts[f"{run}/config.yaml"])["options"]
        return found

    def metrics(self, key: str) -> dict[str, Series]:
        """Folder of a run -> iterations and values of a column of its metrics.jsonl."""
        found: dict[str, Series] = {}
        for number, table in self._tables:
            if table["file"] != "metrics.jsonl" or key not in table["columns"]:
                continue
            iterations, values = self._arrays[f"{number}/iteration"], self._floats(f"{number}/{key}", table)
            ends = np.cumsum(list(table["rows"].values()))
            for run, end, rows in zip(table["rows"], ends, table["rows"].values(), strict=True):
                assert run not in found, f"{run} has {key} in two tables"
                found[run] = iterations[end - rows : end], values[end - rows : end]
        return found

    def _floats(self, name: str, table: Mapping[str, Any]) -> npt.NDArray[np.float64]:
        array = self._arrays[name]
        if table["columns"][name.partition("/")[2]] == "int":
            return array.astype(np.float64)
        values: npt.NDArray[Any] = np.frombuffer(array.T.tobytes(), f"<f{len(array)}")
        return values.astype(np.float64)

    def last(self, key: str) -> dict[str, float]:
        """Last part of a run's folder -> the last value of a column."""
        return {run.rpartition("/")[2]: float(values[-1]) for run, (_, values) in self.metrics(key).items()}
