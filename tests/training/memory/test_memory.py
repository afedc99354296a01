"""The memory plan: against GPUs, against what a model really keeps, and as a user meets it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.optimizer.adamw import DTYPES
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.distributed import startup
from megatron_lowprec.training.memory import report
from megatron_lowprec.training.memory.activations import layer_activations
from megatron_lowprec.training.memory.layout import Execution
from megatron_lowprec.training.memory.plan import GIB, MemoryPlan, plan
from megatron_lowprec.training.memory.weights import stage_weights
from megatron_lowprec.training.models.sizes import linear_sites
from tests.launch import fork_ranks
from tests.once import once
from tests.training.conftest import Drive, take_down
from tests.training.helpers import argv
from tests.training.memory.memory_worker import SIZES, VOCABULARY, measure

GPT2_VOCABULARY = 50304


def shipped(name: str, gpus: int = 1, **changes: Any) -> MemoryPlan:
    flags = []
    for flag, value in changes.items():
        flags += [f"--{flag.replace('_', '-')}", *([] if value is True else [str(value)])]
    config, _, _ = parse(["--config", str(SHIPPED / f"configs/models/{name}.yaml"), "--mock-data", *flags])
    config = resolve_run(resolve_model(config), gpus, gpus=True)
    return plan(config, load_recipe(config.recipe), GPT2_VOCABULARY, gpus)


def small(gpus: int = 1, **changes: Any) -> Config:
    return resolve_run(resolve_model(parse(argv(**{**SIZES, **changes}))[0]), gpus, gpus=False)


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


# None has RMSNorm: torch's, which a CPU runs, saves tensors that the kernel of a GPU, and so the plan, does not.
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "fp32": {"bf16": None},
    "recipe": {"recipe": "mxfp8"},
    "unfused attention": {"attention_backend": "local"},
    "grouped queries": {"group_query_attention": True, "num_query_groups": 2},
    "llama": {
        "group_query_attention": True,
        "num_query_groups": 2,
        "position_embedding_type": "rope",
        "swiglu": True,
        "ffn_hidden_size": 256,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
    },
    "nemotron": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "squared_relu": True,
        "kv_channels": 64,
        "disable_bias_linear": True,
    },
    "experts": {"num_experts": 4, "squared_relu": True, "disable_bias_linear": True, "moe_ffn_hidden_size": 192},
    "gated experts": {"num_experts": 4, "swiglu": True, "disable_bias_linear": True, "moe_ffn_hidden_size": 192},
    "dense and shared experts": {
        "num_layers": 3,
        "num_experts": 4,
        "moe_layer_freq": "([0]*1+[1]*2)",
        "moe_ffn_hidden_size": 64,
        "moe_shared_expert_intermediate_size": 96,
        "swiglu": True,
        "disable_bias_linear": True,
    },
    "norms of queries and keys": {"qk_layernorm": True, "group_query_attention": True, "num_query_groups": 2},
    "latent attention": {
        "multi_latent_attention": True,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_head_dim": 24,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 32,  # another width than of keys has the math kernel on a CPU, which saves the scores
        "qk_layernorm": True,
        "position_embedding_type": "rope",
        "disable_bias_linear": True,
    },
    "grouped experts": {
        "num_experts": 4,
        "squared_relu": True,
        "disable_bias_linear": True,
        "moe_ffn_hidden_size": 192,
        "moe_grouped_gemm": True,
    },
    "selective recompute": {"recompute_granularity": "selective", "attention_backend": "local"},
    "full recompute": {
        "num_layers": 4,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "full recompute of some": {
        "num_layers": 4,
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 3,
    },
}


def expected_saved(config: Config, gpus: int = 1) -> float:
    """What the plan says is kept, and the softmax of the logits in fp32, which is what cross-entropy saves."""
    found = plan(config, load_recipe(config.recipe, config.recipe_override), VOCABULARY, gpus, arch="cpu")
    logits = config.micro_batch_size * config.seq_length * VOCABULARY / config.tensor_model_parallel_size
    return sum(found.kept.values()) + 4 * logits


@pytest.fixture
def ranks(drive: Drive) -> startup.Ranks:
    """This process as a world of one; ``drive`` takes the process groups down."""
    return startup.prepare_environment()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_plan_is_what_a_model_holds(name: str, ranks: startup.Ranks) -> None:
    changes = VARIANTS[name]
    held, config = measure(changes, ranks), small(**changes)
    weights = stage_weights(config, VOCABULARY, 0)
    assert weights.dense + weights.expert == held.weights
    assert expected_saved(config) == pytest.approx(held.saved, rel=0.01)


SHAPES_THAT_CACHE: dict[str, dict[str, Any]] = {
    "dense": {"swiglu": True, "ffn_hidden_size": 384},
    "experts": {
        **VARIANTS["dense and shared experts"],
        **VARIANTS["latent attention"],
        "moe_ffn_hidden_size": 128,
        "moe_shared_expert_intermediate_size": 256,
        "ffn_hidden_size": 256,
    },
    "unfused attention": {"swiglu": True, "ffn_hidden_size": 128, "attention_backend": "local"},
}


@pytest.mark.parametrize("override", ["activations.attention_output=e5m6", "activations.swiglu_input=e4m3"])
@pytest.mark.parametrize("shape", SHAPES_THAT_CACHE)
def test_a_format_of_saved_activations_frees_what_the_plan_says(
    shape: str, override: str, ranks: startup.Ranks, drive: Drive
) -> None:
    plain, held = small(**SHAPES_THAT_CACHE[shape]), []
    cached = replace(plain, recipe_override=[override])
    for changes in ({}, {"recipe_override": override}):
        held.append(measure({**SHAPES_THAT_CACHE[shape], **changes}, ranks).saved)
        take_down()
    assert expected_saved(cached) == pytest.approx(held[1], rel=0.01)
    saving = held[0] - held[1]
    assert expected_saved(plain) - expected_saved(cached) == pytest.approx(saving, rel=0.05)
    assert saving > 0.01 * held[0]


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


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "sequence, FP8 codes": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "recipe": "fp8_delayed",
        "fp8_sequence_parallel_gather": True,
    },
    "pipeline": {"pipeline_model_parallel_size": 2},
    "experts": {
        "expert_model_parallel_size": 2,
        "num_experts": 4,
        "squared_relu": True,
        "disable_bias_linear": True,
        "moe_ffn_hidden_size": 192,
        "global_batch_size": 16,
    },
}
LAYOUTS["experts, FP8 dispatch"] = LAYOUTS["experts"] | {"recipe": "mxfp8", "moe_fp8_dispatch": True}


@pytest.fixture(scope="module")
def held_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what each of two processes holds under every layout, measured in one launch."""

    def run(folder: Path) -> None:
        fork_ranks(2, ["-m", "tests.training.memory.memory_worker", str(folder), json.dumps(LAYOUTS)])

    return once(tmp_path_factory, "held_by_two", run)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_plan_is_what_two_processes_hold(name: str, held_by_two: Path) -> None:
    held = [json.loads((held_by_two / f"{name}-{rank}.json").read_text()) for rank in range(2)]
    config = small(gpus=2, **LAYOUTS[name])
    for rank in range(2):
        weights = stage_weights(config, VOCABULARY, rank if name == "pipeline" else 0)
        assert weights.dense + weights.expert == held[rank]["weights"]
    if name != "pipeline":
        # The router sends each rank more or less than its share of the tokens; together they have it all.
        saved = sum(rank["saved"] for rank in held) / 2
        assert expected_saved(config, gpus=2) == pytest.approx(saved, rel=0.01)


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


