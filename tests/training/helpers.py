"""Small runs of the driver."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import launch

REPOSITORY = Path(__file__).resolve().parents[2]

# Two layers, random tokens: what a test leaves out.
TINY: dict[str, Any] = {
    "num-layers": 2,
    "hidden-size": 64,
    "num-attention-heads": 2,
    "seq-length": 32,
    "micro-batch-size": 2,
    "global-batch-size": 4,
    "lr": 1e-3,
    "train-iters": 2,
    "eval-iters": 0,
    "log-interval": 1,
    "mock-data": True,
    "tokenizer-type": "NullTokenizer",
    "vocab-size": 255,
    "distributed-timeout-minutes": 60,
}
LLAMA: dict[str, Any] = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "group_query_attention": True,
    "num_query_groups": 1,
    "untie_embeddings_and_output_weights": True,
    "disable_bias_linear": True,
}


def argv(**changes: Any) -> list[str]:
    """Command line of TINY with changes: ``name=True`` is a switch, ``name=None`` leaves a flag out."""
    options = {**TINY, **{name.replace("_", "-"): value for name, value in changes.items()}}
    arguments: list[str] = []
    for name, value in options.items():
        if value is True:
            arguments.append(f"--{name}")
        elif value is not None:
            arguments += [f"--{name}", *([str(v) for v in value] if isinstance(value, list) else [str(value)])]
    return arguments


def many_runs(processes: int, cases: list[list[str]], cwd: Path) -> None:
    """Several command lines, one after the other, in one launch; ``errors.json`` has the errors by number."""
    path = cwd / "cases.json"
    path.write_text(json.dumps(cases))
    launch.fork_ranks(processes, ["tests/training/many_runs.py", str(path)], cwd)


def rows(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """All of a run's metrics, or of another file of JSON lines."""
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def losses(folder: Path) -> list[str]:
    """Training losses of a run, exact."""
    return [row["lm loss hex"] for row in rows(folder) if "lm loss hex" in row]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process and its children may grow beyond that: as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
