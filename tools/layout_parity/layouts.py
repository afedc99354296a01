"""Tables of models and of parallel layouts."""

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
    # fc1 holds two projections, each sharded separately; only its operands are compared.
    "gated": [*_GPT, "--swiglu", "--group-query-attention", "--num-query-groups", "2"],
    # One process's optimizer state cannot be loaded under expert parallelism.
    "moe_tiny": ["--config", "configs/models/moe_tiny.yaml", "--no-load-optim", *_COMMON],
    "deepseek_tiny": [
        *("--config", "configs/models/deepseek_tiny.yaml", "--no-load-optim"),
        *("--num-layers", "4", "--moe-layer-freq", "([0]*1+[1]*3)", *_COMMON),
    ],
}
"""Flags of each model; the checks set dropout and precision."""


@dataclass(frozen=True)
class Layout:
    """One way to distribute a model and its data.

    Attributes:
        regroups: an expert's tokens, or their order, differ from one process's, because experts or the sequence
            are sharded. Data parallelism alone does not change a rank's microbatch.
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
        """Size of the tensor-parallel group."""
        return self._size("--tensor-model-parallel-size")

    @property
    def data_parallel(self) -> int:
        """Number of ranks that see different samples."""
        return self.processes // (self.tensor_parallel * self._size("--pipeline-model-parallel-size"))

    def _size(self, flag: str) -> int:
        return int(dict(zip(self.flags, self.flags[1:])).get(flag, 1))


_TP2 = ("--tensor-model-parallel-size", "2")
_SP = ("--sequence-parallel",)
_PP2 = ("--pipeline-model-parallel-size", "2")
_EP2 = ("--expert-model-parallel-size", "2")
_DISTRIBUTED = ("--use-distributed-optimizer",)

ONE = (Layout("1", 1), Layout("1", 1, model="moe_tiny"), Layout("1", 1, model="deepseek_tiny"))
"""The references."""

LAYOUTS = (
    Layout("TP2", 2, _TP2),
    Layout("TP2+SP", 2, (*_TP2, *_SP)),
    Layout("PP2", 2, _PP2),
    Layout("PP2 interleaved", 2, (*_PP2, "--num-virtual-stages-per-pipeline-rank", "2")),
    Layout("DP2", 2),
    Layout("DP2 distributed optimizer", 2, _DISTRIBUTED),
    Layout("TP2xDP2", 4, _TP2),
    Layout("TP2xPP2+SP", 4, (*_TP2, *_SP, *_PP2)),
    Layout("DP2", 2, (), "moe_tiny"),
    Layout("PP2", 2, _PP2, "moe_tiny"),
    Layout("EP2", 2, _EP2, "moe_tiny", regroups=True),
    Layout("TP2+SP", 2, (*_TP2, *_SP), "moe_tiny", regroups=True),
    Layout("DP2", 2, (), "deepseek_tiny"),
    Layout("PP2", 2, _PP2, "deepseek_tiny"),
    Layout("EP2", 2, _EP2, "deepseek_tiny", regroups=True),
    Layout("TP2+SP", 2, (*_TP2, *_SP), "deepseek_tiny", regroups=True),
)

RESUMED = (Layout("TP2+SP distributed optimizer", 2, (*_TP2, *_SP, *_DISTRIBUTED)), Layout("PP2", 2, _PP2))
"""Layouts of the runs that are stopped and resumed."""

SAME_NOISE = "--share-rng-across-dp"
