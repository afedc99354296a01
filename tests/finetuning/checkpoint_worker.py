"""Checkpoints of frozen layers on two ranks; ``test_frozen_checkpoints.py`` starts it once."""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from megatron_lowprec import convert
from megatron_lowprec.finetuning import quantize_frozen_weights
from tests.checks import run_checks
from tests.finetuning.frozen_layers import STORED, all_blocks
from tests.linear.wrapping import all_ranks, check_in, train
from tests.weekly import ALIKE

CHECKS: dict[str, Callable[[], None]] = {}
WIDTH = 256


def model_of(recipe: str, kind: str, seed: int) -> tuple[nn.Module, nn.Module]:
    """A model whose first layer is codes and whose second trains, and the same model wrapped."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].weight.requires_grad_(False)
    with torch.no_grad():
        model[0].weight.mul_(seed)
    quantize_frozen_weights(convert(model, all_blocks(recipe)))
    if kind == "ddp":
        return model, nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    for layer in model:
        fully_shard(layer, mesh=all_ranks())
    fully_shard(model, mesh=all_ranks())
    return model, model


def batches(first: int) -> list[torch.Tensor]:
    """Of two steps on this rank."""
    generator = torch.Generator().manual_seed(10 * first + dist.get_rank())
    return [torch.randn(32, WIDTH, generator=generator) for _ in range(2)]


def trained_and_fresh(recipe: str, kind: str) -> tuple[list[Any], list[nn.Module]]:
    """Models and their wrappers; the second model has other weights and no state."""
    (trained, run), (fresh, other) = model_of(recipe, kind, 1), model_of(recipe, kind, 3)
    train(run, batches(0))
    return [trained, fresh], [run, other]


def assert_alike(models: list[nn.Module], runs: list[nn.Module]) -> None:
    """State and further losses are equal."""
    want, got = (get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) for model in models)
    assert [key for key in want.keys() | got.keys() if not torch.equal(want[key], got[key])] == []
    assert train(runs[0], batches(1)) == train(runs[1], batches(1))


def saved_and_loaded(recipe: str, kind: str) -> None:
    """By ``torch.distributed.checkpoint``."""
    models, runs = trained_and_fresh(recipe, kind)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        dcp.save(get_model_state_dict(models[0]), checkpoint_id=folder[0])
        state = get_model_state_dict(models[1])
        dcp.load(state, checkpoint_id=folder[0])
        set_model_state_dict(models[1], state)
        dist.barrier()
    assert_alike(models, runs)


def loaded_whole(recipe: str, kind: str, from_rank_0: bool) -> None:
    """A full state dict, on each rank or on one."""
    models, runs = trained_and_fresh(recipe, kind)
    whole = get_model_state_dict(models[0], options=StateDictOptions(full_state_dict=True))
    given: dict[str, Any] = {} if from_rank_0 and dist.get_rank() else dict(whole)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
    set_model_state_dict(models[1], given, options=options)
    if from_rank_0:  # amaxes and draws are on rank 0, until the first pass
        assert torch.equal(models[0][0].weight.value(), models[1][0].weight.value())
        assert train(runs[0], batches(1)) == train(runs[1], batches(1))
    else:
        assert_alike(models, runs)


def whole_state_of_another_recipe(kind: str) -> None:
    """A delayed layer takes codes without an amax; torch puts the layer's former amax in the place of that."""
    (source, _), (model, _) = model_of("fp8_current", kind, 3), model_of("fp8_delayed", kind, 1)
    whole = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
    set_model_state_dict(model, dict(whole), options=StateDictOptions(full_state_dict=True))
    assert torch.equal(model[0].weight_amax, source[0].weight.value().abs().max().view(1))


for name in STORED:
    check_in(CHECKS, saved_and_loaded, name, "fsdp")
for name in ("fp8_delayed", "nvfp4_all"):
    check_in(CHECKS, saved_and_loaded, name, "ddp")
    for from_rank_0 in (False, True):
        check_in(CHECKS, loaded_whole, name, "fsdp", from_rank_0)
check_in(CHECKS, whole_state_of_another_recipe, "fsdp")
WEEKLY = {f"saved_and_loaded-{name}-fsdp" for name in STORED if name in ALIKE or name.startswith("mxfp8_")}

if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    run_checks(CHECKS)
