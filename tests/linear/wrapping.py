"""Models on several processes: wrapped, and their groups and state."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_lowprec.linear.fp8_all_gather import enable_fp8_all_gather
from megatron_lowprec.linear.lowprec_linear import LowPrecLayer
from tests.linear.tiny_models import TinyModel, tokens_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check_in(checks: dict[str, Callable[[], None]], function: Callable[..., None], *arguments: Any) -> None:
    """Add a check under its name and arguments."""
    checks["-".join([function.__name__, *map(str, arguments)])] = lambda: function(*arguments)


def own_group() -> dist.ProcessGroup:
    """The group of this rank."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def all_ranks() -> DeviceMesh:
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def wrapped(kind: str, model: TinyModel, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """Under "ddp", "fsdp", or "fsdp, FP8 all-gather"."""
    mesh = all_ranks() if mesh is None else mesh
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group())
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    sharded = fully_shard(model, mesh=mesh, **options)
    if kind == "fsdp, FP8 all-gather":
        enable_fp8_all_gather(sharded, options["mp_policy"].param_dtype if options else None)
    return sharded


def full_state(model: nn.Module) -> dict[str, Any]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def is_converted(module: nn.Module) -> bool:
    return isinstance(module, LowPrecLayer)


def losses_in_one_process(model: nn.Module, steps: int, ranks: int = 2) -> list[list[float]]:
    """Losses of each step's microbatches, one a rank, which draw as on a rank of their own; trains by their mean."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        losses.append([])
        for rank in range(ranks):
            for layer in filter(is_converted, model.modules()):
                layer.passes.count = step
            loss = model(tokens_of(ranks * step + rank))
            loss.backward()
            losses[-1].append(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= ranks  # of the sum, as the wrappers do: amaxes of grad_output are of undivided losses
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train(model: nn.Module, batches: list[torch.Tensor], lr: float = 1e-2) -> list[float]:
    """Losses of steps of AdamW on ``(model(x) - x)^2``."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=lr), []
    for x in batches:
        loss = (model(x).float() - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
