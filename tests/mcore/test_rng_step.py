"""The moment of a recomputed forward pass, on one process; Megatron-core's RNG tracker holds its own states alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_lowprec import get_recipe
from megatron_lowprec.mcore.rng_step import current_rng_step
from megatron_lowprec.quantization.random_stream import RngStep
from tests.weekly import also_weekly

pytestmark = pytest.mark.usefixtures("world", "bounded")

SEQUENCE, BATCH, HIDDEN, LAYERS = 32, 2, 64, 4
STEP = 3
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
RECOMPUTATIONS: dict[str, dict[str, Any]] = {
    "full, uniform": {**FULL, "recompute_method": "uniform"},
    "full, uniform, two layers": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 2},
    "full, block": {**FULL, "recompute_method": "block", "recompute_num_layers": 2},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "core attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "mlp and core attention": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "core_attn"]},
}
EACH_TIME = ("full, uniform", "full, block", "mlp and core attention")
recomputations = pytest.mark.parametrize("how", also_weekly(RECOMPUTATIONS, EACH_TIME))


def build(recipe: str = "mxfp4_rht_sr", **options: Any) -> tuple[Any, Any]:
    """A block of layers with dropout, and its runtime in step ``STEP``."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_lowprec.mcore.layers.gpt_spec import gpt_block_spec
    from megatron_lowprec.mcore.runtime import bind_recipe

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        hidden_dropout=0.1,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        **options,
    )
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5)
    block = TransformerBlock(config, gpt_block_spec(config))
    runtime = bind_recipe([block], get_recipe(recipe), num_layers=LAYERS, seed=1, accumulate_wgrad=False)
    runtime.begin_step(STEP)
    return block, runtime


def forward(block: Any, seed: int) -> torch.Tensor:
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(seed))
    y: torch.Tensor = block(hidden_states=x.requires_grad_(), attention_mask=None)
    return y


def in_order(losses: list[torch.Tensor]) -> None:
    for loss in losses:
        loss.backward()


def in_reverse(losses: list[torch.Tensor]) -> None:
    in_order(losses[::-1])


def in_one_pass(losses: list[torch.Tensor]) -> None:
    torch.stack(losses).sum().backward()


def in_another_thread(losses: list[torch.Tensor]) -> None:
    """As on a GPU: autograd runs recomputations on a thread of its own, which numbers their nodes from 0."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(in_reverse, losses).result()


def gradients(
    backward: Callable[[list[torch.Tensor]], None],
    prepare: Callable[[Any], None] = lambda block: None,
    **options: Any,
) -> tuple[list[torch.Tensor], list[int]]:
    """Of three microbatches that are in flight together; how often a layer ran in each of a fourth's place."""
    block, runtime = build(**options)
    prepare(block)
    seen: list[int] = []
    block.layers[-1].mlp.linear_fc1.register_forward_pre_hook(lambda *_: seen.append(current_rng_step().microbatch))
    losses = []
    for microbatch in range(3):
        runtime.begin_microbatch(microbatch)
        losses.append(forward(block, microbatch).square().mean())
    runtime.begin_microbatch(7)
    backward(losses)
    assert current_rng_step() == RngStep(STEP, 7)
    return [weight.grad for weight in block.parameters()], seen


@cache
def without_recomputation(backward: Callable[[list[torch.Tensor]], None]) -> list[torch.Tensor]:
    return gradients(backward)[0]


@recomputations
@pytest.mark.parametrize("backward", [in_order, in_reverse, in_one_pass, in_another_thread])
def test_recomputation_draws_the_bits_of_its_first_pass(
    how: str, backward: Callable[[list[torch.Tensor]], None]
) -> None:
    want = without_recomputation(backward)
    got, seen = gradients(backward, **RECOMPUTATIONS[how])
    again = [0, 1, 2] if backward is in_order else [2, 1, 0]
    runs_again = how != "core attention" and (how != "full, block")
    assert seen == [0, 1, 2] + (again if runs_again else [])
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@recomputations
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backward", [in_reverse, in_another_thread])
def test_a_recomputation_may_lie_in_another(
    how: str, reentrant: bool, backward: Callable[[list[torch.Tensor]], None]
) -> None:
    def nest(block: Any) -> None:
        for layer in block.layers:
            for part in (layer.self_attention.linear_qkv, layer.mlp):
                inner = part.forward
                part.forward = lambda x, inner=inner, **_: checkpoint(inner, x, use_reentrant=reentrant)

    want = without_recomputation(backward)
    got, seen = gradients(backward, nest, **RECOMPUTATIONS[how])
    assert seen[:3] == [0, 1, 2]
    assert len(seen) in (6, 9)  # once more for each recomputation
    assert seen[3:] == sorted(seen[3:], reverse=True)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def test_a_recomputation_of_an_earlier_step_is_refused() -> None:
    block, runtime = build(**RECOMPUTATIONS["full, uniform"])
    loss = forward(block, 0).sum()
    runtime.end_step()
    runtime.begin_step(STEP + 1)
    with pytest.raises(RuntimeError, match=f"forward pass of a step before {STEP + 1} is recomputed"):
        loss.backward()
    forward(block, 0).sum().backward()  # and nothing of it stays behind


