"""The driver on two processes: layouts agree, checkpoints move between them, resume is exact, errors are one line.

All runs that end well share one launch of torchrun, which costs more than they do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.shipped import SHIPPED
from tests.launch import forked
from tests.once import once
from tests.training.conftest import driving
from tests.training.helpers import argv, losses, many_runs, rows
from tests.weekly import also_weekly

# No dropout and fp32: what is left between layouts is the order of sums.
COMPARABLE: dict[str, Any] = {
    "train_iters": 4,
    "lr_decay_iters": 10,
    "eval_iters": 1,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "log_params_norm": True,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {"plain": {}, "distributed": {"use_distributed_optimizer": True}}
# Every pair with the distributed optimizer, whose shards each layout cuts anew. A plain optimizer's state is cut as
# weights are: each layout is written and read once.
MOVES = [(before, after, "distributed") for before in LAYOUTS for after in LAYOUTS]
MOVES += [("data", "tensor", "plain"), ("tensor", "pipeline", "plain"), ("pipeline", "data", "plain")]
# each layout once written and once read, and one that stays
MOVES_EACH_TIME = [("data", "pipeline", "distributed"), ("pipeline", "tensor", "distributed")]
MOVES_EACH_TIME += [("tensor", "data", "distributed"), ("tensor", "tensor", "distributed"), ("data", "tensor", "plain")]
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
TEXT: dict[str, Any] = COMPARABLE | {
    "seq_length": 64,
    "tokenizer_type": "GPT2BPETokenizer",
    "vocab_file": SHIPPED / "data/tiny_bpe/vocab.json",
    "merge_file": SHIPPED / "data/tiny_bpe/merges.txt",
    "vocab_size": None,
}
# Microbatches of one conversation each, with answers of any length.
CHAT: dict[str, Any] = TEXT | {
    "mock_data": None,
    "sft": True,
    "data_path": [str(SHIPPED / "data/chat-sample.jsonl")],
    "split": "80,10,10",
    "data_cache_path": "cache",
    "micro_batch_size": 1,
    "finetune": True,
    "no_save": True,
}
# Auxiliary losses as large as the loss; microbatches have other tokens with a loss, and sequences other answers.
EXPERT_TEXT: dict[str, Any] = {
    "num_experts": 4,
    "disable_bias_linear": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1.0,
    "moe_z_loss_coeff": 0.1,
}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "expert": {"expert_model_parallel_size": 2},
}
CHAT_WEEKLY = {"tensor"}  # documents and experts are cut so as well
# Dropout is on in these.
RESUMED: dict[str, dict[str, Any]] = {
    "delayed scaling": {"use_distributed_optimizer": True, "recipe": "fp8_delayed"},
    "overlapped": {**OVERLAP, "recipe": "mxfp4_rht_sr", "hidden_size": 128, "async_save": True},
    "interleaved": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4},
    # Shared embeddings have buckets of their own, with padding behind them.
    "pipeline, distributed": {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True},
    "sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "recipe": "fp8_delayed"},
    "FP8 dispatch": {
        "expert_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "recipe": "fp8_blockwise",
        "hidden_size": 128,
        "disable_bias_linear": True,
        "num_experts": 4,
        "moe_grouped_gemm": True,
        "moe_fp8_dispatch": True,
    },
    # DeepSeek's layers; the balancing bias is a state beside the weights.
    "latent attention, experts": {
        "expert_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "recipe": "mxfp4_sr",
        "multi_latent_attention": True,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 32,
        "v_head_dim": 32,
        "qk_layernorm": True,
        "position_embedding_type": "rope",
        "disable_bias_linear": True,
        "num_experts": 4,
        "moe_layer_freq": "[0,1]",
        "moe_shared_expert_intermediate_size": 64,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.01,
    },
}
# A run of 5 steps, of which 60% are 3: whole, and its parts under the recipe of each phase.
TAIL: dict[str, dict[str, Any]] = {
    "whole": {"recipe": "nvfp4_bf16_tail", "recipe_override": "phases=[{from_fraction: 0.6, fprop: bf16}]"},
    "parts": {"recipe": "nvfp4", "exit_interval": 3},
    "parts again": {"recipe": "nvfp4", "recipe_override": "fprop=null", "save": "tail parts"},
}
# delayed scaling resumes under sequence parallelism as well, pipelines with a distributed optimizer
RESUMED_WEEKLY = {"delayed scaling", "interleaved"}
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": True}}


@dataclass(frozen=True)
class Launch:
    """One launch's folder, and the UserErrors by the name of the run."""

    folder: Path
    errors: dict[str, str]

    def rows(self, name: str) -> list[dict[str, Any]]:
        return rows(self.folder / name)

    def losses(self, name: str) -> list[str]:
        return losses(self.folder / name)


