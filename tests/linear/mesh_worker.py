"""Checks of converted models on meshes of two dimensions; ``test_convert_meshes.py`` forks four processes, once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from megatron_lowprec import UserError, convert, get_recipe
from megatron_lowprec.linear.fp8_all_gather import enable_fp8_all_gather
from tests.checks import run_checks
from tests.linear.tensor_parallel_checks import PLAN, assert_close, in_fp64, total
from tests.linear.tiny_models import build, tokens_of
from tests.linear.wrapping import check_in, full_state, losses_in_one_process, own_group, wrapped

CHECKS: dict[str, Callable[[], None]] = {}
STEPS = 2


def mesh_of_both() -> DeviceMesh:
    """Data parallel by tensor parallel, 2 x 2."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def reference(recipe: str) -> tuple[list[list[float]], dict[str, Any]]:
    """Losses of each step's two microbatches in one process, and its amax histories, on rank 0; both draw alike."""
    group = own_group()
    model = in_fp64(recipe, data_parallel_rank=0, group=group)
    everywhere = [losses_in_one_process(model, STEPS if dist.get_rank() == 0 else 0)]
    dist.broadcast_object_list(everywhere)
    return everywhere[0], {name: value for name, value in model.state_dict().items() if ".amax." in name}


def equals_one_process(kind: str, recipe: str, recompute: str = "") -> None:
    """Losses but for the order of fp64 sums, amax histories by their bits."""
    expected, amaxes = reference(recipe)
    mesh = mesh_of_both()
    model = in_fp64(recipe, recompute, data_parallel_rank=0, group=mesh["dp"].get_group())
    parallelize_module(model, mesh["tp"], PLAN)
    module: nn.Module = model
    if kind == "ddp":
        module = DistributedDataParallel(model, device_mesh=mesh["dp"])
    else:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        module = fully_shard(model, mesh=mesh["dp"], reshard_after_forward=True)
    if kind == "fsdp, FP8 all-gather":
        enable_fp8_all_gather(module)
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=3e-3), []
    for step in range(STEPS):
        with loss_parallel():
            loss = module(tokens_of(2 * step + mesh["dp"].get_local_rank()))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total(loss))
    assert_close(losses, [each[mesh["dp"].get_local_rank()] for each in expected])
    if get_recipe(recipe).delayed_operands():
        state = model.state_dict() if kind == "ddp" else full_state(module)
        if dist.get_rank() == 0:  # the full state is rank 0's
            assert amaxes
            assert [name for name, amax in amaxes.items() if not torch.equal(state[name], amax)] == []


def replicas_of_shards(recipe: str) -> None:
    """FSDP2 on two dimensions replicates shards: gathered codes change no bit of the losses."""
    mesh, losses = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), []
    for kind in ("fsdp", "fsdp, FP8 all-gather"):
        model: Any = wrapped(kind, convert(build(), recipe, data_parallel_rank=0), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses.append([])
        for step in range(STEPS):
            loss = model(tokens_of(4 * step + dist.get_rank()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


def ranks_of_draws() -> None:
    """Shards of a weight draw alike, replicas do not: by the group of convert, or by the grid of all ranks."""
    mesh = mesh_of_both()
    crossed = DeviceMesh("cpu", torch.tensor([[0, 3], [1, 2]]), mesh_dim_names=("dp", "tp"))

    def rank_of(mesh: DeviceMesh, **options: Any) -> int:
        model = convert(nn.Sequential(nn.Linear(128, 128)), "mxfp4_rht_sr", **options)
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
        model(torch.randn(32, 128))
        return model[0].linear_gemms.linear_id.data_parallel_rank

    for own, other in (("tp", "dp"), ("dp", "tp")):
        found = [rank_of(mesh[own]), rank_of(mesh[own], group=mesh[other].get_group())]
        assert found == [mesh[other].get_local_rank()] * 2
    assert rank_of(mesh["tp"], data_parallel_rank=5) == 5
    assert rank_of(crossed["tp"], group=crossed["dp"].get_group()) == crossed["dp"].get_local_rank()
    with pytest.raises(UserError, match="no data-parallel rank follows from the group of convert: pass convert"):
        rank_of(crossed["tp"])


for recipe in ("fp8_current", "fp8_delayed", "mxfp4_rht_sr"):
    check_in(CHECKS, equals_one_process, "ddp", recipe)
    check_in(CHECKS, equals_one_process, "fsdp", recipe)
for recipe in ("fp8_current", "fp8_delayed", "fp8_rowwise", "mxfp8"):
    check_in(CHECKS, equals_one_process, "fsdp, FP8 all-gather", recipe)
check_in(CHECKS, equals_one_process, "ddp", "fp8_mxfp4_rht_sr", "not reentrant")
check_in(CHECKS, equals_one_process, "fsdp", "fp8_mxfp4_rht_sr", "reentrant")
for recipe in ("fp8_delayed", "mxfp8"):
    check_in(CHECKS, replicas_of_shards, recipe)
check_in(CHECKS, ranks_of_draws)

ON_EVERY_CHANGE = {
    "equals_one_process-ddp-fp8_delayed",
    "equals_one_process-fsdp, FP8 all-gather-fp8_delayed",
    "ranks_of_draws",
}
WEEKLY = CHECKS.keys() - ON_EVERY_CHANGE  # other recipes, on one dimension by convert_worker.py


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run_checks(CHECKS)
