"""A run's state in Megatron-core's torch_dist checkpoints: state to save, and loading.

Model and optimizer state (moments, main weights) are stored as unsharded tensors, so that any layout loads them; amax
histories with their layers; the scheduler's position; each rank's random state. Beside them ``config.yaml`` holds the
resolved options (including the seed, the base of all random keys), the recipe, the schedule, the layout and the
progress, which determines the position in the data (``resume.py``).
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
from megatron_lowprec.mcore.releases import loadable
from megatron_lowprec.mcore.te.te_layers import EXTRA_STATE, loading_extra_states
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from megatron_lowprec.training.checkpoint import optimizer_state, random_state, safe_load
from megatron_lowprec.training.checkpoint.history_tensors import store_histories_as_tensors
from megatron_lowprec.training.checkpoint.resume import Saved
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.distributed.rank_sync import run_on_all_ranks
from megatron_lowprec.training.distributed.watchdog import is_lost_connection
from megatron_lowprec.training.model import Model, Trainer
from megatron_lowprec.training.options.training_options import TrainingOptions
from megatron_lowprec.training.rampup import batch_size_at

# Exceptions of Megatron-core and torch for a damaged or foreign checkpoint; torch's own derives from BaseException.
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
class RunProgress:
    """Progress of a run."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    # Those of them at the end, which a later start goes on counting.
    skipped_in_a_row: int = 0
    nan_iterations: int = 0
    # The last iteration with a completed validation.
    evaluated: int = -1

    @property
    def last_step(self) -> int:
        """Number, from 0, of the last completed step; 0 before the first."""
        return max(self.iteration - 1, 0)


def state_to_save(trainer: Trainer, with_optimizer: bool = True) -> dict[str, Any]:
    """Tensors and objects of a checkpoint, as Megatron-core's sharded state; a collective call."""
    if with_optimizer:
        optimizer_state.prime(trainer)
    return _state(trainer, loading=False, with_optimizer=with_optimizer)


@dataclass(frozen=True)
class Loaded:
    """State from which a run resumes.

    Attributes:
        progress: progress of the run.
        notes: lines about state that was not loaded.
        uncalibrated: amax histories of delayed scaling are missing that training would have by now.
    """

    progress: RunProgress
    notes: list[str]
    uncalibrated: bool


def load(found: Saved, trainer: Trainer, config: Config, layout: dict[str, int]) -> Loaded:
    """Fill ``trainer`` from a checkpoint that passed ``resume.check_model``; a collective call.

    Raises:
        UserError: it cannot be read, or contains a disallowed pickle.
    """
    notes = []
    with_optimizer = not (config.finetune or config.no_load_optim)
    with_random_state = not (config.finetune or config.no_load_rng)
    if with_random_state and found.layout != layout:
        with_random_state = False
        notes.append("checkpoint: written on another layout of ranks, so dropout continues from a fresh random state")
    if with_optimizer:
        optimizer_state.prime(trainer)
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
    progress = RunProgress() if config.finetune else RunProgress(**found.progress)
    if _has_gradient_histories(state):
        notes += _resize_gradients(trainer, found, config, layout, progress.consumed_samples)
    if with_optimizer:
        optimizer_state.load(trainer, state["optimizer"])
        trainer.scheduler.step(increment=int(state["scheduler"]["num_steps"]))
        if trainer.gradient_factor is not None and trainer.gradient_factor.automatic and "gradient_factor" in state:
            trainer.gradient_factor.mu.fill_(state["gradient_factor"]["mu"])
    else:
        # Main weights are copies of the model's, taken before the load.
        if config.bf16:
            trainer.optimizer.reload_model_params()
        for inner in scaled_adams(trainer.optimizer):
            inner.read_weights()
    finalize(trainer.optimizer, trainer.chunks)
    if with_random_state:
        random_state.restore(state["random_state"])
    return Loaded(progress, notes, uncalibrated)


def load_weights(folder: Path, model: Model) -> list[str]:
    """Load the weights of a model for inference, from a checkpoint of any layout; a collective call.

    Returns lines about state that was not loaded.

    Raises:
        UserError: a damaged or foreign checkpoint.
    """
    metadata = {"singleton_local_shards": False, "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    chunks = _named_chunks(model.chunks)
    state = _weights_and_histories(chunks, metadata)
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
    """The state in the checkpoint; objects and extra states are checked before other code unpickles them."""
    objects = [item.unique_key for item in nested_values(state) if isinstance(item, ShardedObject)]
    _check_together(folder, lambda: safe_load.check_objects(folder, metadata, objects))
    with loadable(folder, lambda: safe_load.common_state(folder, metadata)) as path:
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(path))
    _check_together(folder, lambda: _check_extra_states(loaded, folder))
    return loaded


def _check_extra_states(state: dict[str, Any], folder: Path) -> None:
    """Replace every extra state by checked bytes; Megatron-core numbers those of grouped experts."""
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


