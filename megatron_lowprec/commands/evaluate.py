"""Loss and perplexity of a checkpoint on prepared or raw text, and word perplexity on WikiText.

    megatron-lowprec eval --load runs/gpt_tiny-mxfp4_rht_sr --wikitext
    megatron-lowprec eval --load runs/my_run --data-path my_corpus_text_document --split 949,50,1 --part valid
    torchrun --nproc-per-node 8 -m megatron_lowprec eval --load runs/my_run/iter_0020000 --wikitext --stride 512
    megatron-lowprec eval --load runs/my_run --wikitext --recipe checkpoint bf16

Every token is scored once, by its likelihood over the tokenizer's ids without vocabulary padding. Windows have the
model's sequence length. They are contiguous, or slide by --stride tokens. The last window of a text starts earlier, so
that it is as long as the others, and scores the remaining tokens. A corpus of --data-path is one stream of tokens in
document order; its first token is not scored. With --wikitext, each article is scored separately after one
end-of-document token, as in lm-evaluation-harness's task wikitext: detokenized text, loss per word and byte of the
original text. tools/harness has that task for the models that `megatron-lowprec export` writes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_lowprec.errors import Parser, UserError, disk_is_full
from megatron_lowprec.shipped import find
from megatron_lowprec.training.checkpoint import loader
from megatron_lowprec.training.checkpoint.resume import Saved, check_tokenizer
from megatron_lowprec.training.checkpoint.tokenizer_flags import add_tokenizer_flags, moved_tokenizer
from megatron_lowprec.training.config.arguments import flag
from megatron_lowprec.training.config.data_options import DATA_CACHE, find_data
from megatron_lowprec.training.config.paths import output_file
from megatron_lowprec.training.data import corpus_writer, indexed_dataset
from megatron_lowprec.training.data.blend import check_split
from megatron_lowprec.training.data.tokenizer import NullTokenizer, Tokenizer, tokenizer_of
from megatron_lowprec.training.data.wikitext import SHIPPED, Page, read
from megatron_lowprec.training.distributed import startup
from megatron_lowprec.training.distributed.visible_gpus import has_gpus
from megatron_lowprec.training.evaluation.windows import Text, check_stride

if TYPE_CHECKING:
    import torch

    from megatron_lowprec.recipe.recipe import Recipe
    from megatron_lowprec.training.evaluation.text_loss import Score

PARTS = ("train", "valid", "test")
CHECKPOINTS = "checkpoint"
"""Name of the checkpoint's own recipe in --recipe."""


def parse_arguments(arguments: Sequence[str] | None, program: str) -> argparse.Namespace:
    """Flags, by Megatron's names where it has them."""
    parser = Parser(prog=program, description=__doc__)
    parser.add_argument("--load", required=True, metavar="FOLDER", help="a run's folder, a --save folder, or an iter_…")
    parser.add_argument("--iteration", type=int, help="which checkpoint (default: the newest)")
    parser.add_argument(
        "--data-path", nargs="+", default=[], metavar="PATH", help="prefixes of .bin/.idx, or .jsonl files"
    )
    parser.add_argument("--split", metavar="A,B,C", help="split the documents of --data-path as in training")
    parser.add_argument("--part", choices=PARTS, help="part of --split to score (default: valid)")
    parser.add_argument(
        "--wikitext", nargs="?", const=SHIPPED, metavar="FILE", help=f"raw WikiText (default file: {SHIPPED})"
    )
    parser.add_argument("--seq-length", type=int, help="tokens of a window (default: the model's)")
    parser.add_argument("--stride", type=int, help="new tokens of a window (default: --seq-length)")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="windows per pass and rank (default: 4)")
    parser.add_argument("--max-tokens", type=int, help="score only the first N tokens of each --data-path", metavar="N")
    parser.add_argument(
        "--recipe",
        nargs="+",
        default=[CHECKPOINTS],
        help=f"recipes to evaluate under, such as bf16; {CHECKPOINTS} is the checkpoint's (default)",
    )
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--expert-model-parallel-size", type=int, default=1)
    parser.add_argument("--data-cache-path", help="folder for tokenized text (default: data/cache)")
    add_tokenizer_flags(parser)
    parser.add_argument("--out", type=output_file, metavar="FILE", help="write the results to this file as JSON")
    return parser.parse_args(arguments)


def check_flags(args: argparse.Namespace) -> None:
    """Reject flags that leave nothing to score, that would be ignored, or whose numbers are out of range.

    Raises:
        UserError: naming the first such flag.
    """
    if not args.data_path and args.wikitext is None:
        raise UserError("nothing to score: give --data-path or --wikitext")
    for name in ("split", "part", "max_tokens", "data_cache_path"):
        value = getattr(args, name)
        if value is not None and not args.data_path:
            raise UserError(f"{flag(name)} {value} is for --data-path only; add --data-path, or leave it out")
    if args.part is not None and args.split is None:
        raise UserError(f"--part {args.part} is a part of --split, which is not given; add --split, or leave it out")
    if args.micro_batch_size < 1 or (args.max_tokens is not None and args.max_tokens < 2):
        raise UserError("--micro-batch-size must be at least 1, --max-tokens at least 2")
    if args.seq_length is not None and args.seq_length < 1:
        raise UserError(f"--seq-length {args.seq_length}: must be at least 1")
    if args.split is not None:
        check_split(args.split)


