"""Resolves the data and the tokenizer that a run's options name."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.shipped import find
from megatron_lowprec.training.config.arguments import flag, required
from megatron_lowprec.training.config.options import Config, options_with
from megatron_lowprec.training.data.blend import all_paths, check_split
from megatron_lowprec.training.data.jsonl import SUFFIXES, is_text_file
from megatron_lowprec.training.data.tokenizer import TOKENIZER_FILES

DATA_CACHE = "data/cache"
"""Default of --data-cache-path, in the working folder."""


def resolve_data(config: Config) -> Config:
    """Full paths of data and tokenizer; rejects missing files and conflicting options."""
    if config.sft:
        config = _resolve_sft(config)
    check_split(config.split)
    separate = (config.train_data_path, config.valid_data_path, config.test_data_path)
    if not config.mock_data and config.data_path is None and config.train_data_path is None:
        raise UserError("no data: give --data-path, --train-data-path or --mock-data")
    if any(separate) and config.data_path is not None:
        raise UserError("--data-path and --train-data-path exclude each other; leave one out")
    required(config, *(TOKENIZER_FILES[config.tokenizer_type] or ("vocab_size",)))
    for name in options_with(path="tokenizer"):
        value = getattr(config, name)
        if value is not None and not find(value).exists():  # the tokenizer finds it by the same name
            raise UserError(f"{flag(name)} {value}: no such file")
    paths: dict[str, Any] = {
        name: [str(find_data(item)) for item in value] if (value := getattr(config, name)) else None
        for name in options_with(path="data")
    }
    return replace(config, data_cache_path=config.data_cache_path or DATA_CACHE, **paths)


def check_tokenizer_files(options: Namespace) -> None:
    """Reject files that the type of tokenizer does not read."""
    for name in options_with(path="tokenizer"):
        if getattr(options, name) is not None and name not in TOKENIZER_FILES[options.tokenizer_type]:
            readers = " or ".join(kind for kind, files in TOKENIZER_FILES.items() if name in files)
            raise UserError(
                f"{flag(name)} is not read by --tokenizer-type {options.tokenizer_type}; give --tokenizer-type "
                f"{readers}, or leave {flag(name)} out"
            )


def _resolve_sft(config: Config) -> Config:
    """Average the loss over tokens: conversations differ in their share of answer tokens."""
    if config.mock_data:
        raise UserError("--sft learns from conversations and --mock-data are none; leave one out")
    if config.tokenizer_type == "NullTokenizer":
        raise UserError(
            "--sft writes conversations out as text, which NullTokenizer cannot read; use another tokenizer"
        )
    for path in all_paths(config):
        if not is_text_file(path):
            raise UserError(
                f"data path {path}: --sft reads conversations as JSON lines ({', '.join(SUFFIXES)}); name such files"
            )
    return replace(config, calculate_per_token_loss=True)


def find_data(item: str) -> str:
    """A data path, found in the current folder or among the shipped files; a weight is returned unchanged."""
    return item if Path(item + ".idx").exists() else str(find(item))
