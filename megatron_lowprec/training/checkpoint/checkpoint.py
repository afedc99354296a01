"""A run's state as Megatron-core's torch_dist checkpoints hold it: what is saved, and how it is loaded.

Model and optimizer (moments, main weights) by unsharded tensors, so that any layout loads them; amax histories with the
layers they belong to; the scheduler's position; each rank's random state. Beside them ``config.yaml`` holds the
resolved options (the seed among them, the base of all random keys), the recipe, the schedule, the layout and the
progress, from which the position in the data follows (``saved.py``).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore.optim.fp8_param_gather import compute_dtype_weights, finalize
from megatron_lowprec.mcore.optim.scaled_adam import scaled_adams
from megatron_lowprec.mcore.te.te_layers import EXTRA_STATE, loading_extra_states
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.recipe.parsing import recipe_to_dict
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from megatron_lowprec.training.checkpoint import optimizer_state, random_state, safe_load
from megatron_lowprec.training.checkpoint.resume import Saved
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.distributed.rank_sync import run_on_all_ranks
from megatron_lowprec.training.distributed.watchdog import is_lost_connection
from megatron_lowprec.training.model import Model, Trainer
from megatron_lowprec.training.rampup import batch_size_at

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
    safe_load.Damaged,
)


@dataclass
class Progress:
    """How far a run has come."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    # The last iteration after which the validation was completed.
    evaluated: int = -1


def state_to_save(trainer: Trainer) -> dict[str, Any]:
    """All that a checkpoint's tensors and objects hold, as Megatron-core's sharded state; every rank calls it."""
    optimizer_state.prime_adam(trainer.optimizer)
    return _state(trainer, loading=False)


@dataclass(frozen=True)
class Loaded:
    """Where a run goes on.

    Attributes:
        progress: how far it has come.
        notes: lines about what was not loaded.
        uncalibrated: delayed scaling lacks amax histories that training would have by now.
    """

    progress: Progress
    notes: list[str]
    uncalibrated: bool


def load(found: Saved, trainer: Trainer, config: Config, layout: dict[str, int]) -> Loaded:
    """Fill ``trainer`` from a checkpoint that ``saved.check_model`` has let pass; every rank calls it.

    Raises:
        UserError: it cannot be read, or holds a pickle that does not belong there.
    """
    notes = []
    with_optimizer = not (config.finetune or config.no_load_optim)
    with_random_state = not (config.finetune or config.no_load_rng)
    if with_random_state and found.layout != layout:
        with_random_state = False
        notes.append("checkpoint: written on another layout of ranks, so dropout continues from a fresh random state")
    if with_optimizer:
        optimizer_state.prime_adam(trainer.optimizer)
    state = _state(trainer, loading=True, with_optimizer=with_optimizer, with_random_state=with_random_state)
    try:
        metadata = safe_load.examine(found.folder)
        uncalibrated, more = _fit_histories(state, metadata, same_gradients=_same_gradients(found, config))
        te_uncalibrated, te_more = _leave_out_extra_states(state, found, trainer, _same_gradients(found, config))
        uncalibrated |= te_uncalibrated
        notes += [*more, *te_more]
        state = _read(state, found.folder, metadata)
    except _UNREADABLE as error:
        if is_lost_connection(error):
            raise
        raise _unreadable(found.folder, error) from None
    with loading_extra_states():
        for name, chunk in _named_chunks(trainer.chunks):
            _load_weights(unwrap_model(chunk), state[name])
    progress = Progress() if config.finetune else Progress(**found.progress)
    notes += _resize_gradients(trainer, found, config, layout, progress.consumed_samples)
    if with_optimizer:
        optimizer_state.load(trainer, state["optimizer"])
        trainer.scheduler.step(increment=int(state["scheduler"]["num_steps"]))
        if trainer.gradient_factor is not None and "gradient_factor" in state:
            trainer.gradient_factor.mu.fill_(state["gradient_factor"]["mu"])
    else:
        # Main weights are copies of the model's, made before these were loaded.
        if config.bf16:
            trainer.optimizer.reload_model_params()
        for inner in scaled_adams(trainer.optimizer):
            inner.read_weights()
    finalize(trainer.optimizer, trainer.chunks)
    if with_random_state:
        random_state.restore(state["random_state"])
    return Loaded(progress, notes, uncalibrated)


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
        stored = safe_load.examine(folder)
        _, notes = _fit_histories(state, stored)
        state = _read(state, folder, stored)
    except _UNREADABLE as error:
        if is_lost_connection(error):
            raise
        raise _unreadable(folder, error) from None
    with loading_extra_states():
        for name, chunk in chunks:
            unwrap_model(chunk).load_state_dict(state[name])
    return notes