def main(arguments: Sequence[str] | None = None, program: str = "evaluate.py") -> int:
    """Exit code: 0, or 2 for a UserError."""
    args = parse_arguments(arguments, program)
    try:
        ranks = startup.prepare_environment()
    except UserError as error:
        return startup.fail(program, error)
    try:
        evaluate(args, ranks)
    except UserError as error:
        return startup.fail(program, error, ranks)
    except OSError as error:  # of --out or of tokenized text
        if (full := disk_is_full(error)) is None:
            raise
        return startup.fail(program, full, ranks)
    return 0


def evaluate(args: argparse.Namespace, ranks: startup.Ranks) -> dict[str, Any]:
    """Score all texts under each recipe; returns the results, which rank 0 prints and writes.

    Those of several recipes are a list in ``evaluations``, in the order of --recipe.
    """
    check_flags(args)
    pages = read(str(find(args.wikitext))) if args.wikitext is not None else []
    saved = loader.at_iteration(loader.find(args.load), args.iteration)
    device = None
    scored: list[tuple[Recipe, dict[str, Any]]] = []
    for name in args.recipe:
        opened = _reopen(args, saved, ranks, None if name == CHECKPOINTS else name)
        found = next((scores for recipe, scores in scored if recipe == opened.recipe), None)
        if found is None:
            scorer = Scorer(args, ranks, opened, device)
            device = scorer.device
            found = scorer.header() | scorer.scores(pages)
        scored.append((opened.recipe, found))
    evaluations = [found for _, found in scored]
    results = evaluations[0] if len(evaluations) == 1 else {"evaluations": evaluations}
    if args.out and ranks.rank == 0:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    startup.finalize()
    return results


def _reopen(args: argparse.Namespace, saved: Saved, ranks: startup.Ranks, recipe: str | None) -> loader.Reopened:
    """The checkpoint under a recipe, by name or file (None: its own), in the layout of the command line."""
    tensor = args.tensor_model_parallel_size
    return loader.reopen(
        saved,
        ranks.world_size,
        has_gpus(),
        recipe=recipe,
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=args.expert_model_parallel_size,
        # Required with experts.
        sequence_parallel=bool(saved.content["options"].get("num_experts")) and tensor > 1,
        micro_batch_size=args.micro_batch_size,
        **moved_tokenizer(args),
    )


