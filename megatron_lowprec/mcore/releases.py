"""Differences between the supported releases of Megatron-core, 0.16 to 0.19; pyproject.toml has the range.

The rest of the package calls these functions. ``mcore/patches.py`` has what is replaced in Megatron-core.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from megatron.core import __version__, dist_checkpointing, num_microbatches_calculator, parallel_state, utils
from megatron.core.models.gpt import moe_module_specs
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.moe import experts
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

_SERIES = tuple(int(number) for number in re.findall(r"\d+", __version__)[:2])

GROUPED_EXPERTS: type | None = getattr(experts, "GroupedMLP", None)
"""Experts of local specs in one GEMM, until 0.16."""

SHARED_EXPERTS: Any = getattr(moe_module_specs, "_build_shared_experts", SharedExpertMLP)
"""Builder of shared experts in local specs; from 0.19 on a function that chooses a class."""

# From 0.17 on the default writer needs nvidia-resiliency-ext.
ASYNC_SAVE: dict[str, Any] = {"async_sharded_save": True} | (
    {"async_strategy": "mcore"} if "async_strategy" in signature(dist_checkpointing.save).parameters else {}
)
"""Options of ``dist_checkpointing.save`` for an asynchronous save by Megatron-core's own writer."""

LEAVES_MODEL_ON_CPU = _SERIES >= (0, 19)
"""Whether Megatron-LM does not move a model to its GPU under ``--use-cpu-initialization``."""

IGNORES_RAMPS = _SERIES >= (0, 18)
"""Whether a ramp of the batch size is ignored: from 0.18 on there is a schedule of sizes instead."""

# From 0.18 on it also serves hybrid context parallelism, which it does not assume.
_CP_OPTIONS = {"is_hybrid_cp": False} if "is_hybrid_cp" in signature(utils.get_batch_on_this_cp_rank).parameters else {}


def batch_on_this_cp_rank(batch: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """The chunks of each sequence that this context-parallel rank processes."""
    # From 0.18 on no group means all ranks: each data-parallel rank would lose a part of its sequences.
    group = parallel_state.get_context_parallel_group()
    found: dict[str, torch.Tensor | None] = utils.get_batch_on_this_cp_rank(batch, cp_group=group, **_CP_OPTIONS)
    return found


def grads_for_norm(part: MegatronOptimizer) -> list[torch.Tensor]:
    """Gradients of a part that count in the model's norm: each on one of the ranks that hold it."""
    if hasattr(part, "get_grads_for_grad_norm"):  # from 0.19 on
        found: list[torch.Tensor] = part.get_grads_for_grad_norm()
    else:
        found = part.get_main_grads_for_grad_norm()
    return found


def init_microbatches(
    batch: int, micro_batch_size: int, data_parallel_size: int, ramp: list[int] | None, ramp_sizes: Mapping[int, int]
) -> None:
    """Set up Megatron-core's count of microbatches.

    Args:
        batch: --global-batch-size.
        ramp: START, INCREMENT, SAMPLES of --rampup-batch-size.
        ramp_sizes: what the ramp means: global batch sizes by the samples after which they are in effect.
    """
    init = num_microbatches_calculator.init_num_microbatches_calculator
    rank = 1  # any but 0 suppresses its message
    if ramp is None or not IGNORES_RAMPS:
        init(rank, ramp, batch, micro_batch_size, data_parallel_size)
    else:
        schedule = " ".join(f"{samples}:{size}" for samples, size in ramp_sizes.items())
        init(rank, None, batch, micro_batch_size, data_parallel_size, step_batch_size_schedule=schedule)


@contextmanager
def loadable(folder: Path, common: Callable[[], Any]) -> Iterator[Path]:
    """The folder from which this release loads a checkpoint that any supported release has written.

    From 0.19 on a checkpoint holds the state that ranks share among its tensors. Earlier releases read it from
    common.pt: they get a folder of links to the checkpoint's files, with that file.

    Args:
        common: returns that state, read safely.
    """
    if _SERIES >= (0, 19) or (folder / "common.pt").exists():
        yield folder
        return
    with TemporaryDirectory() as name:
        links = Path(name)
        for path in folder.iterdir():
            (links / path.name).symlink_to(path.resolve())
        torch.save(common(), links / "common.pt")
        yield links
