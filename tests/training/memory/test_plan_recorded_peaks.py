"""The memory plan against peaks of GPUs that docs/results has, and what CUDA graphs and snapshots add to it."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.training.memory.plan import GIB, plan
from tests.training.memory.plans import shipped, small


@pytest.mark.parametrize(
    ("name", "batch", "recipe", "gib"),
    [
        # Peak allocated, one H200: docs/results/emulated-mx-step-{345m,1.3b}.json.
        ("gpt_345m", 16, "bf16", 33.4),
        ("gpt_345m", 16, "fp8_delayed", 29.7),
        ("gpt_345m", 16, "fp8_blockwise", 29.9),
        ("gpt_1.3b", 8, "mxfp4_rht_sr", 48.1),
        ("gpt_1.3b", 8, "fp8_delayed", 44.3),
    ],
)
def test_the_plan_is_what_a_gpu_held(name: str, batch: int, recipe: str, gib: float) -> None:
    found = shipped(name, micro_batch_size=batch, global_batch_size=batch, recipe=recipe)
    assert found.peak / GIB == pytest.approx(gib, rel=0.02)


FLAGS = {"fp8_param_gather": True, "recompute_gelu": True}


@pytest.mark.parametrize(
    ("recipe", "changes", "gib_345m", "gib_1_3b"),
    [
        # Peak allocated or held by graphs, one H200: docs/results/memory.md#with-cuda-graphs
        ("bf16", {}, 34.0, 48.6),
        ("fp8_delayed", {}, 30.6, 45.2),
        ("fp8_current", {}, 30.9, 45.5),
        ("fp8_blockwise", {}, 30.8, 45.4),
        ("mxfp8", {}, 34.5, 49.0),
        ("mxfp4_rht_sr", {}, 34.3, 49.0),
        ("fp8_delayed", FLAGS, 27.3, 41.0),
    ],
)
def test_the_plan_with_graphs_is_what_a_gpu_held(
    recipe: str, changes: dict[str, Any], gib_345m: float, gib_1_3b: float
) -> None:
    for name, batch, gib in (("gpt_345m", 16, gib_345m), ("gpt_1.3b", 8, gib_1_3b)):
        flags = {"micro_batch_size": batch, "global_batch_size": batch, "recipe": recipe, "cuda_graph_impl": "local"}
        assert shipped(name, **flags, **changes).peak / GIB == pytest.approx(gib, rel=0.02), name


def test_graphs_hold_the_backward_pass_beside_the_logits() -> None:
    flags = {"micro_batch_size": 16, "global_batch_size": 16, "recipe": "mxfp8"}
    eager, graphs = shipped("gpt_345m", **flags), shipped("gpt_345m", **flags, cuda_graph_impl="local")
    buffers = graphs.resident["buffers of CUDA graphs"]
    assert graphs.peak == eager.peak + buffers + eager.transient["backward"]
    assert graphs.held == eager.kept["layers"] + eager.transient["backward"]


@pytest.mark.parametrize(
    ("recipe", "gib"),
    # Peak allocated, H100, commit 78a27ee: docs/results/memory.md#with-cuda-graphs
    [("bf16", 12.55), ("mxfp4_rht", 12.85), ("mxfp4_sr", 12.85), ("fp8_delayed", 11.47), ("fp8_blockwise", 11.57)],
)
def test_a_step_with_a_snapshot_takes_its_memory_beside_the_graphs(recipe: str, gib: float) -> None:
    flags = {"recipe": recipe, "micro_batch_size": 32, "cuda_graph_impl": "local"}
    assert shipped("gpt_25m", **flags, log_quantization_interval=440).peak / GIB == pytest.approx(gib, rel=0.02)
    capture = {"capture_step": 5, "capture_layers": "layers.1.*"}
    found = shipped("gpt_25m", **flags, **capture)
    eager = shipped("gpt_25m", **{**flags, "cuda_graph_impl": "none"}, **capture)
    assert eager.eager == 0
    assert found.peak == pytest.approx(eager.peak + found.held + found.resident["buffers of CUDA graphs"])


def test_a_snapshot_beside_the_graphs_of_a_small_vocabulary() -> None:
    """The backward pass of a layer is larger than the logits."""
    changes = {"micro_batch_size": 8, "cuda_graph_impl": "local", "log_quantization_interval": 2}
    found, eager = (
        plan(small(**{**changes, **more}), load_recipe("mxfp8"), 128, 1) for more in ({}, {"cuda_graph_impl": "none"})
    )
    assert found.transient["logits"] < found.transient["backward"]
    assert found.peak == pytest.approx(eager.peak + found.held + found.resident["buffers of CUDA graphs"])


def test_a_recomputed_gelu_adds_nothing_to_the_backward_pass() -> None:
    """It is freed before the gradient of linear_fc1's output, which takes as much."""
    plain, recomputed = (shipped("gpt_345m", recipe="fp8_delayed", **changes) for changes in ({}, FLAGS))
    assert recomputed.transient["backward"] == plain.transient["backward"]
