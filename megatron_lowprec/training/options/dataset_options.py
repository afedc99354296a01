"""Options of data and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lowprec.training.options.declaration import Group, Part, arg


@dataclass(frozen=True)
class DataOptions(Group):
    """data and tokenizer"""

    PART = Part.DATA

    data_path: list[str] | None = arg(
        None,
        "prefixes of .bin/.idx or .jsonl files, each after an optional weight",
        one_of="data",
        path="data",
    )
    train_data_path: list[str] | None = arg(None, "the same for training only", one_of="data/by split", path="data")
    valid_data_path: list[str] | None = arg(
        None, "the same for validation only", Part.EVALUATION, one_of="data/by split", path="data"
    )
    test_data_path: list[str] | None = arg(
        None, "the same for the test only", Part.EXECUTION, one_of="data/by split", path="data"
    )
    data_phase_switch: float | None = arg(
        None,
        "share of the run after which training continues with --data-phase-path (ours)",
        Part.SCHEDULE,
        one_of="data switch",
    )
    data_phase_switch_samples: int | None = arg(None, "the same in samples (ours)", one_of="data switch", own_note=True)
    data_phase_path: list[str] | None = arg(None, "the second blend, written as --data-path (ours)", path="data")
    sft: bool = arg(False, "train on conversations (JSON lines with messages), with a loss on the answers only")
    sft_tokenizer_prompt_format: Literal["tulu"] = arg("tulu", "template of the conversations of --sft", Part.UPDATE)
    mock_data: bool = arg(False, "learnable arithmetic sequences instead of data", one_of="data")
    split: str = arg("969,30,1", "how --data-path's documents are cut into train, validation and test")
    data_cache_path: str | None = arg(
        None, "where tokenized text and indices are kept; default data/cache", Part.OUTPUT
    )
    eod_mask_loss: bool = arg(False, "no loss on the token behind a document's end", Part.UPDATE, needs="!sft")
    reset_position_ids: bool = arg(
        False,
        "count learned positions from the start of each document; rope is unaffected",
        Part.UPDATE,
        needs="!sft",
    )
    reset_attention_mask: bool = arg(
        False,
        "let no token attend to an earlier document of its sample; slower, for GPUs' fastest kernels take no mask",
        Part.UPDATE,
        needs="transformer_impl=local !sft",
    )
    verify_data: bool = arg(
        False,
        "before training, read the data of each path and compare it with its checksums; once for the same files",
        Part.OUTPUT,
    )
    num_workers: int = arg(
        0, "processes that load data; 0 loads in this one (Megatron's default is 2)", Part.OUTPUT, least=0
    )
    tokenizer_type: Literal["GPT2BPETokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer", "NullTokenizer"] = (
        arg("GPT2BPETokenizer", "kind of tokenizer", Part.TOKENIZER)
    )
    tokenizer_model: str | None = arg(
        None,
        "tokenizer.json, or a folder with one, for HuggingFaceTokenizer; tokenizer.model for SentencePieceTokenizer",
        Part.TOKENIZER,
        path="tokenizer",
        needs="tokenizer_type=HuggingFaceTokenizer|SentencePieceTokenizer",
    )
    vocab_file: str | None = arg(None, "vocab.json for GPT2BPETokenizer", Part.TOKENIZER, path="tokenizer")
    merge_file: str | None = arg(None, "merges.txt for GPT2BPETokenizer", Part.TOKENIZER, path="tokenizer")
    vocab_size: int | None = arg(None, "entries of NullTokenizer", Part.TOKENIZER)
    make_vocab_size_divisible_by: int = arg(
        128, "pad the vocabulary to a multiple of this x tensor-parallel size", Part.TOKENIZER, least=1
    )
