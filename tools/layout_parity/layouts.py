"""The tables of the matrix: which layouts, of which model, on how many processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MICROBATCH, BATCH, SEQUENCE = 2, 4, 64
"""Samples of a microbatch and of an iteration, tokens of a sample: two microbatches, or one on each of two ranks."""

_COMMON = [
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "255", "--mock-data", "--eval-iters", "0"),
    *("--seq-length", str(SEQUENCE), "--max-position-embeddings", str(SEQUENCE)),
    *("--micro-batch-size", str(MICROBATCH), "--global-batch-size", str(BATCH)),
    *("--train-iters", "1000", "--lr", "1e-3", "--lr-decay-style", "constant", "--lr-warmup-iters", "0"),
    *("--lr-warmup-fraction", "0", "--min-lr", "1e-4", "--distributed-timeout-minutes", "30"),
]
# Two chunks a stage of two stages; every size a multiple of 128 on two tensor-parallel ranks.
_GPT = [
    *("--num-layers", "4", "--hidden-size", "256", "--ffn-hidden-size", "256", "--num-attention-heads", "4"),
    *_COMMON,
]
MODELS: Mapping[str, Sequence[str]] = {
    "gpt": _GPT,
    # Its fc1 holds two projections, each cut by itself; its operands alone are looked at.
    "gated": [*_GPT, "--swiglu", "--group-query-attention", "--num-query-groups", "2"],
    # Optimizer state does not go from one process to expert parallelism.
    "moe_tiny": ["--config", "configs/models/moe_tiny.yaml", "--no-load-optim", *_COMMON],
}
"""Flags of the models; dropout and precision are the checks' own."""


@dataclass(frozen=True)
class Layout:
    """One way to cut a model and its data.

    Attributes:
        regroups: where experts are cut, or the sequence before they see it: the tokens that an expert multiplies with
            at once, or their order, are others than on one process. Data parallelism alone leaves a rank's microbatch
            what it was.
    """

    name: str
    processes: int
    flags: tuple[str, ...] = ()
    model: str = "gpt"
    regroups: bool = False

    @property
    def distributed_optimizer(self) -> bool:
        return "--use-distributed-optimizer" in self.flags

    @property
    def tensor_parallel(self) -> int:
        """Ranks that share every linear layer."""
        return self._size("--tensor-model-parallel-size")

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples."""
        return self.processes // (self.tensor_parallel * self._size("--pipeline-model-parallel-size"))

    def _size(self, flag: str) -> int:
        return int(dict(zip(self.flags, self.flags[1:])).get(flag, 1))


_TP2 = ("--tensor-model-parallel-size", "2")
_SP = ("--sequence-parallel",)
_PP2 = ("--pipeline-model-parallel-size", "2")
_EP2 = ("--expert-model-parallel-size", "2")
_DISTRIBUTED = ("--use-distributed-optimizer",)

ONE = (Layout("1", 1), Layout("1", 1, model="moe_tiny"))
"""What the others are compared with."""

LAYOUTS = (
    Layout("TP2", 2, _TP2),
    Layout("TP2+SP", 2, (*_TP2, *_SP)),
    Layout("PP2", 2, _PP2),
    Layout("PP2 interleaved", 2, (*_PP2, "--num-virtual-stages-per-pipeline-rank", "2")),
    Layout("DP2", 2),
    Layout("DP2 distributed optimizer", 2, _DISTRIBUTED),
    Layout("TP2xDP2", 4, _TP2),
    Layout("TP2xPP2+SP", 4, (*_TP2, *_SP, *_PP2)),
    Layout("EP2", 2, _EP2, "moe_tiny", regroups=True),
    Layout("TP2+SP", 2, (*_TP2, *_SP), "moe_tiny", regroups=True),
)

RESUMED = (
    Layout("TP2+SP distributed optimizer", 2, (*_TP2, *_SP, *_DISTRIBUTED)),
    Layout("PP2", 2, _PP2),
)
"""Where runs are stopped and resumed."""

SAME_NOISE = "--share-rng-across-dp"
