"""Single terms of the memory plan, counted by hand: formats, layouts, optimizer state and kept weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_lowprec.optimizer.adamw import DTYPES
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.training.memory.activations import kept_of_layers, layer_activations
from megatron_lowprec.training.memory.layout import Execution, stage_layers
from megatron_lowprec.training.memory.plan import plan
from megatron_lowprec.training.memory.weights import stage_weights
from megatron_lowprec.training.models.common.rank_sizes import stream_bytes
from megatron_lowprec.training.models.sizes import linear_sites
from tests.training.memory.memory_worker import SIZES, VOCABULARY
from tests.training.memory.plans import shipped, small


def test_formats_of_saved_activations_replace_the_codes_of_native_gemms() -> None:
    config = small(swiglu=True, ffn_hidden_size=256, recipe="fp8_blockwise")
    overrides = ["activations.attention_output=e5m6", "activations.swiglu_input=e4m3"]
    plain, cached = (
        layer_activations(config, Execution(load_recipe("fp8_blockwise", each))) for each in ([], overrides)
    )
    tokens, width, ffn = 8 * 64, 128, 256
    proj = "input of linear_proj (output of attention)"
    assert {name: plain[name] for name in plain.keys() - cached.keys()} == {
        proj: 2 * tokens * width,
        "FP8 codes of linear_proj's input": tokens * width,
        "output of linear_fc1": 4 * tokens * ffn,
        "input of linear_fc2": tokens * ffn,
    }
    assert {name: cached[name] for name in cached.keys() - plain.keys()} == {
        f"{proj} in E5M6": tokens * width * (1.5 + 1 / 128),
        "input of SwiGLU in E4M3": 2 * tokens * ffn * (1 + 1 / 128),
    }


def test_block_scaled_units_cache_packed_weights_and_save_no_codes() -> None:
    """Codes of E4M3 take a byte, those of E2M1 half of one; scales a byte a block; inputs are saved as emulated."""
    config = small(bf16=True)
    site = next(iter(linear_sites(config)))
    for name, arch, expected in (
        ("mxfp8", "sm100", 1 + 1 / 32),
        ("nvfp4_all", "sm120", 0.5 + 1 / 16),
        ("mxfp8", "sm90", 2.0),
        ("fp8_current", "sm100", 1.0),
    ):
        recipe = load_recipe(name)
        runs = Execution(recipe, arch)
        assert runs.cached_weight_bytes(config, site, "fprop") == expected
        emulated = replace(config, native="off")
        assert layer_activations(config, runs) == layer_activations(emulated, Execution(recipe, arch))
        off = 1.0 if name == "fp8_current" else 2.0
        assert runs.cached_weight_bytes(emulated, site, "fprop") == off


def test_a_pipeline_holds_microbatches_for_the_stages_behind() -> None:
    layout = {"pipeline_model_parallel_size": 2, "num_layers": 4, "global_batch_size": 32}
    one_by_one, alone = small(2, **layout), small(1, num_layers=4)
    found = plan(one_by_one, load_recipe("bf16"), VOCABULARY, 2)
    assert (found.stage, found.in_flight) == (0, 2)
    of_all_layers = plan(alone, load_recipe("bf16"), VOCABULARY, 1).kept["layers"]
    assert found.kept["layers"] == of_all_layers  # half of the layers, twice
    # arXiv 2205.05198, section 4.2.3: interleaving multiplies by 1 + (stages - 1) / (stages x chunks).
    interleaved = small(2, **layout, num_virtual_stages_per_pipeline_rank=2)
    more = plan(interleaved, load_recipe("bf16"), VOCABULARY, 2).kept["layers"]
    assert more / of_all_layers == 1 + 1 / 4
    few = small(2, **{**layout, "global_batch_size": 8})
    assert plan(few, load_recipe("bf16"), VOCABULARY, 2).in_flight == 1


def test_an_interleaved_stage_has_the_layers_that_megatron_core_gives_it() -> None:
    layout = {"pipeline_model_parallel_size": 2, "num_layers": 8, "global_batch_size": 16}
    assert [stage_layers(small(2, **layout), stage) for stage in (0, 1)] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    chunks = small(2, **layout, num_virtual_stages_per_pipeline_rank=2)
    assert [stage_layers(chunks, stage) for stage in (0, 1)] == [[1, 2, 5, 6], [3, 4, 7, 8]]
    # experts in every other layer, all of them on the first stage
    experts = {"num_experts": 4, "moe_layer_freq": "2", "disable_bias_linear": True}
    found = small(2, **layout, num_virtual_stages_per_pipeline_rank=4, **experts)
    recipe = load_recipe("bf16")
    weights = [stage_weights(found, VOCABULARY, stage) for stage in (0, 1)]
    assert plan(found, recipe, VOCABULARY, 2).stage == 0
    assert (weights[0].expert > 0, weights[1].expert) == (True, 0)


@pytest.mark.parametrize(("method", "layers", "inputs", "whole"), [("block", 2, 4, 2), ("uniform", 3, 2, 0)])
def test_each_chunk_of_a_pipeline_recomputes_by_itself(method: str, layers: int, inputs: int, whole: int) -> None:
    """A stage has two chunks of three layers."""
    layout = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "num_layers": 12}
    layout |= {"global_batch_size": 16}
    recompute = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
    config = small(2, **layout, **recompute)
    runs = plan(config, load_recipe("bf16"), VOCABULARY, 2).runs
    of_a_layer = sum(layer_activations(config, runs).values())
    kept = kept_of_layers(config, stage_layers(config, 0), runs)
    assert kept == inputs * stream_bytes(config) + whole * of_a_layer


def test_the_distributed_optimizer_shares_main_weights_and_moments() -> None:
    plain, shared = (
        shipped("gpt_125m", gpus=8).resident,
        shipped("gpt_125m", gpus=1, micro_batch_size=4).resident,
    )
    for name in ("weights", "gradients"):
        assert plain[name] == shared[name]
    for name in ("main weights", "moments"):
        assert plain[name] == shared[name] / 8
    weights = stage_weights(small(), VOCABULARY, 0).dense
    resident = plan(small(), load_recipe("bf16"), VOCABULARY, 1).resident
    assert sum(resident.values()) == weights * (2 + 4 + 8 + 4)
    resident = plan(small(bf16=None), load_recipe("bf16"), VOCABULARY, 1).resident
    assert sum(resident.values()) == weights * (4 + 8 + 4)


def test_gradients_in_bf16_are_copied_for_the_update() -> None:
    found = plan(small(grad_reduce_in_bf16=True), load_recipe("bf16"), VOCABULARY, 1)
    weights = stage_weights(small(), VOCABULARY, 0).dense
    assert (found.resident["gradients"], found.transient["update"]) == (2 * weights, 4 * weights)


@pytest.mark.parametrize(
    ("recipe", "copies", "on_gpu"),
    [
        ("bf16", 0, 0),
        ("mxfp8", 2, 2),
        ("mxfp8_2d", 2, 1),
        ("mxfp4", 1, 1),
        ("mxfp4_rht_sr", 0, 0),
        ("fp8_mxfp4_rht_sr", 1, 1),
        ("nvfp4_all", 2, 1),
        ("nvfp4_four_over_six", 1, 1),  # two in one layer of two: a block has its errors summed in two orders
        ("quartet2", 1, 1),
    ],
)
def test_quantized_weights_are_kept_for_several_microbatches(recipe: str, copies: int, on_gpu: int) -> None:
    linears = 2 * 12 * 128**2  # two layers
    config = small(global_batch_size=16, recipe=recipe)
    several = plan(config, load_recipe(recipe), VOCABULARY, 1, arch="cpu")
    assert several.resident["kept quantized weights"] == copies * linears * 2
    native = plan(config, load_recipe(recipe), VOCABULARY, 1, arch="sm90")
    assert native.resident["kept quantized weights"] == on_gpu * linears * (1 if recipe.startswith("fp8") else 2)
    one = plan(small(recipe=recipe), load_recipe(recipe), VOCABULARY, 1)
    assert one.resident["kept quantized weights"] == 0


def test_layers_without_an_fp8_weight_are_planned_as_bf16_ones() -> None:
    recipe = load_recipe("fp8_current", ["rules=[{first: 1, gemms: mxfp8}]"])  # of two layers
    config = small(global_batch_size=16, fp8_param_gather=True, use_distributed_optimizer=True)
    layer = 12 * 128**2
    found = [plan(replace(config, save_memory=saves), recipe, VOCABULARY, 1) for saves in (False, True)]
    assert [each.resident["kept quantized weights"] for each in found] == [(2 * 2 + 1) * layer, layer]


def test_operands_of_fprop_are_fp32_while_they_are_quantized_again() -> None:
    """x of wgrad beside its operand, but not from codes; w of dgrad, before x is there, counts where it is larger."""

    def backward(batch: int, *overrides: str, arch: str = "sm90") -> float:
        config = small(recipe="nvfp4_all", micro_batch_size=batch, global_batch_size=batch)
        return plan(config, load_recipe("nvfp4_all", overrides), VOCABULARY, 1, arch=arch).transient["backward"]

    for batch in (1, 64):
        entries, plain = batch * SIZES["seq_length"] * 128, backward(batch)
        again = ["wgrad.input.source=fprop", "wgrad.hadamard.output=fp32"]
        assert backward(batch, *again) == plain
        for arch, overrides in (("cpu", again), ("sm90", [*again, "fprop.input.tensor_scale=null"])):
            assert backward(batch, *overrides, arch=arch) - plain == 4 * entries
        assert backward(batch, "dgrad.weight.source=fprop") - plain == max(0, 4 * 512 * 128 - 2 * entries)


@pytest.mark.parametrize("save_memory", [False, True])
def test_codes_of_fprop_s_values_are_saved_for_wgrad(save_memory: bool) -> None:
    """By the emulated backend on a GPU: half a byte an entry, and a byte for each of its blocks."""
    config, recipe = replace(small(recipe="quartet2"), save_memory=save_memory), load_recipe("quartet2")
    entries, bytes_of_code = 8.0 * 64 * 128, 0.5 + 1 / 16
    on_cpu, on_gpu = (layer_activations(config, Execution(recipe, arch)) for arch in ("cpu", "sm90"))
    changed = {name: size for name, size in on_gpu.items() if size != on_cpu.get(name)}
    expected = {
        "input of linear_qkv": entries * bytes_of_code,
        "input of the MLP": entries * bytes_of_code,
        "input of linear_fc2": 4 * entries * bytes_of_code,
    }
    if not save_memory:  # beside attention's output, which attention saves
        expected["FP4 codes of linear_proj's input"] = entries * bytes_of_code
    assert {name: size for name, size in changed.items() if "linear" in name or "MLP" in name} == expected
    split = small(2, recipe="quartet2", tensor_model_parallel_size=2, sequence_parallel=True)
    found = layer_activations(split, Execution(recipe))
    assert found["input of the MLP"] == entries  # gathered again in the backward pass, half of the tokens


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_narrow_optimizer_state_is_counted_by_its_formats(gpus: int) -> None:
    recipe = load_recipe("fp8_lm")
    config = small(gpus=gpus, recipe="fp8_lm", use_distributed_optimizer=True, micro_batch_size=4)
    found = plan(config, recipe, VOCABULARY, gpus)
    weights = stage_weights(config, VOCABULARY, 0).dense
    widths = [DTYPES[form].itemsize for form in recipe.optimizer.formats.values()]
    assert found.resident["moments"] == sum(widths[:2]) * weights / gpus == 3 * weights / gpus
    assert found.resident["main weights"] == widths[2] * weights / gpus == 2 * weights / gpus
    assert found.resident["gradients"] == 4 * weights
    assert found.transient["update"] == (2 * weights if gpus > 1 else 0)  # codes, sent and received
