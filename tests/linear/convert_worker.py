"""Checks of converted models on two processes; ``test_convert_distributed.py`` starts it once, by torchrun."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from megatron_lowprec import UserError, convert, get_recipe
from megatron_lowprec.recipe.parsing import load_recipe
from tests.checks import run_checks
from tests.linear import fp8_gather_checks, matrix_checks, tensor_parallel_checks
from tests.linear.tiny_models import Gpt2Block, LlamaBlock, TinyModel, build, tokens_of
from tests.linear.wrapping import DEVICE, check_in, full_state, is_converted, losses_in_one_process, own_group, wrapped

RECIPES = ("fp8_current", "mxfp8", "fp8_delayed", "mxfp4_rht_sr", "fp8_mxfp4_rht_sr")
STEPS = 4
CHECKS: dict[str, Callable[[], None]] = {}


def reference(recipe: str, **options: Any) -> tuple[list[list[float]], dict[str, Any]]:
    """Losses of each step's two microbatches and the final state, in one process; both draw as on a rank of its own."""
    model = build(**options)
    convert(model, recipe, data_parallel_rank=0, group=own_group())
    return losses_in_one_process(model, STEPS), model.state_dict()


def run(kind: str, recipe: str, **options: Any) -> tuple[nn.Module, list[float]]:
    """A model trained on this rank's microbatches, and their losses; both ranks draw alike, as the reference."""
    model = wrapped(kind, convert(build(**options), recipe, data_parallel_rank=0))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(tokens_of(2 * step + dist.get_rank()))
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and kind == "ddp":
            model.state_dict()  # a checkpoint written by one rank waits for no other
        losses.append(loss.item())
    return model, losses


def equals_one_process(kind: str, recipe: str, block: str = "llama", recompute: str = "") -> None:
    """Losses, weights and amax histories are those of one process that accumulates both microbatches: equal bits.

    Two addends commute and a division by two is exact, so no tolerance is needed.
    """
    options = {"block": {"llama": LlamaBlock, "gpt2": Gpt2Block}[block], "recompute": recompute}
    want, state = reference(recipe, **options)
    model, losses = run(kind, recipe, **options)
    assert losses == [each[dist.get_rank()] for each in want]
    found = full_state(model)
    if dist.get_rank() == 0 or kind == "ddp":  # the full state is rank 0's
        assert found.keys() == state.keys()
        assert [name for name in state if not torch.equal(found[name], state[name])] == []
    if get_recipe(recipe).delayed_operands():
        assert any(name.endswith(".amax.input") for name in state)


def sharded_state_round_trip(recipe: str, broadcast: bool) -> None:
    """A full state dict of a sharded model loads into another one, with equal losses, amax histories included."""
    model, _ = run("fsdp", recipe)
    state = full_state(model)
    other = wrapped("fsdp", convert(TinyModel(), recipe, data_parallel_rank=0))
    given = state if dist.get_rank() == 0 or not broadcast else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    # a broadcast gives the other ranks parameters only: their histories and draws follow in the next forward pass
    set_model_state_dict(other, dict(given), options=options)
    losses = [each(tokens_of(20 + dist.get_rank())).item() for each in (model, other)]
    assert losses[0] == losses[1]
    counts = {layer.passes.count for layer in filter(is_converted, other.modules())}
    assert counts == {STEPS + 1 if get_recipe(recipe).random else 0}
    again = full_state(other)
    assert again.keys() == state.keys()
    assert [name for name in state if not torch.equal(again[name], state[name]) and not name.endswith(".draws")] == []


def ranks_draw_differently() -> None:
    """Equal data: gradients differ by default, and agree with one ``data_parallel_rank``."""
    for options, equal in (({}, False), ({"data_parallel_rank": 0}, True)):
        model = convert(build(), "mxfp4_rht_sr", **options)
        model(tokens_of(1)).backward()
        gradient = model.layers[0].o_proj.weight.grad
        both = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(both, gradient)
        assert torch.equal(*both) == equal


