"""--cuda-graph-impl: which layers are captured by default, and reasons why others cannot be."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.quantization import device_rng_step
from megatron_lowprec.quantization.quantizer import quantize
from megatron_lowprec.quantization.random_stream import RandomStream
from megatron_lowprec.quantization.transform import Transform
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.recipe.schema import HadamardSpec
from megatron_lowprec.training import model
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.graph_options import resolve_cuda_graphs
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from tests.training.helpers import argv


def resolved(
    gpus: bool = True, world_size: int = 1, recipe: str = "bf16", asked: str = "local", **changes: Any
) -> tuple[Config, list[str]]:
    config = resolve_model(parse(argv(cuda_graph_impl=asked, **changes))[0])
    loaded = load_recipe(recipe, config.recipe_override)
    return resolve_cuda_graphs(resolve_run(config, world_size, gpus), loaded, world_size, gpus)


CHOOSE = "leave one of the two out"
OBSTACLES: list[tuple[dict[str, Any], str, str]] = [
    ({"num_experts": 4}, "the sizes of --num-experts 4 follow the router", CHOOSE),
    (
        {"pipeline_model_parallel_size": 2, "world_size": 2},
        "has several microbatches on their way, and graphs hold the activations of one",
        CHOOSE,
    ),
    ({"reset_attention_mask": True}, "--reset-attention-mask gives every microbatch a mask of its own", CHOOSE),
    ({"recompute_granularity": "selective"}, r"selective runs layers twice \(--recompute-gelu works\)", CHOOSE),
    ({"log_quantization_interval": 1}, "runs layers kernel by kernel in every iteration", "give 2 or more"),
    (
        {"distributed_backend": "gloo", "tensor_model_parallel_size": 2, "world_size": 2},
        "collectives on the host",
        "use nccl",
    ),
    (
        {"recipe": "fp8_lm_o2", "global_batch_size": 4},
        "recipe fp8_lm_o2 sums a step's microbatches in fp32 at changing addresses",
        "add --recipe-override gradients.accumulation=format or raise --micro-batch-size",
    ),
    (
        {"recipe": "deepseek_v3"},
        "recipe deepseek_v3 saves activations in formats of its own",
        "add --recipe-override activations.attention_output=none --recipe-override activations.swiglu_input=none",
    ),
]


@pytest.mark.parametrize(("changes", "reason", "remedy"), OBSTACLES)
def test_layers_that_cannot_be_captured_are_named(changes: dict[str, Any], reason: str, remedy: str) -> None:
    with pytest.raises(UserError, match=f"--cuda-graph-impl local was given, but .*{reason}; {remedy}$"):
        resolved(**changes)
    config, (note,) = resolved(asked="auto", **changes)
    assert config.cuda_graph_impl == "none"
    assert re.search(f"^CUDA graphs: off, .*{reason}", note)


def test_layers_are_captured_on_gpus_by_default() -> None:
    assert parse(argv())[0].cuda_graph_impl == "auto"
    config, notes = resolved(asked="auto", recompute_gelu=True)
    assert (config.cuda_graph_impl, notes) == ("local", [])
    config, notes = resolved(asked="none")
    assert (config.cuda_graph_impl, notes) == ("none", [])


@pytest.mark.parametrize(
    "changes",
    [
        {"global_batch_size": 2},
        {"global_batch_size": 4, "world_size": 2},
        {"global_batch_size": 4, "recipe_override": ["gradients.accumulation=format"]},
    ],
)
def test_stored_gradients_are_captured_without_sums_in_fp32(changes: dict[str, Any]) -> None:
    assert resolved(recipe="fp8_lm_o2", **changes)[0].cuda_graph_impl == "local"


def test_it_needs_gpus_and_layers_of_this_project() -> None:
    with pytest.raises(UserError, match="--cuda-graph-impl local was given, but torch sees no GPU; leave it out"):
        resolved(gpus=False)
    config, notes = resolved(gpus=False, asked="auto")
    assert (config.cuda_graph_impl, notes) == ("none", [])  # nothing to say on a CPU
    with pytest.raises(UserError, match="the layers are those of --transformer-impl transformer_engine"):
        resolved(transformer_impl="transformer_engine")
    with pytest.raises(UserError, match="--cuda-graph-impl transformer_engine: layers are captured whole"):
        parse(argv(cuda_graph_impl="transformer_engine"))


def test_megatron_core_s_own_graphs_stay_out() -> None:
    config, _ = resolved(recompute_gelu=True, tensor_model_parallel_size=2, sequence_parallel=True, world_size=2)
    assert config.cuda_graph_impl == "local"
    assert model.transformer_config(config).cuda_graph_impl == "none"


def test_draws_that_a_graph_would_repeat_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = get_recipe("mxfp4_rht_sr").dgrad.grad_output
    assert spec is not None
    x, stream = torch.randn(32, 64), RandomStream((1, 2), row_span=ShardSlice())
    quantize(x, spec, random=stream)
    Transform(HadamardSpec(32), stream).signs(x.device)
    monkeypatch.setattr(device_rng_step, "capturing", lambda: True)
    with pytest.raises(UserError, match="stochastic rounding runs on this device outside of the fused MX kernel"):
        quantize(x, spec, random=stream)
    with pytest.raises(UserError, match="a random Hadamard transform runs on this device"):
        Transform(HadamardSpec(32), stream).signs(x.device)
