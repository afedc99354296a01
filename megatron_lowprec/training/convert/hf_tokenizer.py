"""Tokenizer files under Hugging Face's names, and the options that name them here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.shipped import find
from megatron_lowprec.training.data.tokenizer import END_OF_TEXT, end_tokens, json_object
from megatron_lowprec.training.options.dataset_options import DataOptions


def write_tokenizer(config: DataOptions, context: int, folder: Path) -> list[str]:
    """Write a run's tokenizer into a model's folder; returns the file names, none for a NullTokenizer.

    Args:
        context: context length of the model in tokens.
    """
    if config.tokenizer_type == "GPT2BPETokenizer":
        assert config.vocab_file is not None, "resolve() asks for it"
        assert config.merge_file is not None, "resolve() asks for it"
        return _write_gpt2(find(config.vocab_file), find(config.merge_file), context, folder)
    if config.tokenizer_type == "SentencePieceTokenizer":
        assert config.tokenizer_model is not None, "resolve() asks for it"
        shutil.copyfile(find(config.tokenizer_model), folder / "tokenizer.model")
        return ["tokenizer.model"]
    if config.tokenizer_type == "HuggingFaceTokenizer":
        assert config.tokenizer_model is not None, "resolve() asks for it"
        source = find(config.tokenizer_model)
        files = {"tokenizer.json": source / "tokenizer.json" if source.is_dir() else source}
        beside = _OF_A_TOKENIZER if source.is_dir() else _NAMES_OF_TOKENS
        files |= {name: files["tokenizer.json"].with_name(name) for name in beside}
        written = {name: file for name, file in files.items() if file.is_file()}
        for name, file in written.items():
            shutil.copyfile(file, folder / name)
        return [*written]
    return []


_NAMES_OF_TOKENS = ("tokenizer_config.json", "special_tokens_map.json")
_OF_A_TOKENIZER = (
    *_NAMES_OF_TOKENS,
    *("vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "chat_template.jinja"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)


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
    """Options for the tokenizer in a Hugging Face model's folder: that of tokenizer.json, else GPT-2's two files, else
    tokenizer.model, which is SentencePiece's.

    A tokenizer.json of GPT-2's own tokenizer is named by these files, as a corpus prepared with them is.
    Empty for a folder without any file of a tokenizer.

    Raises:
        UserError: files of a tokenizer that these options cannot describe.
    """
    vocab, merges, whole = (folder / name for name in ("vocab.json", "merges.txt", "tokenizer.json"))
    gpt2 = {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": str(vocab), "merge_file": str(merges)}
    found = [name for name in _OF_A_TOKENIZER if (folder / name).is_file()]
    reason = _not_gpt2(folder)
    if whole.is_file():
        hugging_face = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
        return gpt2 if reason is None and _is_of(whole, vocab, merges) else hugging_face
    if reason is not None and "tokenizer.model" in found:
        return {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(folder / "tokenizer.model")}
    if found and reason is not None:
        raise UserError(
            f"{folder} has {', '.join(found)} but no tokenizer.json, and {reason}: write one there with transformers' "
            "AutoTokenizer, from_pretrained and then save_pretrained"
        )
    return gpt2 if found else {}


def _not_gpt2(folder: Path) -> str | None:
    """Why vocab.json and merges.txt are not known to be those of GPT-2's tokenizer, None if they are."""
    for name in ("vocab.json", "merges.txt"):
        if not (folder / name).is_file():
            return f"GPT-2's would have {name}"
    about = json_object(folder / "tokenizer_config.json")
    kind = about.get("tokenizer_class") or json_object(folder / "config.json").get("model_type")
    if kind not in ("GPT2Tokenizer", "GPT2TokenizerFast", "gpt2"):
        return f"how a {kind} tokenizer splits text is not in these files"
    if about.get("add_prefix_space"):
        return "it adds a space in front of a text, which GPT2BPETokenizer does not"
    ours = (END_OF_TEXT, json_object(folder / "vocab.json").get(END_OF_TEXT))
    if ours[1] is None:
        return f"vocab.json has no {END_OF_TEXT}"
    for name, theirs in end_tokens(folder)[:1]:
        if theirs not in ours:
            return f"{name} names the end of a text {theirs!r}, which is not GPT2BPETokenizer's {END_OF_TEXT}"
    return None


def _is_of(whole: Path, vocab: Path, merges: Path) -> bool:
    """Whether a tokenizer.json gives the ids of GPT2BPETokenizer with these two files."""
    from tokenizers import Tokenizer, models

    try:
        theirs = json.loads(Tokenizer.from_file(str(whole)).to_str())
        model = json.loads(Tokenizer(models.BPE.from_file(str(vocab), str(merges))).to_str())["model"]
    except Exception:  # noqa: BLE001 - the library raises bare Exception; the tokenizer's own reader names the fault
        return False
    split = theirs["pre_tokenizer"] or {}
    plain = split.get("type") == "ByteLevel" and split.get("use_regex", True) and not split.get("add_prefix_space")
    changes = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
    return (
        plain
        and theirs["normalizer"] is None
        and not any(theirs["model"].get(name) for name in changes)
        and all(theirs["model"].get(name) == model[name] for name in ("type", "vocab", "merges"))
        and {token["content"] for token in theirs["added_tokens"]} <= {END_OF_TEXT}
    )
