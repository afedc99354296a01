"""The optimizer's state in a checkpoint, with workarounds for bugs of Megatron-core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer import Adam
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_lowprec.mcore.optim.recipe_optimizer import torch_optimizers
from megatron_lowprec.mcore.patches import bind
from megatron_lowprec.optimizer.muon import Muon
from megatron_lowprec.optimizer.optimizers import OPTIMIZERS
from megatron_lowprec.training.model import Trainer

_ONLY_MOMENT = "momentum_buffer"  # of torch's Muon and SGD
_MAIN_WEIGHTS = "fp32_from_fp16_params"


def sharded(trainer: Trainer, state: dict[str, Any], loading: bool, metadata: dict[str, Any]) -> dict[str, Any]:
    """Megatron-core's sharded state; ``state`` is the model's."""
    parts = _distributed_parts(trainer.optimizer)
    empty = [part for part in parts if part.optimizer and not any(g["params"] for g in part.optimizer.param_groups)]
    for part in parts:
        _index_as_buckets_lie(part)
        _complete_moments(part)
    for part in empty:
        _count_of_chain(part, trainer)
    found: dict[str, Any] = trainer.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    for part in parts:
        del part.get_parameter_state_dp_zero, part._get_main_param_and_optimizer_states
    for part in empty:
        del part.state_dict
    for saved in _of_chain(found):
        # lists without weights of rank 0 would be saved as they are, and not be joined with those of other ranks
        if not any(saved.get(_MAIN_WEIGHTS, [])):
            saved.pop(_MAIN_WEIGHTS, None)
    return found


def prime(trainer: Trainer) -> None:
    """Create the state of torch's optimizers before their first step: the distributed one reads it to save and load."""
    row = OPTIMIZERS[trainer.inner]
    for inner in torch_optimizers(trainer.optimizer):
        if not isinstance(inner, torch.optim.AdamW | torch.optim.SGD | Muon):
            continue
        matrices = inner.matrices if isinstance(inner, Muon) else ()
        for group in inner.param_groups:
            for weight in group["params"]:
                state = inner.state[weight]
                state.setdefault("step", torch.zeros((), dtype=torch.float32, device=weight.device))
                for name in row.matrix_state if weight in matrices else row.other_state:
                    if name not in state:
                        state[name] = torch.zeros_like(weight)


def load(trainer: Trainer, state: dict[str, Any]) -> None:
    """``optimizer.load_state_dict`` with workarounds for bugs of Megatron-core 0.16.1.

    With torch's AdamW the distributed optimizer copies each key of a weight's state, but a checkpoint has no "step" per
    weight (KeyError). It also gives all weights one "step" tensor, which Adam then advances once per weight. Without
    the distributed optimizer "step" stays where the saving run counts: FusedAdam of TransformerEngine and apex in
    groups of weights, torch's AdamW at each weight (KeyError, or a count from 0). With any optimizer, the checkpoint's
    learning rates, betas and eps would silently override this run's options. From 0.19 on Megatron-core finds a group
    of weights by its learning rates, among others, and would miss it where they differ.
    """
    inners = torch_optimizers(trainer.optimizer)
    for group in (group for inner in inners[:1] for group in inner.param_groups[:1]):
        rates: dict[str, Any] = {name: group[name] for name in ("max_lr", "min_lr") if name in group}  # of all groups
        for saved in (saved for part in _parts(state) for saved in part["param_groups"]):
            saved.update(rates)
    asked = [[_options_of(group) for group in inner.param_groups] for inner in inners]
    parts = _distributed_parts(trainer.optimizer)
    for part in parts:
        _keep_steps(part)
    if inners:
        _place_steps(state, inners[0])
    for saved in _of_chain(state):
        if "optimizer" in saved:
            saved.setdefault(_MAIN_WEIGHTS, [])  # which ``sharded`` leaves out where there is none
    for part in _parts(state):
        part.setdefault("state", {})  # not in the checkpoint for a rank without weights, before an update and with SGD
    trainer.optimizer.load_state_dict(state)
    for part in parts:
        del part._set_main_param_and_optimizer_states
    ends = {"max_lr": trainer.scheduler.max_lr, "min_lr": trainer.scheduler.min_lr}
    for inner, options in zip(inners, asked, strict=True):
        for group, option in zip(inner.param_groups, options, strict=True):
            group.update(option | ends)
        for weight, weight_state in inner.state.items():
            if "step" in weight_state:
                weight_state["step"] = weight_state["step"].clone().to(weight.device)