def amaxes_need_the_group() -> None:
    """Histories that move in each microbatch are refused; a group of one rank keeps its own amaxes."""
    moving = load_recipe(
        "fp8_delayed",
        [f"{gemm}.{operand}.history_update=microbatch" for gemm, operand in OPERANDS],
    )
    with pytest.raises(UserError, match="history_update=microbatch is not reduced over data-parallel ranks"):
        convert(refused := build(), moving)
    assert not any(map(is_converted, refused.modules()))
    for group, equal in ((None, True), (own_group(), False)):
        model = convert(build(), "fp8_delayed", group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model(tokens_of(dist.get_rank())).backward()
        optimizer.step()
        amax = model.layers[1].mlp["down_proj"].state_dict()["amax.input"][:1]
        both = [torch.empty_like(amax) for _ in range(2)]
        dist.all_gather(both, amax)
        assert torch.equal(*both) == equal


def optimizer_within_the_backward_pass() -> None:
    """The step ends before the next forward pass, with equal amaxes."""
    model = convert(build(), "fp8_delayed")
    optimizers = {weight: torch.optim.SGD([weight], lr=1e-3) for weight in model.parameters()}
    for weight, optimizer in optimizers.items():
        weight.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    for step in range(3):
        model(tokens_of(2 * step + dist.get_rank())).backward()
    state = torch.cat([layer.state_dict()["amax.input"][:1] for layer in model.modules() if is_converted(layer)])
    both = [torch.empty_like(state) for _ in range(2)]
    dist.all_gather(both, state)
    assert torch.equal(*both)
    assert bool((state > 0).all())


def idle_layers_keep_their_amaxes() -> None:
    """A layer that one rank runs records for both; one that no rank runs keeps its window."""
    model = convert(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), "fp8_delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    for step in range(3):
        x = torch.full((32, 64), 2.0 + step + 3 * dist.get_rank())
        for layer in model if step == 0 else model[: 2 - dist.get_rank()]:
            layer(x).sum().backward()
        optimizer.step()
        seen.append([layer.amax.input[:4].tolist() for layer in model])
    assert seen[0] == [[5.0, 5.0, 0.0, 0.0]] * 3
    assert seen[2] == [[7.0, 7.0, 6.0, 5.0], [5.0, 4.0, 3.0, 5.0], [5.0, 5.0, 0.0, 0.0]]


def compiled_blocks(kind: str, recipe: str, recompute: str) -> None:
    """They have the losses of eager ones; layers that gather codes break their graphs."""
    losses: list[list[float]] = []
    for compiles in (False, True):
        model = convert(build(recompute=recompute), recipe, data_parallel_rank=0)
        for layer in model.layers if compiles else ():
            layer.compile(backend="eager", fullgraph="gather" not in kind)
        sharded = wrapped(kind, model)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        losses.append([])
        for step in range(3):
            loss = sharded(tokens_of(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


def wrapped_models_are_refused() -> None:
    with pytest.raises(UserError, match=r"wrapped: convert first, then call DistributedDataParallel\(model\)"):
        convert(DistributedDataParallel(build()), "fp8_current")
    with pytest.raises(UserError, match=r"is a DTensor: convert first, then call parallelize_module and fully_shard"):
        convert(wrapped("fsdp", build()), "fp8_current")


OPERANDS = [
    *(("fprop", "input"), ("fprop", "weight"), ("dgrad", "grad_output")),
    *(("dgrad", "weight"), ("wgrad", "grad_output"), ("wgrad", "input")),
]
for kind in ("ddp", "fsdp"):
    for recipe in RECIPES:
        check_in(CHECKS, equals_one_process, kind, recipe)
    check_in(CHECKS, equals_one_process, kind, "mxfp4_rht_sr", "llama", "not reentrant")
    check_in(CHECKS, equals_one_process, kind, "fp8_delayed", "gpt2", "not reentrant")
check_in(CHECKS, equals_one_process, "fsdp", "fp8_current", "gpt2")
for recipe in ("fp8_current", "fp8_delayed"):
    check_in(CHECKS, equals_one_process, "fsdp, FP8 all-gather", recipe)
    check_in(CHECKS, equals_one_process, "fsdp, FP8 all-gather", recipe, "llama", "not reentrant")
check_in(CHECKS, equals_one_process, "fsdp, FP8 all-gather", "mxfp8", "llama", "reentrant")
check_in(CHECKS, equals_one_process, "fsdp, FP8 all-gather", "nvfp4_all", "llama", "not reentrant")
for broadcast in (False, True):
    check_in(CHECKS, sharded_state_round_trip, "fp8_current", broadcast)
    check_in(CHECKS, sharded_state_round_trip, "fp8_delayed", broadcast)
    check_in(CHECKS, sharded_state_round_trip, "fp8_mxfp4_rht_sr", broadcast)
check_in(CHECKS, compiled_blocks, "fsdp, FP8 all-gather", "fp8_current", "")
check_in(CHECKS, compiled_blocks, "fsdp", "mxfp4_rht_sr", "not reentrant")
check_in(CHECKS, compiled_blocks, "ddp", "fp8_delayed", "reentrant")
check_in(CHECKS, ranks_draw_differently)
check_in(CHECKS, amaxes_need_the_group)
check_in(CHECKS, optimizer_within_the_backward_pass)
check_in(CHECKS, idle_layers_keep_their_amaxes)
check_in(CHECKS, wrapped_models_are_refused)
CHECKS |= fp8_gather_checks.CHECKS | tensor_parallel_checks.CHECKS | matrix_checks.CHECKS


def main() -> None:
    # made before the process group exists: its ranks would draw alike
    early = convert(build(), "mxfp4_rht_sr")
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    with pytest.raises(UserError, match="convert ran before init_process_group, so all 2 ranks would round alike"):
        early(tokens_of(0))
    warnings.filterwarnings("error", "a weight changed without a step")  # no wrapper's update of the weights is one
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
