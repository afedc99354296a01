"""Flags that name the files of a checkpoint's tokenizer, where they have moved."""

from __future__ import annotations

import argparse

from megatron_lowprec.training.config.arguments import flag
from megatron_lowprec.training.config.options import OPTIONS, options_with

_FLAGS = options_with(path="tokenizer")


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """Adds ``--vocab-file``, ``--merge-file`` and ``--tokenizer-model``."""
    for name in _FLAGS:
        parser.add_argument(flag(name), metavar="FILE", help=f"{OPTIONS[name].help}: its new path, if it has moved")


def moved_tokenizer(args: argparse.Namespace) -> dict[str, str]:
    """Options of those that are given."""
    return {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None}