def _read(state: dict[str, Any], folder: Path, metadata: Metadata) -> dict[str, Any]:
    """The state as the checkpoint holds it; objects and extra states are checked before others unpickle them."""
    objects = [item.unique_key for item in nested_values(state) if isinstance(item, ShardedObject)]
    _check_together(folder, lambda: safe_load.check_objects(folder, metadata, objects))
    loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    _check_together(folder, lambda: _check_extra_states(loaded, folder))
    return loaded


def _check_extra_states(state: dict[str, Any], folder: Path) -> None:
    """Put checked bytes in the place of every extra state; Megatron-core numbers those of grouped experts."""
    for name, chunk in state.items():
        if name.startswith("model"):
            for key in [key for key in chunk if EXTRA_STATE in key]:
                chunk[key] = safe_load.checked_extra_state(f"{folder}: {key}", chunk[key])


def _check_together(folder: Path, check: Callable[[], None]) -> None:
    def work() -> None:
        try:
            check()
        except safe_load.Damaged as error:
            raise _unreadable(folder, error) from None

    run_on_all_ranks(work)


def _unreadable(folder: Path, error: BaseException) -> UserError:
    what = " ".join(str(error).split())[:300] or type(error).__name__
    return UserError(f"--load {folder}: cannot be loaded: {what}; choose an older checkpoint")


def _same_gradients(found: Saved, config: Config) -> bool:
    """Whether gradients of the backward pass are of the checkpoint's scale, and not sums where those were means."""
    return bool(found.content["options"].get("calculate_per_token_loss")) == config.calculate_per_token_loss


def _resize_gradients(
    trainer: Trainer, found: Saved, config: Config, layout: Mapping[str, int], consumed: int
) -> list[str]:
    """Bring amax histories of gradients to the size that gradients have now; a line about it where it is another.

    A gradient travels as the mean over its own rank's tokens of an iteration: with half the batch on a rank it is twice
    as large, whatever the sum over ranks. In a ramp of the batch they are stored for the iteration that comes next.

    Args:
        consumed: samples that this run begins with.
    """
    if config.calculate_per_token_loss or not _same_gradients(found, config):
        return []
    options = found.content["options"]
    before = _tokens_of_a_rank(options, found.layout, found.progress["consumed_samples"])
    factor = before / _tokens_of_a_rank(asdict(config), layout, consumed)
    if not trainer.runtime.rescale_gradients(factor):
        return []
    return [f"checkpoint: amax histories of gradients times {factor:g}, for a rank's batch is another"]


def _tokens_of_a_rank(options: Mapping[str, Any], layout: Mapping[str, int], consumed: int) -> float:
    """Tokens of the iteration that follows ``consumed`` samples, on one data-parallel rank."""
    batch = batch_size_at(options.get("rampup_batch_size"), options["global_batch_size"], consumed)
    return batch * int(options["seq_length"]) / layout["data"]


