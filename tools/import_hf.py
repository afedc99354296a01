"""Convert a Hugging Face GPT-2 or Llama to a checkpoint of weights, for evaluation or further training.

    python tools/import_hf.py --load gpt2 --save runs/gpt2
    python tools/evaluate.py --load runs/gpt2 --wikitext
    torchrun … pretrain_gpt.py --config runs/gpt2/model.yaml --load runs/gpt2 --finetune --recipe mxfp8 --save …

``--load`` is a folder with config.json and safetensors, one file or several with an index. The vocabulary keeps its
size unless --make-vocab-size-divisible-by pads it with copies of its last row, which tensor parallelism may need.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.files import read_json
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.paths import check_folder
from megatron_lowprec.training.config.resolve import resolve_model
from megatron_lowprec.training.convert.hf_config import from_hf_config
from megatron_lowprec.training.convert.hf_tokenizer import tokenizer_options
from megatron_lowprec.training.convert.hf_weights import from_hf_weights
from megatron_lowprec.training.convert.store import write_checkpoint
from megatron_lowprec.training.data.tokenizer import padded_vocab_size, tokenizer_of
from megatron_lowprec.training.distributed import startup


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags."""
    parser = Parser(description=__doc__)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for a UserError."""
    args = parse_arguments(arguments)
    return run_tool("import_hf.py", lambda: print(*convert(args), sep="\n"))


def convert(args: argparse.Namespace) -> list[str]:
    """Read, convert and write; returns a summary."""
    folder = Path(args.load).resolve()
    about = _config(folder)
    options: dict[str, Any] = from_hf_config(about)
    if args.seq_length is not None:
        options["seq_length"] = args.seq_length
    # Without tokenizer files, samples are token ids, one of which ends a document.
    files = tokenizer_options(folder)
    named = files or {"tokenizer_type": "NullTokenizer", "vocab_size": about["vocab_size"] - 1}
    tensors = _tensors(folder)
    bf16 = args.bf16 or all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    divisor = args.make_vocab_size_divisible_by
    check_folder(Path(args.save), "--save")
    config = resolve_model(Config(**options, **named, bf16=bf16, make_vocab_size_divisible_by=divisor))
    rows = padded_vocab_size(about["vocab_size"], divisor, 1)
    weights = from_hf_weights(config, {name: tensor.float() for name, tensor in tensors.items()}, rows)
    source, tokenizer = f"{about['model_type']} model {folder.name}", tokenizer_of(config) if files else None
    final = write_checkpoint(Path(args.save), config, weights, source, tokenizer)
    return [
        f"{folder} -> {final}: {sum(w.numel() for w in weights.values()):,} weights in {'bf16' if bf16 else 'fp32'}",
        f"train with: --config {args.save}/model.yaml --load {args.save} --finetune, with your --lr and data",
    ]


def _config(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / "config.json", "save the model again")
    except FileNotFoundError:
        raise UserError(f"--load {folder}: no config.json there; give a folder with a Hugging Face model") from None


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        places = read_json(index, "save the model again").get("weight_map")
        if type(places) is not dict or any(
            type(name) is not str or Path(name).name != name for name in places.values()
        ):
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


if __name__ == "__main__":
    startup.leave(main())
