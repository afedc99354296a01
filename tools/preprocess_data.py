"""Tokenize JSON-lines text into Megatron's indexed format, with the flags of Megatron's tool of the same name.

    python tools/preprocess_data.py --input part-*.jsonl.xz --output-prefix data/mine --workers 8 --append-eod \
        --tokenizer-type GPT2BPETokenizer --vocab-file data/gpt2/vocab.json --merge-file data/gpt2/merges.txt

writes data/mine_text_document.bin and .idx (what --data-path names without the suffix), and a .json that notes the
vocabulary. Inputs are read in the order given, plain or as .gz, .xz or .zst; documents without a token are left out.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from megatron_lowprec.errors import Parser, UserError
from megatron_lowprec.training.data import corpus_writer
from megatron_lowprec.training.data.progress import progress_bar
from megatron_lowprec.training.data.tokenizer import TOKENIZER_TYPES, tokenizer_of


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Megatron's flags; argparse's own error for a wrong one."""
    parser = Parser(description=__doc__)
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="JSON lines, one document a line")
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="a corpus each (default: text)")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="files are PREFIX_KEY_document.*")
    parser.add_argument("--tokenizer-type", default="GPT2BPETokenizer", choices=TOKENIZER_TYPES)
    parser.add_argument("--vocab-file", metavar="FILE", help="vocab.json of a GPT2BPETokenizer")
    parser.add_argument("--merge-file", metavar="FILE", help="merges.txt of a GPT2BPETokenizer")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="tokenizer.json, or a folder that holds one")
    parser.add_argument("--vocab-size", type=int, help="ids of a NullTokenizer; a check for the others")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document id")
    parser.add_argument("--workers", type=int, default=1, help="processes; the result is the same (default: 1)")
    parser.add_argument("--log-interval", type=int, default=1000, help="documents between two lines (default: 1000)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; the exit code, 2 for what the user can mend."""
    args = parse_arguments(arguments)
    start = time.perf_counter()
    try:
        if args.workers < 1:
            raise UserError(f"--workers {args.workers} was asked; at least 1 process is needed")
        tokenizer = tokenizer_of(args)
        prefixes = {key: f"{args.output_prefix}_{key}_document" for key in args.json_keys}
        with progress_bar(args.log_interval) as progress:
            notes = corpus_writer.write(
                args.input,
                prefixes,
                tokenizer,
                workers=args.workers,
                append_eod=args.append_eod,
                progress=progress,
            )
    except UserError as error:
        print(f"preprocess_data.py: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        message = f"cannot write --output-prefix {args.output_prefix}: {error}"
        print(f"preprocess_data.py: error: {message}", file=sys.stderr)
        return 2
    seconds = time.perf_counter() - start
    for note in notes:
        print(
            f"{prefixes[note.json_key]}.bin: {note.documents} documents, {note.tokens} tokens "
            f"({note.empty} empty documents left out)"
        )
    tokens = sum(note.tokens for note in notes)
    print(f"{seconds:.1f} s, {tokens / seconds:.0f} tokens/s with --workers {args.workers}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
