"""Flags that name the files of a checkpoint's tokenizer, where they have moved."""

from __future__ import annotations

import argparse

_FLAGS = {
    "vocab_file": "vocab.json",
    "merge_file": "merges.txt",
    "tokenizer_model": "tokenizer.json or tokenizer.model",
}


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """Adds ``--vocab-file``, ``--merge-file`` and ``--tokenizer-model``."""
    for name, file in _FLAGS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", metavar="FILE", help=f"new path of its {file}, if it has moved"
        )


def moved_tokenizer(args: argparse.Namespace) -> dict[str, str]:
    """Options of those that are given."""
    return {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None}
