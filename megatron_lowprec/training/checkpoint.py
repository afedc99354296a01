"""Checkpoints in Megatron-core's torch_dist format: SAVE/iter_0000010/ and latest_checkpointed_iteration.txt.

Beside the tensors each checkpoint holds ``config.yaml``: the resolved options, the recipe, the schedule, the layout
and the progress. It is read before anything is loaded, so that a checkpoint of another model is refused early and in
one line.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore.te import EXTRA_STATE, trust_extra_states
from megatron_lowprec.recipe.load import recipe_to_dict
from megatron_lowprec.training.config import Config
from megatron_lowprec.training.model import Model, Trainer, torch_optimizers
from megatron_lowprec.training.saved import CONFIG, TRACKER, Saved, iteration_folder

# What Megatron-core and torch raise over a damaged or foreign checkpoint; torch's own derives from BaseException.
_UNREADABLE = (
    dist_checkpointing.core.CheckpointingException,
    CheckpointException,
    AssertionError,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    pickle.UnpicklingError,
)


@dataclass
class Progress:
    """How far a run has come."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0


def save(folder: str, trainer: Trainer, progress: Progress, saved: dict[str, Any]) -> Path:
    """Write one checkpoint; every rank calls it. ``saved`` is what ``config.yaml`` gets beside the progress.

    It is written beside its final place and moved there when it is whole; the tracker file comes last. So a checkpoint
    that the tracker names is never a half one, whenever the process dies.
    """
    final = iteration_folder(folder, progress.iteration)
    partial = final.with_name(final.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    _prime_adam(trainer.optimizer)
    state = _state(trainer, loading=False)
    dist_checkpointing.save(state, str(partial), validate_access_integrity=True)
    dist.barrier()
    if dist.get_rank() == 0:
        (partial / CONFIG).write_text(yaml.safe_dump({**saved, "progress": asdict(progress)}, sort_keys=False))
        old = final.with_name(final.name + ".old")
        if final.exists():
            final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
        tracker = Path(folder) / TRACKER
        tracker.with_suffix(".partial").write_text(f"{progress.iteration}\n")
        os.replace(tracker.with_suffix(".partial"), tracker)
    dist.barrier()
    return final


def load(found: Saved, trainer: Trainer, config: Config, layout: dict[str, int]) -> tuple[Progress, list[str]]:
    """Fill ``trainer`` from a checkpoint that ``saved.check_shape`` has let pass; every rank calls it.

    Returns the progress to go on from, and lines that say what was not loaded.
    """
    notes = []
    with_optimizer = not (config.finetune or config.no_load_optim)
    with_random_state = not (config.finetune or config.no_load_rng)
    if with_random_state and found.layout != layout:
        with_random_state = False
        notes.append("checkpoint: written on another layout of ranks, so dropout continues from a fresh random state")
    if with_optimizer:
        _prime_adam(trainer.optimizer)
    state = _state(trainer, loading=True, with_optimizer=with_optimizer, with_random_state=with_random_state)
    try:
        notes += [*_leave_out_histories(state, found.folder), *_leave_out_extra_states(state, found, trainer)]
        state = dist_checkpointing.load(state, str(found.folder))
    except _UNREADABLE as error:
        what = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"--load {found.folder}: cannot be loaded: {what}; choose an older checkpoint") from None
    if trainer.config.transformer_impl == "transformer_engine":
        trust_extra_states()
    for name, chunk in _named_chunks(trainer.chunks):
        _load_weights(unwrap_model(chunk), state[name])
    if with_optimizer:
        _load_optimizer(trainer.optimizer, state["optimizer"])
        trainer.scheduler.step(increment=int(state["scheduler"]["num_steps"]))
    elif config.bf16:
        # Main weights are copies of the model's, made before these were loaded.
        trainer.optimizer.reload_model_params()
    if with_random_state:
        _set_random_state(state["random_state"])
    return (Progress() if config.finetune else Progress(**found.progress)), notes


def load_weights(folder: Path, model: Model) -> list[str]:
    """Fill a model that is not trained on, whatever the layout that its checkpoint was written on; every rank calls it.

    Returns lines that say what was not loaded.

    Raises:
        UserError: a damaged or foreign checkpoint.
    """
    metadata = {"singleton_local_shards": False, "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    chunks = _named_chunks(model.chunks)
    state = {name: unwrap_model(chunk).sharded_state_dict(metadata=metadata) for name, chunk in chunks}
    try:
        notes = _leave_out_histories(state, folder)
        state = dist_checkpointing.load(state, str(folder))
    except _UNREADABLE as error:
        what = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"--load {folder}: cannot be loaded: {what}; choose an older checkpoint") from None
    for name, chunk in chunks:
        unwrap_model(chunk).load_state_dict(state[name])
    return notes


