"""Compare two ways to spread optimizer state over data-parallel ranks: whole tensors, and even parts of buckets.

    python tools/shard_balance.py
    python tools/shard_balance.py --config configs/models/gpt_345m.yaml --ranks 2 8

Prints a table. Whole tensors go to ranks by Algorithm 1 of FP8-LM (arXiv 2310.18313), the largest first, each to the
rank that holds least. Even parts are those of Megatron-core's distributed optimizer. No model is built. Only models
without experts, on one pipeline stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.recipe.coverage import LinearSite
from megatron_lowprec.text_tables import markdown_table
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_model
from megatron_lowprec.training.data.tokenizer import padded_vocab_size, tokenizer_of
from megatron_lowprec.training.models.sizes import has_bias, has_experts, linear_sites
from megatron_lowprec.training.options.training_options import ParallelOptions

MODELS = ("gpt_345m", "gpt_1.3b", "gpt_6.7b")
RANKS = (2, 4, 8, 16, 32, 64)
ORDER = (
    *("linear_proj", "linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),
    *("linear_kv_down_proj", "linear_kv_up_proj", "linear_fc1", "linear_fc2"),
)
STATES = 3  # first moment, second moment, main weight
NARROW_BYTES, WIDE_BYTES = 1 + 2 + 2, 3 * 4  # fp8_lm's state of an entry: tensors of two dimensions, and others


class Weight(NamedTuple):
    """A parameter's name and its shape on one tensor-parallel rank."""

    name: str
    shape: tuple[int, ...]

    @property
    def entries(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def state_bytes(self) -> int:
        """Bytes of its optimizer state under ``fp8_lm``."""
        return self.entries * (NARROW_BYTES if len(self.shape) > 1 else WIDE_BYTES)


@dataclass(frozen=True)
class Spread:
    """Bytes of optimizer state on each rank, and the tensors that lie on several."""

    state: tuple[float, ...]
    split: int

    @property
    def imbalance(self) -> float:
        """The fullest rank's bytes over the mean."""
        return max(self.state) * len(self.state) / sum(self.state)


def greedy_partition(sizes: Sequence[int], ranks: int) -> list[int]:
    """Rank of each whole tensor: the largest first, each to the rank that holds least, of equal ones to the lowest.

    Tensors of one size are ordered by their index modulo ``ranks``, then by their index, as Azure/MS-AMP orders them.
    """
    owner, held = [0] * len(sizes), [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i % ranks, i)):
        owner[index] = min(range(ranks), key=held.__getitem__)
        held[owner[index]] += sizes[index]
    return owner


def whole_tensors(weights: Sequence[Weight], ranks: int) -> Spread:
    """The spread of ``greedy_partition``."""
    state = [0.0] * ranks
    for weight, rank in zip(weights, greedy_partition([weight.entries for weight in weights], ranks), strict=True):
        state[rank] += weight.state_bytes
    return Spread(tuple(state), 0)


