"""Parts of a resolved run: groups of options whose sizes are filled. ``Config`` has one property for each."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

from megatron_lowprec.training.options.declaration import Group
from megatron_lowprec.training.options.model_options import ModelOptions
from megatron_lowprec.training.options.training_options import TrainingOptions


@dataclass(frozen=True, kw_only=True)
class ModelSizes(ModelOptions):
    """The sizes that a model must name."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int


@dataclass(frozen=True, kw_only=True)
class ModelShape(ModelSizes):
    """All sizes of a model, after ``resolve_model``."""

    ffn_hidden_size: int
    kv_channels: int
    max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class Steps(TrainingOptions):
    """Iterations of a run and their samples, after ``resolve_run``."""

    micro_batch_size: int
    global_batch_size: int

    @property
    def iterations(self) -> int:
        """Iterations of the whole run."""
        assert self.train_iters is not None, "resolve_run() has not run"
        return self.train_iters

    @property
    def samples(self) -> int:
        """Samples of the whole run as requested, the schedule's horizon; ``run_length`` has the consumed ones."""
        return self.train_samples or self.iterations * self.global_batch_size


P = TypeVar("P", bound=Group)


def filled(part: type[P], options: Group) -> P:
    """``part`` of options whose sizes are filled."""
    values = {option.name: getattr(options, option.name) for option in fields(part)}
    named = [
        name for kind in part.__mro__ if "PART" not in vars(kind) for name in vars(kind).get("__annotations__", ())
    ]
    missing = [name for name in named if values.get(name, 0) is None]
    assert not missing, f"resolve() has not run: {', '.join(missing)}"
    return part(**values)
