"""Tokenizer files under Hugging Face's names, and the options that name them here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megatron_lowprec.files import read_json
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.data.tokenizer import END_OF_TEXT


def write_tokenizer(config: Config, folder: Path) -> list[str]:
    """Write a run's tokenizer into a model's folder; returns the file names, none for a NullTokenizer."""
    if config.tokenizer_type == "GPT2BPETokenizer":
        assert config.vocab_file is not None, "resolve() asks for it"
        assert config.merge_file is not None, "resolve() asks for it"
        return _write_gpt2(Path(config.vocab_file), Path(config.merge_file), sized_context(config), folder)
    if config.tokenizer_type == "HuggingFaceTokenizer":
        assert config.tokenizer_model is not None, "resolve() asks for it"
        source = Path(config.tokenizer_model)
        files = [source] if source.is_file() else [source / name for name in _HF_FILES if (source / name).is_file()]
        beside = source.parent / "tokenizer_config.json"
        files += [beside] if source.is_file() and beside.is_file() else []
        for file in files:
            shutil.copyfile(file, folder / ("tokenizer.json" if file == source else file.name))
        return ["tokenizer.json" if file == source else file.name for file in files]
    return []


_HF_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")


def sized_context(config: Config) -> int:
    """Context length of the model in tokens."""
    return config.max_position_embeddings or config.seq_length or 1024


def _write_gpt2(vocab: Path, merges: Path, context: int, folder: Path) -> list[str]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    shutil.copyfile(vocab, folder / "vocab.json")
    shutil.copyfile(merges, folder / "merges.txt")
    backend = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_special_tokens([AddedToken(END_OF_TEXT, normalized=True, special=True)])
    backend.save(str(folder / "tokenizer.json"))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    about = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "model_max_length": context, **special}
    for name, content in (("tokenizer_config.json", about), ("special_tokens_map.json", special)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return ["vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]


def tokenizer_options(folder: Path) -> dict[str, Any]:
    """Options for the tokenizer in a Hugging Face model's folder; empty if there is none."""
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    known = read_json(vocab, "save the tokenizer again", len) if vocab.is_file() and merges.is_file() else {}
    if END_OF_TEXT in known:
        return {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": str(vocab), "merge_file": str(merges)}
    if (folder / "tokenizer.json").is_file():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    return {}
