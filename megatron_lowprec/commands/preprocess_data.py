"""Tokenize JSON-lines text into Megatron's indexed format, with the flags of Megatron's tool of the same name.

    megatron-lowprec preprocess --input part-*.jsonl.xz --output-prefix data/mine --workers 8 --append-eod \
        --tokenizer-type GPT2BPETokenizer --vocab-file data/gpt2/vocab.json --merge-file data/gpt2/merges.txt

writes data/mine_text_document.bin and .idx (--data-path data/mine_text_document), and a .json file that records the
vocabulary. Inputs are read in the given order, plain or as .gz, .xz or .zst; documents without tokens are dropped.

    megatron-lowprec preprocess --verify data/mine_text_document

reads all of a corpus and checks its index, its ids, and the checksums in its .json file.
"""

import argparse
import time
from collections.abc import Sequence

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.training.config.arguments import flag
from megatron_lowprec.training.config.data_options import check_tokenizer_files
from megatron_lowprec.training.data import corpus_writer, indexed_dataset
from megatron_lowprec.training.data.progress import progress_bar
from megatron_lowprec.training.data.tokenizer import TOKENIZER_TYPES, tokenizer_of

_OF_VERIFY = ("verify", "vocab_size")


def parse_arguments(arguments: Sequence[str] | None, program: str) -> argparse.Namespace:
    """Megatron's flags."""
    parser = Parser(prog=program, description=__doc__)
    parser.add_argument("--input", nargs="+", metavar="FILE", help="JSON lines, one document per line")
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="one corpus per key (default: text)"
    )
    parser.add_argument("--output-prefix", metavar="PREFIX", help="files are PREFIX_KEY_document.*")
    parser.add_argument("--tokenizer-type", default="GPT2BPETokenizer", choices=TOKENIZER_TYPES)
    parser.add_argument("--vocab-file", metavar="FILE", help="vocab.json of a GPT2BPETokenizer")
    parser.add_argument("--merge-file", metavar="FILE", help="merges.txt of a GPT2BPETokenizer")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="tokenizer.json, or a folder with one")
    parser.add_argument("--vocab-size", type=int, help="number of ids of a NullTokenizer; checked for the others")
    parser.add_argument("--append-eod", action="store_true", help="append the end-of-document id to each document")
    parser.add_argument("--workers", type=int, default=1, help="processes; do not change the result (default: 1)")
    parser.add_argument("--log-interval", type=int, default=1000, help="documents per progress line (default: 1000)")
    parser.add_argument("--verify", nargs="+", metavar="PREFIX", help="only read corpora and check all of them")
    args = parser.parse_args(arguments)
    if args.verify is None and (args.input is None or args.output_prefix is None):
        parser.error("give --input and --output-prefix, or --verify")
    if args.verify is not None:
        idle = [
            flag(name)
            for name, value in vars(args).items()
            if name not in _OF_VERIFY and value != parser.get_default(name)
        ]
        if idle:
            parser.error(f"--verify only reads corpora, with no use for {', '.join(idle)}: leave it out")
    return args


def main(arguments: Sequence[str] | None = None, program: str = "preprocess_data.py") -> int:
    """Exit code: 0, 1 if --verify finds damage, 2 for another UserError."""
    args = parse_arguments(arguments, program)
    return run_tool(program, lambda: _preprocess(args) if args.verify is None else _verify(args))


def _verify(args: argparse.Namespace) -> int:
    damaged = 0
    for prefix in args.verify:
        try:
            print(indexed_dataset.verify(prefix, args.vocab_size))
        except UserError as error:
            print(error)
            damaged = 1
    return damaged


def _preprocess(args: argparse.Namespace) -> None:
    if args.workers < 1:
        raise UserError(f"--workers {args.workers}: must be at least 1")
    start = time.perf_counter()
    check_tokenizer_files(args)
    tokenizer = tokenizer_of(args)
    prefixes = {key: f"{args.output_prefix}_{key}_document" for key in args.json_keys}
    options = {"workers": args.workers, "append_eod": args.append_eod}
    try:
        with progress_bar(args.log_interval) as progress:
            notes = corpus_writer.write(args.input, prefixes, tokenizer, progress=progress, **options)
    except OSError as error:
        raise UserError(f"cannot write --output-prefix {args.output_prefix}: {error}") from None
    seconds = time.perf_counter() - start
    for note in notes:
        print(
            f"{prefixes[note.json_key]}.bin: {note.documents} documents, {note.tokens} tokens "
            f"({note.empty} empty documents dropped)"
        )
    tokens = sum(note.tokens for note in notes)
    print(f"{seconds:.1f} s, {tokens / seconds:.0f} tokens/s with --workers {args.workers}")
