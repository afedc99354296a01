"""Tokenize Wikipedia, or any titled articles, into shards with a manifest: streamed, deduplicated, resumable.

    python tools/prepare_wikipedia.py --output-prefix data/wikipedia/en --workers 16
    python tools/prepare_wikipedia.py --output-prefix data/mine --input part-*.jsonl.xz more.parquet --workers 16

The first command streams wikimedia/wikipedia, 20231101.en, from the Hugging Face hub and stores only the tokens. It
needs the package datasets; --dataset may also name a folder in the hub's format. Articles with a repeated title are
dropped. With --checksums, each --input must be the file of its name in the list.
After an interruption, the same command continues after the last complete shard. Each shard is a corpus for --data-path.
PREFIX.manifest.json lists the shards with counts and checksums, which --verify compares with the files.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.shipped import find
from megatron_lowprec.training.config.data_options import check_tokenizer_files
from megatron_lowprec.training.data import shards
from megatron_lowprec.training.data.progress import progress_bar
from megatron_lowprec.training.data.tokenizer import TOKENIZER_FILES, TOKENIZER_TYPES, tokenizer_of
from megatron_lowprec.training.data.wikipedia import Files, Hub, Source

GPT2_FILES = {"vocab_file": "data/gpt2/vocab.json", "merge_file": "data/gpt2/merges.txt"}  # the repository ships them


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags; the default tokenizer is GPT-2's."""
    parser = Parser(description=__doc__)
    parser.add_argument("--output-prefix", metavar="PREFIX", help="shards are named PREFIX-00000_text_document.*")
    parser.add_argument("--input", nargs="+", metavar="FILE", help=".jsonl (.gz, .xz, .zst) or .parquet, not --dataset")
    parser.add_argument("--checksums", type=find, metavar="FILE", help="sha256 of each --input, as data/corpus.sha256")
    parser.add_argument("--dataset", default="wikimedia/wikipedia", help="name on the hub, or a folder in its format")
    parser.add_argument("--dataset-config", default="20231101.en", help="default: 20231101.en")
    parser.add_argument("--dataset-split", default="train", help="default: train")
    parser.add_argument("--dataset-revision", help="commit of the dataset, for reproducible bytes")
    parser.add_argument("--title-key", default="title", help="default: title")
    parser.add_argument("--text-key", default="text", help="default: text")
    parser.add_argument("--shard-documents", type=int, default=200_000, help="articles per shard (default: 200000)")
    parser.add_argument("--no-append-eod", action="store_true", help="do not append the end-of-document id to articles")
    parser.add_argument("--workers", type=int, default=1, help="processes; do not change the result (default: 1)")
    parser.add_argument("--log-interval", type=int, default=10_000, help="articles per progress line (default: 10000)")
    parser.add_argument("--tokenizer-type", default="GPT2BPETokenizer", choices=TOKENIZER_TYPES)
    parser.add_argument("--vocab-file", metavar="FILE", help=f"default: {GPT2_FILES['vocab_file']}")
    parser.add_argument("--merge-file", metavar="FILE", help=f"default: {GPT2_FILES['merge_file']}")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="tokenizer.json, or a folder with one")
    parser.add_argument("--vocab-size", type=int, help="number of ids of a NullTokenizer")
    parser.add_argument("--verify", metavar="MANIFEST", help="only compare a manifest with its shards")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 if --verify finds a difference, 2 for a UserError, 130 if interrupted."""
    args = parse_arguments(arguments)

    def work() -> int:
        if args.verify is not None:
            return _verify(Path(args.verify))
        try:
            _prepare(args)
        except OSError as error:
            raise UserError(f"--output-prefix {args.output_prefix}: {error}") from None
        return 0

    try:
        return run_tool("prepare_wikipedia.py", work)
    except KeyboardInterrupt:
        again = "interrupted; the same command continues after the last complete shard"
        print(f"prepare_wikipedia.py: {again}", file=sys.stderr)
        return 130


def _prepare(args: argparse.Namespace) -> None:
    if args.output_prefix is None:
        raise UserError("--output-prefix is missing: give the path prefix of the shards")
    if min(args.workers, args.shard_documents) < 1:
        raise UserError("--workers and --shard-documents must be at least 1")
    check_tokenizer_files(args)
    for name in TOKENIZER_FILES[args.tokenizer_type]:
        setattr(args, name, getattr(args, name) or GPT2_FILES.get(name))
    tokenizer = tokenizer_of(args)
    start = time.perf_counter()
    with progress_bar(args.log_interval) as progress:
        found = shards.prepare(
            _source(args),
            args.output_prefix,
            tokenizer,
            shard_documents=args.shard_documents,
            title_key=args.title_key,
            text_key=args.text_key,
            append_eod=not args.no_append_eod,
            workers=args.workers,
            progress=progress,
        )
    print(
        f"{args.output_prefix}.manifest.json: {len(found['shards'])} shards, {found['documents']} documents, "
        f"{found['tokens']} tokens ({found['duplicates']} repeated titles and {found['empty']} empty articles dropped)"
    )
    print(f"{time.perf_counter() - start:.1f} s")


def _source(args: argparse.Namespace) -> Source:
    if args.checksums is not None:
        _check_files(args.input or [], args.checksums)
    if args.input is not None:
        return Files(args.input, args.title_key, args.text_key)
    where = (args.dataset, args.dataset_config or None, args.dataset_split, args.dataset_revision)
    return Hub(*where, title_key=args.title_key, text_key=args.text_key)


def _check_files(paths: Sequence[str], checksums: Path) -> None:
    """Raise a UserError for a file whose name or content is not in the output of sha256sum in ``checksums``."""
    if not paths:
        raise UserError(f"--checksums {checksums}: is for the files of --input; name them, or leave it out")
    try:
        lines = (line.split() for line in checksums.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--checksums {checksums}: not a list as sha256sum writes it: {error}") from None
    listed = {words[-1].removeprefix("*"): words[0] for words in lines if words}
    for path in paths:
        if Path(path).name not in listed:
            raise UserError(
                f"--checksums {checksums}: has no {Path(path).name}; keep the files' names, or leave it out"
            )
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != listed[Path(path).name]:
            raise UserError(f"--input {path}: its sha256 is {found}, another than in {checksums}; copy it again")


def _verify(manifest: Path) -> int:
    faults = shards.verify(manifest)
    print(*(faults or [f"{manifest}: all shards are as it says"]), sep="\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