def cases(weekly: bool) -> dict[str, dict[str, Any]]:
    """Folder -> options, in the order in which they run."""
    found: dict[str, dict[str, Any]] = {}
    moves = MOVES if weekly else MOVES_EACH_TIME
    for optimizer, more in OPTIMIZERS.items():
        for layout, sizes in LAYOUTS.items():
            common = COMPARABLE | more | sizes
            # Whole, up to iteration 2, and from there on other layouts.
            found[f"{layout} {optimizer}"] = common | {"no_save": True}
            if any((layout, optimizer) == (before, of) for before, _, of in moves):
                found[f"{layout} {optimizer} half"] = common | {"exit_interval": 2}
    for before, after, optimizer in moves:
        options = COMPARABLE | OPTIMIZERS[optimizer] | LAYOUTS[after] | {"load": f"{before} {optimizer} half"}
        found[f"{before} to {after} {optimizer}"] = options | {"no_save": True}
    found["overlapped"] = COMPARABLE | OVERLAP | {"no_save": True}
    found["sequence parallel"] = COMPARABLE | LAYOUTS["tensor"] | {"sequence_parallel": True, "no_save": True}
    for name, options in RESUMED.items():
        if name in RESUMED_WEEKLY and not weekly:
            continue
        common = options | {"bf16": True, "train_iters": 4, "lr_decay_iters": 10}
        found[f"{name} whole"] = common | {"no_save": True}
        found[f"{name} resumed"] = common | {"exit_interval": 2}
        # Continues by itself, from its own folder.
        found[f"{name} resumed again"] = common | {"save": f"{name} resumed"}
    sequence = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "bf16": True, "train_iters": 5}
    for name, options in TAIL.items():
        found[f"tail {name}"] = sequence | options
    sharded = {"bf16": True, "train_iters": 4, "lr_decay_iters": 10, "fp8_sequence_parallel_gather": True}
    found["sequence parallel, FP8 codes"] = RESUMED["sequence parallel"] | sharded | {"no_save": True}
    plain = {"bf16": True, "train_iters": 4, "lr_decay_iters": 10, "no_save": True, "moe_fp8_dispatch": None}
    found["bf16 dispatch"] = RESUMED["FP8 dispatch"] | plain
    for precision, options in PRECISIONS.items():
        common = options | {"train_iters": 3, "no_gradient_accumulation_fusion": True, "no_save": True}
        found[f"ours {precision}"] = common
        found[f"stock {precision}"] = common | {"no_lowprec_linears": True}
    found["experts"] = {
        "num_experts": 4,
        "expert_model_parallel_size": 2,
        "moe_aux_loss_coeff": 1e-2,
        "disable_bias_linear": True,
        "use_distributed_optimizer": True,
        "recipe": "mxfp8",
        "bf16": True,
    }
    found["experts, tensor"] = {
        "num_experts": 4,
        "moe_aux_loss_coeff": 1e-2,
        "disable_bias_linear": True,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "recipe": "fp8_current",
        "bf16": True,
        "no_save": True,
    }
    for name in ("experts", "experts, tensor"):
        found[f"{name}, grouped"] = found[name] | {"moe_grouped_gemm": True, "no_save": True}
    found["chat start"] = TEXT | {"exit_interval": 1}
    for layout, sizes in {**LAYOUTS, "distributed": OVERLAP}.items():
        if layout in CHAT_WEEKLY and not weekly:
            continue
        found[f"chat {layout}"] = CHAT | sizes | {"load": "chat start"}
    found["expert chat start"] = TEXT | EXPERT_TEXT | {"exit_interval": 1}
    for layout, sizes in EXPERT_LAYOUTS.items():
        found[f"expert chat {layout}"] = CHAT | EXPERT_TEXT | sizes | {"load": "expert chat start"}
    documents = COMPARABLE | {"train_iters": 2, "load": "data plain half", "finetune": True, "no_save": True}
    documents |= dict.fromkeys(("eod_mask_loss", "reset_position_ids", "reset_attention_mask"), True)
    for layout, sizes in LAYOUTS.items():
        found[f"documents {layout}"] = documents | sizes
    for layout in ("data", "pipeline"):
        found[f"bad numbers {layout}"] = COMPARABLE | LAYOUTS[layout] | {"lr": 1e38, "max_skipped_steps": 2}
    return found


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, weekly: bool) -> Launch:
    runs = cases(weekly)
    command_lines = [argv(**{"save": name} | options) for name, options in runs.items()]
    folder = once(tmp_path_factory, "driver", lambda folder: many_runs(2, command_lines, folder))
    names, errors = list(runs), json.loads((folder / "errors.json").read_text())
    return Launch(folder, {names[int(number)]: error for number, error in errors.items()})


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one")
    with driving(folder) as call:
        call(argv(save="out", no_save=True, **COMPARABLE))
    return rows(folder / "out")


