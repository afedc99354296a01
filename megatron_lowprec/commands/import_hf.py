"""Convert a Hugging Face GPT-2, Llama, Mistral, Qwen2, Qwen3, Mixtral or DeepSeek-V3 to a checkpoint of weights.

    megatron-lowprec import --load gpt2 --save runs/gpt2
    megatron-lowprec eval --load runs/gpt2 --wikitext
    torchrun … pretrain_gpt.py --config runs/gpt2/model.yaml --load runs/gpt2 --finetune --recipe mxfp8 --save …

``--load`` is a folder with config.json and safetensors, one file or several with an index. The vocabulary keeps its
size unless --make-vocab-size-divisible-by pads it with copies of its last row, which tensor parallelism may need.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.paths import check_folder
from megatron_lowprec.training.config.resolve import resolve_model
from megatron_lowprec.training.convert.hf_config import defaults_taken, from_hf_config, vocabulary_of
from megatron_lowprec.training.convert.hf_tokenizer import tokenizer_options
from megatron_lowprec.training.convert.hf_weights import from_hf_weights, is_bf16
from megatron_lowprec.training.convert.store import check_vocabulary, training_hint, write_checkpoint
from megatron_lowprec.training.data.tokenizer import json_object, padded_vocab_size, tokenizer_of


def parse_arguments(arguments: Sequence[str] | None, program: str) -> argparse.Namespace:
    """Flags."""
    parser = Parser(prog=program, description=__doc__)
    parser.add_argument("--load", required=True, metavar="FOLDER", help="folder of the Hugging Face model")
    parser.add_argument("--save", required=True, metavar="FOLDER", help="folder for the checkpoint")
    parser.add_argument("--seq-length", type=int, help="tokens of a sample (default: the maximum in config.json)")
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=1,
        metavar="N",
        help="pad the vocabulary (default: 1, no padding)",
    )
    parser.add_argument("--bf16", action="store_true", help="store bf16 weights (default: if the source has bf16)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, program: str = "import_hf.py") -> int:
    """Exit code: 0, or 2 for a UserError."""
    args = parse_arguments(arguments, program)
    return run_tool(program, lambda: print(*convert(args), sep="\n"))


def convert(args: argparse.Namespace) -> list[str]:
    """Read, convert and write; returns a summary."""
    folder, divisor = Path(args.load).resolve(), args.make_vocab_size_divisible_by
    about = _config(folder)
    options, vocab_size = from_hf_config(about), vocabulary_of(about)
    if args.seq_length is not None:
        options["seq_length"] = args.seq_length
    # Without tokenizer files, samples are token ids, the last of which ends a document.
    files = tokenizer_options(folder)
    named = files or {"tokenizer_type": "NullTokenizer", "vocab_size": vocab_size - 1}
    config = resolve_model(Config(**options, **named, make_vocab_size_divisible_by=divisor))
    tokenizer = tokenizer_of(config)
    check_vocabulary(tokenizer, vocab_size, "config.json's vocab_size is")
    check_folder(Path(args.save), "--save")
    tensors = _tensors(folder)
    config = replace(config, bf16=args.bf16 or is_bf16(config, tensors))
    weights = from_hf_weights(config, tensors, vocab_size, padded_vocab_size(vocab_size, divisor, 1))
    source = f"{about['model_type']} model {folder.name}"
    final = write_checkpoint(Path(args.save), config, weights, source, tokenizer if files else None)
    count, dtype = sum(w.numel() for w in weights.values()), "bf16" if config.bf16 else "fp32"
    taken = ", ".join(f"{name} {value}" for name, value in defaults_taken(about).items())
    return [
        f"{folder} -> {final}: {count:,} weights in {dtype}",
        *([f"config.json lacks keys, which have transformers' defaults: {taken}"] if taken else []),
        f"tokenizer: {tokenizer}"
        if files
        else f"tokenizer: the folder has no file of one, so samples are ids: {tokenizer}",
        training_hint(args.save),
    ]


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise UserError(f"--load {folder}: no config.json there; give a folder with a Hugging Face model")
    return json_object(folder / "config.json")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    index, names = folder / "model.safetensors.index.json", ["model.safetensors"]
    if index.is_file() and not (folder / names[0]).exists():  # a whole file comes first to transformers, too
        places = json_object(index).get("weight_map")
        if not isinstance(places, dict) or not all(Path(str(name)).name == name for name in places.values()):
            raise UserError(f"{index} has no weight_map from tensors to files of its folder")
        names = sorted(set(places.values()))
    found: dict[str, torch.Tensor] = {}
    for name in names:
        try:
            found |= load_file(folder / name)
        except FileNotFoundError:
            raise UserError(f"--load {folder}: no {name}; other formats must be saved as safetensors first") from None
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder}/{name} cannot be read: {error}") from None
    return found