@recomputations
def test_the_tracker_holds_megatron_core_s_states_alone(how: str) -> None:
    """Else Megatron-LM cannot save, convert or restore them: each has to be one that a generator takes."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, random

    tracker, own = get_cuda_rng_tracker(), set[str]()

    def look(*_: Any) -> None:
        own.update(tracker.get_states())
        for state in tracker.get_states().values():
            torch.Generator().set_state(state)

    block, runtime = build(**RECOMPUTATIONS[how])
    block.layers[0].register_forward_hook(look)
    for step in range(STEP + 1, STEP + 3):
        runtime.end_step()
        runtime.begin_step(step)
        runtime.begin_microbatch(1)
        forward(block, 0).sum().backward()
        look()
    assert own == {
        random._MODEL_PARALLEL_RNG_TRACKER_NAME,
        random._EXPERT_PARALLEL_RNG_TRACKER_NAME,
        random._DATA_PARALLEL_RNG_TRACKER_NAME,
    }


def test_a_state_that_earlier_checkpoints_hold_is_left_out() -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from megatron_lowprec.training.checkpoint import random_state

    build()
    state = random_state.capture()
    mine = set(state["tracker"])
    state["tracker"]["megatron-lowprec-moment"] = torch.tensor([8, 2])
    random_state.restore(state)
    assert set(get_cuda_rng_tracker().get_states()) == mine
    assert current_rng_step() == RngStep(STEP, 0)


# ---- training loops that leave a call out
def loop(runtime: Any, block: Any, leave_out: str) -> None:
    """Two steps of two microbatches, an evaluation after each."""
    optimizer = torch.optim.SGD(block.parameters(), lr=1e-3)
    calls = {name: getattr(runtime, name) for name in ("begin_step", "begin_microbatch", "end_step")}
    calls |= dict.fromkeys(leave_out.split(), lambda *_: None)
    for step in range(2):
        optimizer.zero_grad()
        calls["begin_step"](step)
        for microbatch in range(2):
            calls["begin_microbatch"](microbatch)
            forward(block, microbatch).sum().backward()
        optimizer.step()
        calls["end_step"]()
        with torch.no_grad():
            forward(block, 0)
            forward(block, 0)


@pytest.mark.parametrize("how", ["", "full, uniform", "mlp"])
@pytest.mark.parametrize(
    ("leave_out", "found"),
    [
        ("begin_step", "second forward pass in training at step 3, microbatch 0: call begin_step"),
        ("begin_microbatch", r"second forward pass in training at step 0, microbatch 0: call .*begin_microbatch"),
        ("end_step", r"begin_step\(1\) was called before step 0 ended: call end_step"),
        ("begin_step end_step", "second forward pass in training at step 3, microbatch 0: call begin_step"),
        ("begin_step begin_microbatch end_step", "second forward pass in training at step 3, microbatch 0"),
    ],
)
def test_a_call_that_is_left_out_is_missed_by_the_second_step(leave_out: str, found: str, how: str) -> None:
    block, runtime = build(**RECOMPUTATIONS.get(how, {}))
    runtime.end_step()
    with pytest.raises(RuntimeError, match=found):
        loop(runtime, block, leave_out)


@pytest.mark.parametrize("how", ["", *RECOMPUTATIONS])
def test_a_loop_with_all_calls_is_not_stopped(how: str) -> None:
    block, runtime = build(**RECOMPUTATIONS.get(how, {}))
    runtime.end_step(updated=False)
    loop(runtime, block, "")


def test_a_model_without_a_quantized_layer_needs_no_calls() -> None:
    block, _ = build("bf16")
    for _ in range(2):
        forward(block, 0).sum().backward()


def test_a_recipe_that_takes_another_one_s_place_is_told_alone() -> None:
    from megatron_lowprec.mcore.runtime import bind_recipe

    block, runtime = build()
    forward(block, 0).sum().backward()
    runtime.end_step()
    other = bind_recipe([block], get_recipe("mxfp4"), num_layers=LAYERS, seed=1, accumulate_wgrad=False)
    other.begin_step(STEP)
    forward(block, 0).sum().backward()
    other.end_step()
    bind_recipe([block], get_recipe("bf16"), num_layers=LAYERS, seed=1, accumulate_wgrad=False)
    for _ in range(2):
        forward(block, 0).sum().backward()