def _of_chain(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """The states of a chain's optimizers by their numbers, or of a single one."""
    return [state[number] for number in sorted(state)] if all(isinstance(key, int) for key in state) else [state]


def _parts(state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """The states of one or several optimizers, each with groups of weights."""
    if "param_groups" in state:
        yield state
        return
    for part in state.values():
        if isinstance(part, dict):
            yield from _parts(part)


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a group of weights that the command line sets; "step" counts its updates."""
    return {name: value for name, value in group.items() if name not in ("params", "step")}


def _distributed_parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    return [p for p in getattr(optimizer, "chained_optimizers", [optimizer]) if isinstance(p, DistributedOptimizer)]


def _keep_steps(part: DistributedOptimizer) -> None:
    set_states = part._set_main_param_and_optimizer_states

    def set_states_but_step(model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, place = part.model_param_group_index_map[model_param]
        current = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]
        steps = {"step": current["step"].clone()} if "step" in current else {}
        only = {_ONLY_MOMENT: tensors["exp_avg"]} if _ONLY_MOMENT in current else {}
        set_states(model_param, {**steps, **only, **tensors})

    bind("adam_steps", part, _set_main_param_and_optimizer_states=set_states_but_step)


def _complete_moments(part: DistributedOptimizer) -> None:
    """Let a single moment be the first of two, and the second zeros: Megatron-core saves two."""
    get_states = part._get_main_param_and_optimizer_states

    def get_two(model_param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = get_states(model_param)
        if _ONLY_MOMENT in tensors:
            only = tensors.pop(_ONLY_MOMENT)
            tensors |= {"exp_avg": only, "exp_avg_sq": only.new_zeros(()).expand_as(only)}
        return tensors

    bind("single_moment", part, _get_main_param_and_optimizer_states=get_two)


def _place_steps(state: dict[Any, Any], inner: torch.optim.Optimizer) -> None:
    """Set the number of updates, 0 before the first, where ``inner`` counts them, in all parts of a chain.

    Megatron-core saves it from rank 0 alone, which may hold no expert. The distributed optimizer's state has no moments
    here, and Megatron-core sets its count.
    """
    fused = Adam is not torch.optim.AdamW and isinstance(inner, Adam)
    in_groups = not isinstance(inner, torch.optim.AdamW | torch.optim.SGD)
    parts = [part for part in _parts(state) if part.get("state")]
    weights = [each for part in parts for each in part["state"].values() if isinstance(each, dict)]
    groups = [group for part in parts for group in part["param_groups"]]
    found = [part["state"].pop("common_step") for part in parts if "common_step" in part["state"]]
    found += [each.pop("step") for each in (*weights, *groups) if "step" in each]
    step = found[0] if found else 0
    if in_groups:
        for group in groups:
            group["step"] = int(step)
    if not fused:
        for part in parts:
            part["state"]["common_step"] = torch.as_tensor(step, dtype=torch.float32)


def _count_of_chain(part: DistributedOptimizer, trainer: Trainer) -> None:
    """Let a part without weights on this rank have the count of updates of the others, where it would have none."""
    inners = torch_optimizers(trainer.optimizer)
    places = [each for inner in inners for each in (*inner.state.values(), *inner.param_groups)]
    step = next((each["step"] for each in places if "step" in each), 0.0)
    count = step.item() if torch.is_tensor(step) else step

    def state_of_groups() -> dict[str, Any]:
        groups = part.optimizer.state_dict()["param_groups"]
        kept = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        return {"optimizer": {"param_groups": [group | {"step": count} for group in kept]}}

    bind("count_of_a_chain", part, state_dict=state_of_groups)


def _index_as_buckets_lie(part: DistributedOptimizer) -> None:
    """Work around a bug of Megatron-core 0.16.1, which saves moments and main weights shifted against their weights.

    It gathers the state of a buffer's buckets without the padding after each, but slices weights by their offsets in
    the padded buffer. There are several buckets with --overlap-grad-reduce in a large model, or with embeddings shared
    between pipeline stages; padding, if a bucket's size is no multiple of lcm(data-parallel size, 128).
    """
    gather = part.get_parameter_state_dp_zero

    def gather_with_padding(**options: Any) -> dict[Any, Any]:
        state: dict[Any, Any] = gather(**options)
        for number, buffer in enumerate(part.buffers):
            for tensors in state[number].values():
                for key in [key for key, value in tensors.items() if torch.is_tensor(value)]:
                    placed, start = torch.zeros(buffer.numel, dtype=tensors[key].dtype), 0
                    for bucket in buffer.buckets:
                        size = bucket.numel_unpadded
                        placed[bucket.offset : bucket.offset + size] = tensors[key][start : start + size]
                        start += size
                    tensors[key] = placed
        return state

    bind("padded_buckets", part, get_parameter_state_dp_zero=gather_with_padding)