def test_a_layer_s_parts_are_named(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(SHIPPED / "configs/models/gpt_345m.yaml")
    drive(["--config", config, "--memory-plan", "--micro-batch-size", "16", "--global-batch-size", "16"])
    printed = capsys.readouterr().out
    assert "one of 1 GPUs" in printed
    # with 0.13 GiB of buffers of CUDA graphs and the 0.56 of a layer's backward pass
    assert "33.94" in next(line for line in printed.splitlines() if "peak" in line)
    assert "input of linear_fc2" in printed
    assert printed.splitlines()[-1].startswith("a GPU of 38 GiB holds it")
    assert not Path("runs").exists()


def test_a_plan_gives_up_graphs_as_a_run_does(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(SHIPPED / "configs/models/gpt_345m.yaml")
    flags = ["--config", config, "--mock-data", "--micro-batch-size", "16", "--global-batch-size", "16"]
    for gib, asked, eager in ((36, "auto", True), (36, "local", False), (40, "auto", False)):
        monkeypatch.setattr(report, "this_gpu", lambda local_rank, gib=gib: report.Device("GPU", gib * 2**30))
        drive([*flags, "--memory-plan", "--cuda-graph-impl", asked])
        printed = capsys.readouterr().out
        assert ("CUDA graphs: off, memory is close to the GPU's" in printed) == eager
        assert ("buffers of CUDA graphs" in printed) != eager


def test_a_layout_is_planned_without_its_gpus_or_data(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data-path", "nowhere_text_document", "--memory-plan"]
    drive(["--config", str(SHIPPED / "configs/models/gpt_6.7b_released.yaml"), *flags])
    assert "one of 8 GPUs" in capsys.readouterr().out
    drive(["--config", str(SHIPPED / "configs/models/gpt_125m.yaml"), *flags, "--memory-plan-gpus", "16"])
    said = capsys.readouterr().out
    assert "one of 16 GPUs" in said
    assert "parallelism: tensor 1, pipeline 1" in said
    with pytest.raises(UserError, match="10 processes are not divisible"):
        drive(["--config", str(SHIPPED / "configs/models/gpt_6.7b.yaml"), *flags, "--memory-plan-gpus", "10"])


def test_gathers_are_planned_with_the_memory(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(SHIPPED / "configs/models/gpt_6.7b.yaml")
    layout = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--recipe", "fp8_delayed", "--no-save-memory"]
    found = []
    for flags in ([], ["--fp8-sequence-parallel-gather"]):
        drive(["--config", config, *layout, *flags, "--memory-plan", "--memory-plan-gpus", "2"])
        lines = capsys.readouterr().out.splitlines()
        sizes = [(line[2:58].rstrip(), *line.split()[-2:]) for line in lines if line.endswith((" GiB", " MiB"))]
        found.append({name: float(size) * (1 if unit == "GiB" else 2**-10) for name, size, unit in sizes})
    plain, codes = found
    for name in plain:
        if "gathered" in name:
            assert codes[name] == pytest.approx(plain[name] / 2, abs=1e-3), name
        if "reduce-scattered" in name:
            assert codes[name] == plain[name], name
    # a layer saves its input as codes
    for name in ("input of linear_qkv", "input of the MLP"):
        assert codes[name] == pytest.approx(plain[name] / 2, abs=1e-3), name
    assert sum("gathered" in name for name in plain) == 3


def test_what_does_not_fit_is_refused() -> None:
    found = shipped("gpt_345m", micro_batch_size=16, global_batch_size=16)
    with pytest.raises(UserError) as error:
        report.check(found, report.Device("a GPU of 32 GiB", 32 * 2**30))
    message = str(error.value)
    for words in ("33.3 GiB", "activations 24.", "logits 3.1", "--micro-batch-size", "--no-memory-check"):
        assert words in message
    (line,) = report.check(found, report.Device("H200", 140 * 2**30))
    assert line == "memory: 33.3 GiB planned of 140.0 on a GPU"
    (line,) = report.check(found, report.Device("small", 34 * 2**30))
    assert "close" in line


def test_the_driver_refuses_before_anything_starts(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(report, "this_gpu", lambda local_rank: report.Device("a tiny GPU", 2**20))
    with pytest.raises(UserError, match="but a tiny GPU has"):
        drive(argv(save="out"))
    assert not torch.distributed.is_initialized()
    assert not Path("out").exists()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    drive(argv(save="out", no_memory_check=True, no_save=True))


@pytest.mark.parametrize(
    ("base", "phases", "words"),
    [
        ("bf16", "[]", "recipe {}, microbatches"),
        (
            "bf16",
            "[{from_step: 1}, {from_step: 2, gemms: fp8_current}]",
            "recipe {}, phase 2 of 2, where it is",
        ),
        ("fp8_current", "[{from_step: 1, gemms: bf16}]", "recipe {}, before phase 1 of 1, where it is largest,"),
    ],
)
def test_a_plan_names_the_phase_that_it_is_of(base: str, phases: str, words: str) -> None:
    config, recipe = small(bf16=True), load_recipe(base, [f"phases={phases}"])
    found = plan(config, recipe, VOCABULARY, 1)
    assert found.peak == max(plan(config, stage, VOCABULARY, 1).peak for stage in recipe.stages)
    assert words.format(recipe.name) in report.table(found, config, recipe, None)[0]
