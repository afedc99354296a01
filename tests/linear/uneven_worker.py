"""Checks of two ranks that do not call a model alike; ``test_uneven_ranks.py`` starts it once."""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_lowprec import convert
from tests.checks import run_checks
from tests.linear.tiny_models import build, tokens_of
from tests.linear.wrapping import check_in

CHECKS: dict[str, Callable[[], None]] = {}


def stepping(model: nn.Module, in_backward: bool) -> Callable[[], None]:
    """What to call behind a backward pass. The update is nothing, so both kinds see the same values."""
    if not in_backward:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return lambda: optimizer.step()
    for weight in model.parameters():
        own = torch.optim.SGD([weight], lr=0.0)
        weight.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    return lambda: None


def saved_behind_a_backward_pass(recompute: str) -> None:
    """The step of optimizers within the backward pass has ended, whole, as one of an optimizer behind it."""
    found: list[list[dict[str, torch.Tensor]]] = []
    for in_backward in (False, True):
        model = convert(build(recompute=recompute), "fp8_delayed")
        end = stepping(model.layers, in_backward)  # reentrant checkpoints have all of these parameters
        found.append([])
        for step in range(3):
            model(tokens_of(2 * step + dist.get_rank())).backward()
            end()
            found[-1].append({key: value.clone() for key, value in model.state_dict().items() if ".amax." in key})
    for want, got in zip(*found, strict=True):
        assert min(float(value[0]) for value in got.values()) > 0
        assert [key for key in want if not torch.equal(want[key], got[key])] == []


def one_rank_evaluates() -> None:
    model = convert(build(), "fp8_delayed")
    stepping(model, in_backward=True)
    for step in range(3):
        model(tokens_of(2 * step + dist.get_rank())).backward()
        if dist.get_rank() == 0:
            with torch.no_grad():
                model.eval()(tokens_of(step))
            model.train()


def one_rank_loads(recipe: str) -> None:
    """Before the first pass: all ranks then have its state."""
    trained, model = (convert(build(), recipe, data_parallel_rank=0) for _ in range(2))
    end = stepping(trained, in_backward=False)
    for step in range(2):
        trained(tokens_of(step)).backward()
        end()
    if dist.get_rank() == 0:
        model.load_state_dict(trained.state_dict())
    wrapped = DistributedDataParallel(model)
    losses = [each(tokens_of(2)).item() for each in (trained, wrapped)]
    assert losses[0] == losses[1]
    want, got = trained.state_dict(), model.state_dict()
    assert [key for key in want if not torch.equal(want[key], got[key])] == []


for recompute in ("", "not reentrant", "reentrant"):
    check_in(CHECKS, saved_behind_a_backward_pass, recompute)
check_in(CHECKS, one_rank_evaluates)
check_in(CHECKS, one_rank_loads, "fp8_delayed")

if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # a rank that waits alone is a failure
    run_checks(CHECKS)