def _leave_out_histories(state: dict[str, Any], folder: Path) -> list[str]:
    """Drop the amax histories that the checkpoint lacks or holds in another length: these begin anew.

    Delayed scaling then starts as in a fresh run, with scale 1 until the first step has been seen.
    """
    stored = dist_checkpointing.load_tensors_metadata(str(folder))
    dropped = 0
    for name, chunk in state.items():
        if not name.startswith("model"):
            continue
        for key in [key for key in chunk if ".amax." in key]:
            found = stored.get(chunk[key].key)
            if found is None or found.global_shape != chunk[key].global_shape:
                del chunk[key]
                dropped += 1
    return [f"checkpoint: {dropped} amax histories are not in it as this recipe keeps them; they begin anew"] * (
        dropped > 0
    )


def _leave_out_extra_states(state: dict[str, Any], found: Saved, trainer: Trainer) -> list[str]:
    """Drop TransformerEngine's own state, its amax histories, unless the checkpoint holds it of this very recipe."""
    before = found.content["options"].get("transformer_impl", "local")
    same = found.content.get("recipe") == recipe_to_dict(trainer.runtime.recipe)
    if same and before == trainer.config.transformer_impl:
        return []
    dropped = [
        chunk.pop(key)
        for name, chunk in state.items()
        if name.startswith("model")
        for key in [key for key in chunk if key.endswith(EXTRA_STATE)]
    ]
    delayed = trainer.config.fp8 and trainer.config.fp8_recipe == "delayed"
    return ["checkpoint: it has no amax histories of TransformerEngine as this recipe keeps them; they begin anew"] * (
        bool(dropped) and bool(delayed)
    )


def _load_weights(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """``load_state_dict``, which may lack what ``_leave_out_extra_states`` has dropped, and nothing else."""
    missing, unexpected = model.load_state_dict(state, strict=False)
    wrong = [key for key in (*missing, *unexpected) if not key.endswith(EXTRA_STATE)]
    assert not wrong, wrong


def _named_chunks(chunks: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    return [("model" if len(chunks) == 1 else f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def _state(
    trainer: Trainer, loading: bool, with_optimizer: bool = True, with_random_state: bool = True
) -> dict[str, Any]:
    metadata = {
        # The other kinds do not resume bit for bit, or fail on torch's AdamW.
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = {
        name: unwrap_model(chunk).sharded_state_dict(metadata=metadata) for name, chunk in _named_chunks(trainer.chunks)
    }
    if with_optimizer:
        state["optimizer"] = trainer.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
        state["scheduler"] = {"num_steps": trainer.scheduler.num_steps}
    if with_random_state:
        rank, size = dist.get_rank(), dist.get_world_size()
        state["random_state"] = ShardedObject("random_state", _random_state(), (size,), (rank,), replica_id=0)
    return state


def _random_state() -> dict[str, Any]:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - what Megatron-core draws from
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _prime_adam(optimizer: MegatronOptimizer) -> None:
    """Make torch's AdamW state before its first step: the distributed optimizer reads it to save and to load."""
    for inner in torch_optimizers(optimizer):
        if not isinstance(inner, torch.optim.AdamW):
            continue
        for group in inner.param_groups:
            for weight in group["params"]:
                if not inner.state[weight]:
                    inner.state[weight] = {
                        "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                        "exp_avg": torch.zeros_like(weight),
                        "exp_avg_sq": torch.zeros_like(weight),
                    }


def _load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """``optimizer.load_state_dict`` around two faults of Megatron-core 0.16.1 with torch's AdamW.

    Its distributed optimizer copies each key of a weight's state, but a checkpoint has no "step" per weight (KeyError);
    and it hands all weights one "step" tensor, which Adam then advances once a weight.
    """
    parts = [p for p in getattr(optimizer, "chained_optimizers", [optimizer]) if isinstance(p, DistributedOptimizer)]
    for part in parts:
        _keep_steps(part)
    optimizer.load_state_dict(state)
    for part in parts:
        del part._set_main_param_and_optimizer_states
    for inner in torch_optimizers(optimizer):
        for weight, weight_state in inner.state.items():
            if "step" in weight_state:
                weight_state["step"] = weight_state["step"].clone().to(weight.device)


def _keep_steps(part: DistributedOptimizer) -> None:
    set_states = part._set_main_param_and_optimizer_states

    def set_states_but_step(model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, place = part.model_param_group_index_map[model_param]
        current = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]
        steps = {"step": current["step"].clone()} if "step" in current else {}
        set_states(model_param, {**steps, **tensors})

    part._set_main_param_and_optimizer_states = set_states_but_step
