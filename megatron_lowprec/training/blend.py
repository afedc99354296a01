"""Data paths with or without weights, checked before anything starts. No megatron."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_lowprec.errors import UserError
from megatron_lowprec.training import corpus
from megatron_lowprec.training.config import Config
from megatron_lowprec.training.jsonl import is_text_file
from megatron_lowprec.training.tokenizer import Tokenizer

SPLITS = ("train", "valid", "test")


def data_paths(config: Config, split: str) -> list[str]:
    """What the options name for one of SPLITS, weights included; empty where they name nothing."""
    if config.data_path is not None:
        return config.data_path
    separate = {"train": config.train_data_path, "valid": config.valid_data_path, "test": config.test_data_path}
    return separate[split] or []


def parse_blend(items: Sequence[str]) -> list[tuple[str, float | None]]:
    """``["0.3", "A", "0.7", "B"]`` or ``["A", "B"]`` as (path, weight); no weights are None."""

    def number(item: str) -> float | None:
        try:
            return float(item)
        except ValueError:
            return None

    weights = [number(item) for item in items]
    if all(w is None for w in weights):
        return [(item, None) for item in items]
    if len(items) % 2 or any(w is None for w in weights[::2]) or any(w is not None for w in weights[1::2]):
        raise UserError(f"data paths {' '.join(items)}: give either no weights or one before every path")
    if any(w is None or not w > 0 for w in weights[::2]):
        raise UserError(f"data paths {' '.join(items)}: every weight must be above 0")
    return list(zip(items[1::2], weights[::2], strict=True))


def all_paths(config: Config) -> list[str]:
    """Every data path once, sorted, without weights."""
    return sorted({path for split in SPLITS for path, _ in parse_blend(data_paths(config, split))})


def check_paths(config: Config, tokenizer: Tokenizer) -> None:
    """Refuse data that is not there, or that another vocabulary has written."""
    for path in [] if config.mock_data else all_paths(config):
        if not is_text_file(path):
            corpus.check_prefix(path, tokenizer)
        elif not Path(path).is_file():
            raise UserError(f"data path {path}: no such file; check the path")
