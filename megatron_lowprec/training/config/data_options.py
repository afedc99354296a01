"""Resolves the data and the tokenizer that a run's options name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.arguments import REPOSITORY, find, flag, required
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.data.blend import all_paths, check_split
from megatron_lowprec.training.data.jsonl import SUFFIXES, is_text_file


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
    if config.tokenizer_type == "GPT2BPETokenizer":
        required(config, "vocab_file", "merge_file")
    elif config.tokenizer_type in ("HuggingFaceTokenizer", "SentencePieceTokenizer"):
        required(config, "tokenizer_model")
    else:
        required(config, "vocab_size")
    files = {}
    for name in ("vocab_file", "merge_file", "tokenizer_model"):
        value = getattr(config, name)
        if value is not None:
            files[name] = str(find(value))
            if not Path(files[name]).exists():
                raise UserError(f"{flag(name)} {value}: no such file")
    paths = {
        name: [str(find_data(item)) for item in value] if (value := getattr(config, name)) else None
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_phase_path")
    }
    found: dict[str, Any] = {**files, **paths}
    return replace(config, data_cache_path=config.data_cache_path or str(REPOSITORY / "data" / "cache"), **found)


def _resolve_sft(config: Config) -> Config:
    """Average the loss over tokens: conversations differ in their share of answer tokens."""
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        if getattr(config, name):
            raise UserError(
                f"{flag(name)} is about several documents in a sample, and --sft puts one conversation into each, with "
                "loss on its answers; leave one of the two out"
            )
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
    """A data path, found relative to the current folder or the repository; a weight is returned unchanged."""
    for name in (item, item + ".idx"):
        if Path(name).exists() or not (REPOSITORY / name).exists():
            continue
        return str(REPOSITORY / item)
    return item