@pytest.fixture(scope="module")
def chat_on_one_process(tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("chat")
    with driving(folder) as call:
        call(argv(save="out", load=str(launch.folder / "chat start"), **CHAT))
    return rows(folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize("layout", also_weekly([*LAYOUTS, "distributed"], ["data", "pipeline", "distributed"]))
def test_losses_of_answers_are_weighted_by_tokens_on_any_layout(
    chat_on_one_process: list[dict[str, Any]], launch: Launch, layout: str
) -> None:
    # torch's fp32 norm of an embedding is 1e-5 off on a CPU, by how it is cut into tensors.
    compare(launch.rows(f"chat {layout}"), chat_on_one_process, norm=3e-5)
    assert len(launch.losses(f"chat {layout}")) == 4


@pytest.fixture(scope="module")
def expert_chat_on_one_process(tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("expert_chat")
    with driving(folder) as call:
        call(argv(save="out", load=str(launch.folder / "expert chat start"), **CHAT, **EXPERT_TEXT))
    return rows(folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_auxiliary_losses_weigh_the_same_on_any_layout(
    expert_chat_on_one_process: list[dict[str, Any]], launch: Launch, layout: str
) -> None:
    compare(launch.rows(f"expert chat {layout}"), expert_chat_on_one_process)
    assert len(launch.losses(f"expert chat {layout}")) == 4


@pytest.mark.slow
def test_only_bad_numbers_failed(launch: Launch) -> None:
    assert set(launch.errors) == {"bad numbers data", "bad numbers pipeline"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["data plain", "tensor plain", "data distributed", "tensor distributed", "overlapped", "sequence parallel"]
)
def test_layouts_train_the_same(one_process: list[dict[str, Any]], launch: Launch, name: str) -> None:
    compare(launch.rows(name), one_process)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_documents_are_separate_on_any_layout(launch: Launch, layout: str) -> None:
    compare(launch.rows(f"documents {layout}"), launch.rows("documents data"))


def compare(mine: list[dict[str, Any]], reference: list[dict[str, Any]], norm: float = 2e-6) -> None:
    for row, expected in zip(mine, reference, strict=True):
        for key in ("lm loss", "lm loss validation", "lm loss test", "grad-norm", "params-norm", "learning-rate"):
            if key in expected:
                assert row[key] == pytest.approx(expected[key], rel=norm if key == "grad-norm" else 2e-6), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "optimizer"), also_weekly(MOVES, ["-".join(move) for move in MOVES_EACH_TIME])
)
def test_a_checkpoint_goes_on_under_another_layout(launch: Launch, before: str, after: str, optimizer: str) -> None:
    whole = launch.rows(f"{before} {optimizer}")[2:]
    compare(launch.rows(f"{before} to {after} {optimizer}"), whole)
    if before == after:
        assert launch.losses(f"{before} to {after} {optimizer}") == launch.losses(f"{before} {optimizer}")[2:]


@pytest.mark.slow
@pytest.mark.parametrize("name", also_weekly(RESUMED, RESUMED.keys() - RESUMED_WEEKLY))
def test_resume_is_bit_equal(launch: Launch, name: str) -> None:
    assert launch.losses(f"{name} resumed") == launch.losses(f"{name} whole")
    assert len(launch.losses(f"{name} whole")) == 4


@pytest.mark.slow
def test_a_change_of_phase_is_a_stop_and_a_resume_under_sequence_parallelism(launch: Launch) -> None:
    assert launch.losses("tail parts") == launch.losses("tail whole")
    norms = [[row["grad-norm"] for row in launch.rows(name)] for name in ("tail parts", "tail whole")]
    assert norms[0] == norms[1]
    assert len(norms[0]) == 5


@pytest.mark.slow
def test_gathered_codes_change_no_bit(launch: Launch) -> None:
    assert launch.losses("sequence parallel, FP8 codes") == launch.losses("sequence parallel whole")
    log = [row["grad-norm"] for row in launch.rows("sequence parallel, FP8 codes")]
    assert log == [row["grad-norm"] for row in launch.rows("sequence parallel whole")]


@pytest.mark.slow
def test_dispatched_codes_change_one_weight_gradient(launch: Launch) -> None:
    got, want = (launch.rows(name) for name in ("FP8 dispatch whole", "bf16 dispatch"))
    # the first step's forward pass has the same bits; then another rounding of x in wgrad reaches the weights
    assert got[0]["lm loss hex"] == want[0]["lm loss hex"]
    assert got[0]["grad-norm"] != want[0]["grad-norm"]
    assert got[0]["grad-norm"] == pytest.approx(want[0]["grad-norm"], rel=1e-3)
    for row, expected in zip(got, want, strict=True):
        assert row["lm loss"] == pytest.approx(expected["lm loss"], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_unquantized_linears_are_megatron_s_own(launch: Launch, precision: str) -> None:
    assert launch.losses(f"ours {precision}") == launch.losses(f"stock {precision}")
    assert len(launch.losses(f"ours {precision}")) == 3


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["experts", "experts, tensor"])
def test_experts_over_two_ranks(launch: Launch, experts: str) -> None:
    assert len(launch.losses(experts)) == 2
    assert launch.losses(f"{experts}, grouped") == launch.losses(experts)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data", "pipeline"])
def test_all_ranks_agree_on_where_bad_numbers_come_from(launch: Launch, layout: str) -> None:
    # The first update at that learning rate overflows.
    name = f"bad numbers {layout}"
    assert "2 iterations in a row were skipped" in launch.errors[name]
    assert [row["skipped iterations"] for row in launch.rows(name)] == [0, 1, 2]
    report = (launch.folder / name / "bad_numbers.md").read_text()
    assert "first of it that is not finite: embedding.word_embeddings, output: 0 NaN and 4,096 Inf" in report
    assert "on rank 0 in microbatch 0" in report
    # Such weights must not take the place of good ones.
    assert "an earlier update has spoiled them, so no checkpoint was written" in report
    assert not (launch.folder / name / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # Known before the process group starts, and after it.
        pytest.param({"tensor_model_parallel_size": 4}, "2 processes are not divisible", marks=pytest.mark.weekly),
        (
            {"mock_data": None, "data_path": ["short.jsonl"], "split": "1", "data_cache_path": "cache"},
            "less than one sample",
        ),
    ],
    ids=["early", "late"],
)
def test_a_user_s_error_is_one_line_from_one_process(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    (tmp_path / "short.jsonl").write_text('{"text": "1 2 3"}\n')
    codes, printed = forked(2, ["tests/distributed/patient_driver.py", *argv(**changes)], tmp_path)
    assert codes[0] == 2
    (ours,) = (line for line in printed.splitlines() if "error:" in line)
    assert ours.startswith("pretrain_gpt.py: error:")
    assert words in ours
    assert "Traceback" not in printed