def _fit_histories(state: dict[str, Any], metadata: Metadata, same_gradients: bool = True) -> tuple[bool, list[str]]:
    """Ask for the amax histories that the checkpoint has as this recipe keeps them; the others begin anew.

    Returns whether any does, and lines about these and about stored ones that this recipe has no use for.
    """
    stored = metadata.state_dict_metadata
    unused = {key for key in stored if ".amax." in key}
    missing = rescaled = 0
    for name, chunk in state.items():
        if not name.startswith("model"):
            continue
        for key in [key for key in chunk if ".amax." in key]:
            found = stored.get(chunk[key].key)
            unused.discard(chunk[key].key)
            if not isinstance(found, TensorStorageMetadata) or found.size != chunk[key].global_shape:
                del chunk[key]
                missing += 1
            elif not same_gradients and key.endswith("grad_output"):
                del chunk[key]
                rescaled += 1
    notes = []
    if rescaled:
        notes.append(
            f"checkpoint: {rescaled} amax histories of gradients begin anew, for --calculate-per-token-loss differs "
            "and with it the scale of the backward pass"
        )
    if missing:
        notes.append(f"checkpoint: {missing} amax histories are not in it as this recipe keeps them; they begin anew")
    if unused:
        operands = ", ".join(sorted({key.rpartition(".")[2] for key in unused}))
        notes.append(f"checkpoint: its amax histories of {operands} are dropped, for this recipe has no use for them")
    return missing + rescaled > 0, notes


def _leave_out_extra_states(
    state: dict[str, Any], found: Saved, trainer: Trainer, same_gradients: bool
) -> tuple[bool, list[str]]:
    """Drop TransformerEngine's own state, its amax histories, unless the checkpoint holds it of this very recipe.

    Returns and says the same as ``_fit_histories``.
    """
    before = found.content["options"].get("transformer_impl", "local")
    stored = found.content.get("recipe", {})
    same_recipe = stored == recipe_to_dict(trainer.runtime.recipe)
    if same_recipe and same_gradients and before == trainer.config.transformer_impl:
        return False, []
    for name, chunk in state.items():
        if name.startswith("model"):
            for key in [key for key in chunk if key.endswith(EXTRA_STATE)]:
                del chunk[key]
    missing = bool(trainer.config.fp8) and trainer.config.fp8_recipe == "delayed"
    notes = []
    if before == "transformer_engine" and _is_delayed(stored):
        notes.append(
            "checkpoint: its amax histories of TransformerEngine are dropped, for they are another recipe's or scale's"
        )
    if missing:
        notes.append("checkpoint: no amax histories are in it as TransformerEngine keeps them; they begin anew")
    return missing, notes


def _is_delayed(recipe: Mapping[str, Any]) -> bool:
    """Whether a recipe, as ``config.yaml`` holds it, scales any operand by its history."""
    operands = [operand for gemm in GEMM_OPERANDS for operand in (recipe.get(gemm) or {}).values()]
    return any(isinstance(operand, Mapping) and operand.get("scaling") == "delayed" for operand in operands)


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
        state["optimizer"] = optimizer_state.sharded(trainer, state, loading, metadata)
        state["scheduler"] = {"num_steps": trainer.scheduler.num_steps}
        if trainer.gradient_factor is not None:
            state["gradient_factor"] = {"mu": float(trainer.gradient_factor.mu)}
    # behind the optimizer, which tells the state of a weight by the weight itself
    _store_in_compute_dtype(state, trainer, loading)
    if with_random_state:
        rank, size = dist.get_rank(), dist.get_world_size()
        state["random_state"] = ShardedObject("random_state", random_state.capture(), (size,), (rank,), replica_id=0)
    return state


def _store_in_compute_dtype(state: dict[str, Any], trainer: Trainer, loading: bool) -> None:
    """Put what a run without --fp8-param-gather would save in the place of FP8 weights, or room to load it into."""
    held = {
        id(tensor.data): tensor
        for name, _ in _named_chunks(trainer.chunks)
        for tensor in state[name].values()
        if isinstance(getattr(tensor, "data", None), Fp8Weight)
    }
    if loading:
        for tensor in held.values():
            tensor.data = torch.empty(tensor.data.shape, dtype=tensor.data.dtype)
    elif held:
        for weight, plain in compute_dtype_weights(trainer.optimizer):
            held.pop(id(weight)).data = plain
        assert not held, "every FP8 weight has a main weight"
