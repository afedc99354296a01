"""Convert a GPT checkpoint of stock Megatron-LM to a checkpoint of weights, for evaluation or further training.

    megatron-lowprec import-megatron --load checkpoints/gpt --save runs/gpt \
        --vocab-file data/gpt2/vocab.json --merge-file data/gpt2/merges.txt
    megatron-lowprec eval --load runs/gpt --wikitext

Both formats are read: torch_dist (any layout) and torch (one file per rank; tensor and pipeline parallel), with local
or TransformerEngine layers. Only weights are converted, not optimizer state. No code of the checkpoint is run: a pickle
with classes that Megatron-core does not declare safe is refused by name, unless --trust is given.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.training.config.arguments import flag
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_model
from megatron_lowprec.training.convert import stock
from megatron_lowprec.training.convert.store import check_vocabulary, training_hint, write_checkpoint
from megatron_lowprec.training.data.tokenizer import TOKENIZER_FILES, padded_vocab_size, tokenizer_of
from megatron_lowprec.training.distributed import startup

_KINDS = {
    frozenset(TOKENIZER_FILES[kind]): kind for kind in ("GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer")
}
"""Type of tokenizer by the files that are given."""


def parse_arguments(arguments: Sequence[str] | None, program: str) -> argparse.Namespace:
    """Flags."""
    parser = Parser(prog=program, description=__doc__)
    parser.add_argument("--load", required=True, metavar="FOLDER", help="Megatron-LM's --save folder, or an iter_…")
    parser.add_argument("--save", required=True, metavar="FOLDER", help="folder for the checkpoint")
    parser.add_argument("--vocab-file", help="vocab.json of a GPT2BPETokenizer")
    parser.add_argument("--merge-file", help="merges.txt of a GPT2BPETokenizer")
    parser.add_argument("--tokenizer-model", help="tokenizer.json, or a folder with one")
    parser.add_argument("--vocab-size", type=int, help="number of ids of a NullTokenizer; checked for the others")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="unpickle without restrictions, which can run code: know the origin",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, program: str = "import_megatron.py") -> int:
    """Exit code: 0, or 2 for a UserError."""
    args = parse_arguments(arguments, program)

    def work() -> None:
        startup.prepare_environment()  # before megatron is imported
        print(*convert(args), sep="\n")

    return run_tool(program, work)


def convert(args: argparse.Namespace) -> list[str]:
    """Read, convert and write; returns a summary."""
    named = _tokenizer_options(args)
    found = stock.read(args.load, args.trust)
    config = resolve_model(Config(**stock.options(found.args), **named))
    tokenizer = tokenizer_of(config)
    rows, known = len(found.weights["embedding.word_embeddings.weight"]), tokenizer.vocab_size
    check_vocabulary(tokenizer, rows, "the rows of the checkpoint's embedding are")
    # The divisor of the vocabulary padding if it reproduces the rows; otherwise the number of rows.
    multiple = getattr(found.args, "make_vocab_size_divisible_by", 1) * found.args.tensor_model_parallel_size
    divisor = multiple if padded_vocab_size(known, multiple, 1) == rows else rows
    config = replace(config, make_vocab_size_divisible_by=divisor)
    final = write_checkpoint(Path(args.save), config, found.weights, f"Megatron-LM's {found.folder}", tokenizer)
    return [
        f"{found.folder} -> {final}: {sum(w.numel() for w in found.weights.values()):,} weights",
        f"tokenizer: {tokenizer}",
        training_hint(args.save),
    ]


def _tokenizer_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of the one tokenizer that the flags name."""
    names = [*sorted(set().union(*_KINDS)), "vocab_size"]
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    kind = _KINDS.get(frozenset(given.keys() - {"vocab_size"}))
    if kind is None or not given:
        found = ", ".join(map(flag, given)) or "none"
        raise UserError(
            f"which tokenizer? found {found}: give either --vocab-file and --merge-file, or --tokenizer-model, or only "
            "--vocab-size"
        )
    return {"tokenizer_type": kind, **given}