def _same_gradients(found: Saved, config: TrainingOptions) -> bool:
    """Whether gradients have the checkpoint's scale in the backward pass: both sums, or both means."""
    return bool(found.content["options"].get("calculate_per_token_loss")) == config.calculate_per_token_loss


def _resize_gradients(
    trainer: Trainer, found: Saved, config: Config, layout: Mapping[str, int], consumed: int
) -> list[str]:
    """Rescale amax histories of gradients to the present batch per rank; returns a note if it differs.

    A gradient in the backward pass is scaled as the mean over its own rank's tokens of an iteration: with half the
    batch on a rank it is twice as large. In a batch-size ramp histories are stored for the next iteration.

    Args:
        consumed: samples consumed before this run.
    """
    if config.calculate_per_token_loss:
        return []
    options = found.content["options"]
    before = _tokens_of_a_rank(options, found.layout, found.progress["consumed_samples"])
    factor = before / _tokens_of_a_rank(asdict(config), layout, consumed)
    if not trainer.runtime.rescale_gradients(factor):
        return []
    return [f"checkpoint: amax histories of gradients times {factor:g}, for a rank's batch is another"]


def _has_gradient_histories(state: Mapping[str, Any]) -> bool:
    """Whether the loaded state has amax histories of gradients; empty ones follow no earlier batch."""
    chunks = [chunk for name, chunk in state.items() if name.startswith("model")]
    return any(".amax." in key and key.endswith("grad_output") for chunk in chunks for key in chunk)


def _tokens_of_a_rank(options: Mapping[str, Any], layout: Mapping[str, int], consumed: int) -> float:
    """Tokens of the iteration that follows ``consumed`` samples, on one data-parallel rank."""
    batch = batch_size_at(options.get("rampup_batch_size"), options["global_batch_size"], consumed)
    return batch * int(options["seq_length"]) / layout["data"]


def _fit_histories(state: dict[str, Any], metadata: Metadata, same_gradients: bool = True) -> tuple[bool, list[str]]:
    """Request the amax histories in the checkpoint that this recipe uses as well; the others start empty.

    Returns whether any starts empty, and notes about these and about stored histories that this recipe does not use.
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
    """Drop TransformerEngine's extra state, its amax histories, unless the checkpoint has it of the same recipe.

    Returns the same as ``_fit_histories``.
    """
    before = found.content["options"].get("transformer_impl", "local")
    stored = found.content.get("recipe", {})
    same_recipe = found.recipe == trainer.runtime.recipe
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
    """Whether a recipe, as stored in ``config.yaml``, uses delayed scaling for any operand."""
    operands = [operand for gemm in GEMM_OPERANDS for operand in (recipe.get(gemm) or {}).values()]
    return any(isinstance(operand, Mapping) and operand.get("scaling") == "delayed" for operand in operands)


def _load_weights(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """``load_state_dict``; only keys dropped by ``_leave_out_extra_states`` may be missing."""
    missing, unexpected = model.load_state_dict(state, strict=False)
    wrong = [key for key in (*missing, *unexpected) if not key.endswith(EXTRA_STATE)]
    assert not wrong, wrong


def _weights_and_histories(chunks: Sequence[tuple[str, torch.nn.Module]], metadata: dict[str, Any]) -> dict[str, Any]:
    """The chunks' sharded state dicts, by name."""
    state: dict[str, Any] = {}
    for name, chunk in chunks:
        model = unwrap_model(chunk)
        state[name] = model.sharded_state_dict(metadata=metadata)
        store_histories_as_tensors(model, state[name])
    return state


def _named_chunks(chunks: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    return [("model" if len(chunks) == 1 else f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def _state(
    trainer: Trainer, loading: bool, with_optimizer: bool = True, with_random_state: bool = True
) -> dict[str, Any]:
    metadata = {
        # The other sharding types do not resume bit for bit, or fail on torch's AdamW.
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }
    state = _weights_and_histories(_named_chunks(trainer.chunks), metadata)
    if with_optimizer:
        state["optimizer"] = optimizer_state.sharded(trainer, state, loading, metadata)
        state["scheduler"] = {"num_steps": trainer.scheduler.num_steps}
        if trainer.gradient_factor is not None:
            state["gradient_factor"] = {"mu": float(trainer.gradient_factor.mu)}
    # after the optimizer's state, whose keys are the weights themselves
    _store_in_compute_dtype(state, trainer, loading)
    if with_random_state:
        rank, size = dist.get_rank(), dist.get_world_size()
        state["random_state"] = ShardedObject("random_state", random_state.capture(), (size,), (rank,), replica_id=0)
    return state


def _store_in_compute_dtype(state: dict[str, Any], trainer: Trainer, loading: bool) -> None:
    """Replace FP8 weights by the tensors that a run without --fp8-param-gather saves, or by buffers to load into."""
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