class Scorer:
    """A checkpoint's model under a recipe, ready to score texts.

    Args:
        args: of the command line.
        ranks: of this process.
        opened: the checkpoint under the recipe.
        device: of an earlier scorer of this process; None: the first, which sets up the process groups.
    """

    def __init__(
        self, args: argparse.Namespace, ranks: startup.Ranks, opened: loader.Reopened, device: torch.device | None
    ) -> None:
        self._args, self._ranks = args, ranks
        self._found, self.recipe = opened.saved, opened.recipe
        self._length: int = opened.config.shape.seq_length if args.seq_length is None else args.seq_length
        self._stride: int = self._length if args.stride is None else args.stride
        check_stride(self._stride, self._length)
        positions = opened.config.shape.max_position_embeddings
        if opened.config.position_embedding_type == "learned_absolute" and self._length > positions:
            raise UserError(f"--seq-length {self._length}: this model has {positions} positions; lower it")
        self._tokenizer = tokenizer_of(opened.config)
        check_tokenizer(self._found, self._tokenizer)
        self.device = startup.initialize(opened.config, ranks) if device is None else device

        from megatron_lowprec.training.checkpoint import checkpoint
        from megatron_lowprec.training.model import build_model

        self._model = build_model(opened.config, opened.recipe, opened.padded_vocab_size)
        self._notes = checkpoint.load_weights(self._found.folder, self._model)
        self._model.runtime.begin_step(self._found.progress["iteration"])

    def header(self) -> dict[str, Any]:
        """Checkpoint, recipe and windows, which rank 0 prints."""
        trained = self._found.content["recipe"]["name"]
        how = "contiguous" if self._stride == self._length else f"sliding by {self._stride}"
        self._say(f"checkpoint  {self._found.folder}, trained under {trained}")
        self._say(f"recipe      {self.recipe.name}", *self._found.notes, *self._notes)
        self._say(f"windows     {self._length} tokens, {how}")
        return {
            "checkpoint": str(self._found.folder),
            "iteration": self._found.progress["iteration"],
            "trained_under": trained,
            "recipe": self.recipe.name,
            "window": self._length,
            "stride": self._stride,
        }

    def scores(self, pages: Sequence[Page]) -> dict[str, Any]:
        """Scores of all texts, which rank 0 prints; ``pages`` of WikiText."""
        found: dict[str, Any] = {"data": {path: self.corpus(path, prefix) for path, prefix in self.prepared().items()}}
        if pages:
            found["wikitext"] = self.wikitext(self._args.wikitext, pages)
        return found

    def prepared(self) -> dict[str, str]:
        """Entry of --data-path -> prefix; the first process of each node tokenizes raw text."""
        from megatron_lowprec.training.distributed.rank_sync import long_timeout_group, rank0_first

        args = self._args
        cache = args.data_cache_path or DATA_CACHE
        options: dict[str, Any] = {"workers": os.cpu_count() or 1, "report": self._say}

        def prepare() -> dict[str, str]:
            return {p: corpus_writer.prepare(find_data(p), self._tokenizer, cache, **options) for p in args.data_path}

        with long_timeout_group() as group:
            return rank0_first(self._ranks.local_rank == 0, prepare, group)

    def corpus(self, path: str, prefix: str) -> dict[str, Any]:
        """A corpus as one stream of tokens."""
        share = _share(self._args.split, self._args.part or "valid")
        ids = indexed_dataset.tokens_of(prefix, self._tokenizer.vocab_size, share, self._args.max_tokens)
        if len(ids) < 2:
            raise UserError(f"{path}: {len(ids)} tokens; scoring needs at least 2")
        found = self._score([Text(int(ids[0]), ids[1:])], path)
        result = {"tokens": found.tokens, "loss": found.loss, "perplexity": found.perplexity}
        line = f"{path}: {found.tokens:,} tokens, loss {found.loss:.4f}, perplexity {found.perplexity:.3f}"
        size = None
        if not isinstance(self._tokenizer, NullTokenizer):
            # A difference, as some tokenizers leave out the space that the rest alone would begin with.
            size = _bytes(ids, self._tokenizer) - _bytes(ids[:1], self._tokenizer)
        if size:
            result |= {"bytes": size, "bits_per_byte": found.nats / size / math.log(2)}
            line += f", {result['bits_per_byte']:.4f} bits per byte"
        self._say(line)
        return result

    def wikitext(self, path: str, pages: Sequence[Page]) -> dict[str, Any]:
        """Each article separately; loss per word and byte of the original text."""
        from megatron_lowprec.training.evaluation.text_loss import per

        ids = [np.asarray(self._tokenizer.tokenize(page.text), np.int64) for page in pages]
        texts = [Text(self._tokenizer.eod, article) for article in ids]
        found = self._score(texts, path)
        words, size = sum(page.words for page in pages), sum(page.size for page in pages)
        of_word, of_byte, bits = per(found.nats, words), per(found.nats, size), found.nats / size / math.log(2)
        self._say(
            f"{path}: {len(pages)} articles, {words:,} words, {found.tokens:,} tokens, loss {found.loss:.4f}, "
            f"perplexity {found.perplexity:.3f}"
        )
        self._say(f"  word perplexity {of_word:.3f}, byte perplexity {of_byte:.4f}, {bits:.4f} bits per byte")
        return {
            "file": path,
            "pages": len(pages),
            "tokens": found.tokens,
            "words": words,
            "bytes": size,
            "loss": found.loss,
            "perplexity": found.perplexity,
            "word_perplexity": of_word,
            "byte_perplexity": of_byte,
            "bits_per_byte": bits,
        }

    def _score(self, texts: Sequence[Text], name: str) -> Score:
        from megatron_lowprec.training.evaluation.text_loss import score

        return score(
            self._model,
            texts,
            length=self._length,
            stride=self._stride,
            batch_size=self._args.micro_batch_size,
            filler=self._tokenizer.eod,
            device=self.device,
            vocab_size=self._tokenizer.vocab_size,
            progress=_progress(name) if self._ranks.rank == 0 and sys.stderr.isatty() else None,
        )

    def _say(self, *lines: str) -> None:
        if self._ranks.rank == 0:
            print(*lines, sep="\n", flush=True)


def _bytes(ids: npt.NDArray[np.integer], tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of the documents of a stream of tokens, by decoding; end tokens have none.

    A character that is cut at the stream's end, of which U+FFFD is decoded, counts where its last token is.
    """
    *whole, last = np.split(ids, np.flatnonzero(ids == tokenizer.eod))

    def text(document: npt.NDArray[np.integer]) -> str:
        return tokenizer.detokenize(document[document != tokenizer.eod].tolist())

    cut = text(last).rstrip("\N{REPLACEMENT CHARACTER}")
    return sum(len(text(document).encode()) for document in whole) + len(cut.encode())


def _share(split: str | None, part: str) -> tuple[float, float]:
    """Start and end of a part of --split, as shares of a corpus's documents."""
    if split is None:
        return 0.0, 1.0
    from megatron.core.datasets import blended_megatron_dataset_config as cuts

    share = cuts.convert_split_vector_to_split_matrix(cuts.parse_and_normalize_split(split))[PARTS.index(part)]
    if share is None:
        raise UserError(f"--split {split} has no part {part}; choose another --part")
    return share[0], share[1]


def _progress(name: str) -> Callable[[int, int], None]:
    """Prints a percentage that overwrites itself."""

    def show(done: int, of: int) -> None:
        print(f"\r{name}: {done / of:4.0%}", end="\n" if done == of else "", file=sys.stderr, flush=True)

    return show