def flat_ranges(sizes: Sequence[int], ranks: int, bucket_size: int | None) -> Iterator[tuple[int, int, int, int]]:
    """(start, end, bucket's start, bucket's end) of each tensor in Megatron-core's buffer, the last tensor first.

    A tensor begins at a multiple of 64 entries. A bucket is complete at ``bucket_size`` entries, and is padded so that
    its parts are multiples of 128 / gcd(ranks, 128).
    """
    unit, begin, bucket, pending = math.lcm(ranks, 128), 0, 0, list[tuple[int, int]]()
    for i, size in enumerate(reversed(sizes)):
        begin = -(-begin // 64) * 64
        pending.append((begin, begin + size))
        begin += size
        if (bucket_size is not None and begin - bucket >= bucket_size) or i == len(sizes) - 1:
            end = -(-begin // unit) * unit
            yield from ((first, last, bucket, end) for first, last in pending)
            begin, bucket, pending = end, end, []


def even_parts(weights: Sequence[Weight], ranks: int, bucket_size: int | None) -> Spread:
    """The spread of Megatron-core's distributed optimizer: a rank holds one part of each bucket."""
    state, split = [0.0] * ranks, 0
    ranges = flat_ranges([weight.entries for weight in weights], ranks, bucket_size)
    for weight, (first, last, start, end) in zip(reversed(weights), ranges, strict=True):
        part = (end - start) // ranks
        held = range((first - start) // part, (last - 1 - start) // part + 1)
        split += len(held) > 1
        for rank in held:
            entries = min(last, start + (rank + 1) * part) - max(first, start + rank * part)
            state[rank] += entries * weight.state_bytes / weight.entries
    return Spread(tuple(state), split)


def weights_of(config: Config, padded_vocab: int) -> list[Weight]:
    """Parameters of a model without experts on one tensor-parallel rank, in Megatron-core's order."""
    if has_experts(config) or config.pipeline_model_parallel_size > 1:
        raise UserError("--config has experts or pipeline stages, whose weights lie on other ranks: give a dense model")
    hidden, tensor = config.shape.hidden_size, config.tensor_model_parallel_size
    norm = ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",)
    found = [Weight("embedding.word_embeddings.weight", (padded_vocab // tensor, hidden))]
    if config.position_embedding_type == "learned_absolute":
        found.append(Weight("embedding.position_embeddings.weight", (config.shape.max_position_embeddings, hidden)))
    norms = {"linear_proj": {"input_layernorm": hidden}, "linear_fc1": {**_norms(config), "pre_mlp_layernorm": hidden}}
    for site in sorted(linear_sites(config), key=lambda site: (site.layer_number, ORDER.index(_module(site)))):
        layer = f"decoder.layers.{site.layer_number - 1}"
        before = norms.get(_module(site), {})
        found += [Weight(f"{layer}.{name}.{part}", (width,)) for name, width in before.items() for part in norm]
        rows, columns = site.out_features, site.in_features
        rows, columns = (rows // tensor, columns) if site.split == "column" else (rows, columns // tensor)
        found.append(Weight(f"{layer}.{site.name}.weight", (rows, columns)))
        if has_bias(config, site):
            found.append(Weight(f"{layer}.{site.name}.bias", (rows,)))
    found += [Weight(f"decoder.final_layernorm.{part}", (hidden,)) for part in norm]
    if config.untie_embeddings_and_output_weights:
        found.append(Weight("output_layer.weight", (padded_vocab // tensor, hidden)))
    return found


def _norms(config: Config) -> dict[str, int]:
    """Norms inside of attention, of queries and keys or of latents, and their widths."""
    if not config.qk_layernorm:
        return {}
    if config.multi_latent_attention:
        widths = {"q": config.q_lora_rank, "kv": config.latent.kv_lora_rank}
    else:
        widths = dict.fromkeys(("q", "k"), config.shape.kv_channels)
    return {f"self_attention.{name}_layernorm": width for name, width in widths.items() if width is not None}


def _module(site: LinearSite) -> str:
    return site.name.rpartition(".")[2]


def bucket_size(config: ParallelOptions, ranks: int) -> int | None:
    """Entries of a bucket, as ``training.model`` sets them."""
    return max(40_000_000, 1_000_000 * ranks) if config.overlap_grad_reduce else None


def table(configs: Sequence[str], ranks: Sequence[int]) -> Iterator[str]:
    """Lines of the table."""
    rows = []
    for path in configs:
        config = resolve_model(parse(["--config", path])[0])
        vocabulary = padded_vocab_size(
            tokenizer_of(config).vocab_size, config.make_vocab_size_divisible_by, config.tensor_model_parallel_size
        )
        weights = weights_of(config, vocabulary)
        for count in ranks:
            whole, even = whole_tensors(weights, count), even_parts(weights, count, bucket_size(config, count))
            rows.append(
                (
                    path.rsplit("/", 1)[-1].removesuffix(".yaml"),
                    str(config.tensor_model_parallel_size),
                    str(count),
                    str(len(weights)),
                    f"{even.imbalance:.3f}",
                    str(even.split),
                    f"{max(even.state) / 2**20:.1f}",
                    f"{len(weights) * STATES * 4 / 1024:.1f}",
                    f"{whole.imbalance:.3f}",
                    f"{max(whole.state) / 2**20:.1f}",
                )
            )
    heads = (
        *("model", "tensor-parallel ranks", "data-parallel ranks", "tensors"),
        *("even: fullest / mean", "even: tensors on several ranks", "even: fullest, MiB", "even: amaxes a step, KiB"),
        *("whole: fullest / mean", "whole: fullest, MiB"),
    )
    yield from markdown_table(heads, rows, left=("model",))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for a UserError."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--config", nargs="+", metavar="FILE", default=list(MODELS), help="models (default: three sizes)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="data-parallel ranks")
    args = parser.parse_args(arguments)
    if min(args.ranks) < 1:
        parser.error(f"--ranks {min(args.ranks)}: wants at least 1")
    return run_tool("shard_balance.py", lambda: print(*table(args.config, args.ranks), sep="\n"))


if __name__ == "__main__":
    raise SystemExit(main())
