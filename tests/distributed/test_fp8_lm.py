"""Recipe fp8_lm on two processes: narrow optimizer state and gradients sent in FP8, on layouts, stopped and resumed.

All runs share one launch of torchrun, but those of one process.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.multi_tensor_cast.reference import fp8_codes
from megatron_lowprec.kernels.quantize.reference import block_amax, scale_blocks
from megatron_lowprec.mcore.optim.fp8_param_gather import sharded_weights
from megatron_lowprec.quantization.primary_weight import weight_encode_scale
from megatron_lowprec.quantization.tensor import block_sizes
from megatron_lowprec.training import loop
from tests.once import once
from tests.training.conftest import driving
from tests.training.helpers import argv, losses, many_runs, rows
from tests.weekly import also_weekly

STATE = [
    word
    for override in ("optimizer.exp_avg=e4m3", "optimizer.exp_avg_sq=fp16", "optimizer.master=fp16")
    for word in ("--recipe-override", override)
]
COMMON: dict[str, Any] = {"train_iters": 4, "lr_decay_iters": 10, "log_params_norm": True}
COMPARABLE: dict[str, Any] = COMMON | {"hidden_dropout": 0, "attention_dropout": 0}
LM: dict[str, Any] = COMMON | {"recipe": "fp8_lm", "bf16": True}
OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
}
ALIKE = ("data", "tensor", "sequence")  # stages of a pipeline draw other weights
LEVELS = ("fp8_lm_o1", "fp8_lm_o2", "fp8_lm_o3")
RESUMED: dict[str, dict[str, Any]] = {
    "data": OVERLAP | {"async_save": True},
    "data, half gradients": {"grad_reduce_in_bf16": True},
    "data, fp32": {"bf16": None},
    "sequence": LAYOUTS["sequence"],
    "pipeline": LAYOUTS["pipeline"],
    "interleaved": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4},
    "experts": {"num_experts": 4, "expert_model_parallel_size": 2, "disable_bias_linear": True},
    "bf16 moment": {"recipe": "bf16", "recipe_override": "optimizer.exp_avg=bf16"},
    "o1, data": OVERLAP | {"recipe": "fp8_lm_o1"},
    "o2, sequence": LAYOUTS["sequence"] | {"recipe": "fp8_lm_o2"},
    "o2, interleaved": {
        "recipe": "fp8_lm_o2",
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "num_layers": 4,
        "recipe_override": "gradients.accumulation=format",
    },
    "o3, data": OVERLAP | {"recipe": "fp8_lm_o3", "async_save": True},
    "o3, pipeline": LAYOUTS["pipeline"] | {"recipe": "fp8_lm_o3"},
}

RESUMED_EACH_TIME = ("data", "sequence", "experts", "bf16 moment", "o2, interleaved", "o3, data")


def cases(weekly: bool) -> dict[str, list[str]]:
    """Folder -> command line, in the order in which they run."""
    found: dict[str, list[str]] = {}
    for layout in ALIKE:
        sizes = LAYOUTS[layout]
        found[f"state {layout}"] = argv(**COMPARABLE | sizes, recipe="bf16", no_save=True) + STATE
    found["state data, overlapped"] = [
        *argv(**COMPARABLE | OVERLAP, recipe="bf16", no_save=True, use_distributed_optimizer=True),
        *STATE,
    ]
    found["exchange"] = argv(**LM, no_save=True)
    found["exchange overlapped"] = argv(**LM | OVERLAP, no_save=True, use_distributed_optimizer=True)
    found["exchange, rounded sums"] = [*argv(**LM, no_save=True), "--recipe-override", "gradients.sum=format"]
    for level in LEVELS:
        found[level] = argv(**LM | {"recipe": level}, no_save=True, log_quantization_interval=4)
    several = LM | {"global_batch_size": 8, "no_save": True}
    found["microbatches"] = argv(**several)
    found["microbatches, fp32"] = argv(**several | {"recipe": "fp8_lm_o2"})
    found["microbatches, fp32, overlapped"] = argv(
        **several | OVERLAP | {"recipe": "fp8_lm_o2", "log_num_zeros_in_grad": True}
    )
    found["microbatches, format"] = argv(
        **several | {"recipe": "fp8_lm_o2", "recipe_override": "gradients.accumulation=format"}
    )
    found["tokens"] = argv(**LM | {"recipe": "fp8_lm_o2"}, no_save=True, calculate_per_token_loss=True)
    found["fp8_delayed"] = argv(**LM | {"recipe": "fp8_delayed"}, no_save=True, use_distributed_optimizer=True)
    for name in RESUMED if weekly else RESUMED_EACH_TIME:
        options = RESUMED[name]
        common = LM | {"use_distributed_optimizer": True} | options
        found[f"{name} whole"] = argv(**common, no_save=True)
        found[f"{name} resumed"] = argv(**common, exit_interval=2)
        found[f"{name} resumed again"] = argv(**common | {"save": f"{name} resumed"})
    # Written by one recipe or layout, continued by another.
    found["half of fp8_lm"] = argv(**LM, exit_interval=2)
    for layout in ("tensor", "pipeline"):
        found[f"to {layout}"] = argv(**LM | LAYOUTS[layout], load="half of fp8_lm", no_save=True)
    found["to fp8_delayed"] = argv(
        **LM | {"recipe": "fp8_delayed"}, load="half of fp8_lm", no_save=True, use_distributed_optimizer=True
    )
    found["half of fp8_delayed"] = argv(
        **LM | {"recipe": "fp8_delayed"}, exit_interval=2, use_distributed_optimizer=True
    )
    found["from fp8_delayed"] = argv(**LM, load="half of fp8_delayed", no_save=True)
    found["o3 from fp8_delayed"] = argv(**LM | {"recipe": "fp8_lm_o3"}, load="half of fp8_delayed", no_save=True)
    found["o3 from weights"] = argv(
        **LM | {"recipe": "fp8_lm_o3"}, load="half of fp8_delayed", no_save=True, finetune=True
    )
    found["half of o3"] = argv(**LM | {"recipe": "fp8_lm_o3"}, exit_interval=2)
    found["o3 to fp8_delayed"] = argv(
        **LM | {"recipe": "fp8_delayed"}, load="half of o3", no_save=True, use_distributed_optimizer=True
    )
    found["from weights"] = argv(**LM, load="half of fp8_delayed", no_save=True, finetune=True)
    found["from weights, fp8_delayed"] = argv(
        **LM | {"recipe": "fp8_delayed"},
        load="half of fp8_delayed",
        no_save=True,
        finetune=True,
        use_distributed_optimizer=True,
    )
    found["bad numbers"] = argv(**LM, lr=1e38, max_skipped_steps=2)
    return {name: line if "--save" in line else [*line, "--save", name] for name, line in found.items()}


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, weekly: bool) -> Path:
    asked = cases(weekly)
    folder = once(tmp_path_factory, "fp8_lm", lambda folder: many_runs(2, list(asked.values()), folder))
    errors = json.loads((folder / "errors.json").read_text())
    assert list(errors) == [str(list(asked).index("bad numbers"))], errors
    return folder


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one")
    with driving(folder) as call:
        call([*argv(save="out", no_save=True, recipe="bf16", **COMPARABLE), *STATE])
    return rows(folder / "out")


def values(found: list[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in found if key in row]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ALIKE)
def test_the_state_means_the_same_on_any_layout(one_process: list[dict[str, Any]], launch: Path, layout: str) -> None:
    # In fp32 compute. Gradients differ by the order of their sums, which moves an entry's code here and there: its
    # moment by a sixteenth, a ten-thousandth of the learning rate's step on average over entries.
    found = rows(launch / f"state {layout}")
    assert values(found, "lm loss")[0] == pytest.approx(values(one_process, "lm loss")[0], rel=1e-6)
    for key, tolerance in (("lm loss", 2e-6), ("grad-norm", 2e-5), ("params-norm", 2e-6)):
        assert values(found, key) == pytest.approx(values(one_process, key), rel=tolerance), key


@pytest.mark.slow
def test_collectives_on_their_way_change_no_bit(launch: Path) -> None:
    assert losses(launch / "state data, overlapped") == losses(launch / "state data")
    assert losses(launch / "exchange overlapped") == losses(launch / "exchange")
    assert len(losses(launch / "exchange")) == 4


@pytest.mark.slow
def test_it_trains_as_fp8_delayed_does_and_not_the_same(launch: Path) -> None:
    reference = values(rows(launch / "fp8_delayed"), "lm loss")
    for name in ("exchange", "exchange, rounded sums", *LEVELS):
        found = rows(launch / name)
        assert values(found, "lm loss") == pytest.approx(reference, rel=5e-3)
        assert values(found, "lm loss")[0] == reference[0]
        assert values(found, "grad-norm")[0] != values(rows(launch / "fp8_delayed"), "grad-norm")[0]
        assert values(found, "grad-norm")[0] == pytest.approx(
            values(rows(launch / "fp8_delayed"), "grad-norm")[0], rel=0.05
        )
    assert losses(launch / "exchange") != losses(launch / "exchange, rounded sums")


@pytest.mark.slow
def test_stored_gradients_are_those_of_a_buffer(launch: Path) -> None:
    """But for codes that requantization makes subnormal, and for a rounding a microbatch where that is asked."""
    buffer = rows(launch / "microbatches")
    assert values(rows(launch / "fp8_lm_o2"), "grad-norm")[0] == pytest.approx(
        values(rows(launch / "exchange"), "grad-norm")[0], rel=1e-6
    )
    # Scaled by the number of tokens after the reduction, which the loss is a mean over here.
    assert values(rows(launch / "tokens"), "grad-norm")[0] == pytest.approx(
        values(rows(launch / "exchange"), "grad-norm")[0], rel=1e-2
    )
    for kind, tolerance in (("fp32", 1e-6), ("format", 1e-2)):
        found = rows(launch / f"microbatches, {kind}")
        assert values(found, "grad-norm")[0] == pytest.approx(values(buffer, "grad-norm")[0], rel=tolerance)
        assert values(found, "lm loss") == pytest.approx(values(buffer, "lm loss"), rel=1e-3)
    assert losses(launch / "microbatches, format") != losses(launch / "microbatches, fp32")
    assert losses(launch / "microbatches, fp32, overlapped") == losses(launch / "microbatches, fp32")


@pytest.mark.slow
def test_metrics_have_saturation_mu_and_scales(launch: Path) -> None:
    for level in LEVELS:
        found = rows(launch / level)
        assert not any("scale" in key or key.startswith("gradient ") for row in found[:3] for key in row)
        last = next(row for row in found if row.get("iteration") == 4 and "lm loss" in row)
        assert last["gradient mu"] == 1.0
        assert 0.0 <= last["gradient saturation"] < 1e-2
        parts = {"exp_avg": 448.0, "exp_avg_sq": 65504.0, "master": 65504.0} if level != "fp8_lm_o1" else {}
        assert {key for key in last if "scale" in key} == {f"{p} scale {end}" for p in parts for end in ("min", "max")}
        for part in parts:
            least, largest = (math.log2(last[f"{part} scale {end}"]) for end in ("min", "max"))
            assert least.is_integer()
            assert largest.is_integer()
            assert least <= largest
        if parts:  # the largest weight, an embedding's of deviation 0.02, lies in the upper half of FP16's range
            assert 0.02 < 65504.0 * last["master scale max"] < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", also_weekly(RESUMED, RESUMED_EACH_TIME))
def test_resume_is_bit_equal(launch: Path, name: str) -> None:
    assert losses(launch / f"{name} resumed") == losses(launch / f"{name} whole")
    assert len(losses(launch / f"{name} whole")) == 4


@pytest.mark.slow
def test_its_checkpoint_is_any_layout_s_and_any_recipe_s(launch: Path) -> None:
    whole = values(rows(launch / "data whole"), "lm loss")[2:]
    # Dropout draws otherwise on another layout.
    for layout in ("tensor", "pipeline"):
        assert values(rows(launch / f"to {layout}"), "lm loss") == pytest.approx(whole, rel=5e-3)
    for name in ("to fp8_delayed", "o3 to fp8_delayed"):
        assert values(rows(launch / name), "lm loss") == pytest.approx(whole, rel=5e-3)
    delayed = values(rows(launch / "fp8_delayed"), "lm loss")[2:]
    for name in ("from fp8_delayed", "o3 from fp8_delayed"):
        assert values(rows(launch / name), "lm loss") == pytest.approx(delayed, rel=5e-3)


@pytest.mark.slow
def test_without_an_optimizer_s_state_main_weights_are_the_loaded_weights(launch: Path) -> None:
    found, reference = (values(rows(launch / f"from weights{more}"), "lm loss") for more in ("", ", fp8_delayed"))
    assert found[0] == reference[0]
    assert found == pytest.approx(reference, rel=5e-3)
    # FP8 weights are quantized from the loaded values, not from their bf16 rounding of them, which they are here
    assert values(rows(launch / "o3 from weights"), "lm loss") == pytest.approx(reference, rel=5e-3)


@pytest.mark.slow
def test_gradients_that_are_not_finite_take_no_step(launch: Path) -> None:
    (error,) = json.loads((launch / "errors.json").read_text()).values()
    assert "2 iterations in a row were skipped" in error
    assert [row["skipped iterations"] for row in rows(launch / "bad numbers")] == [0, 1, 2]


@pytest.mark.slow
def test_required_options_are_switched_on_with_a_note(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with driving(tmp_path) as call:
        call(argv(save="out", no_save=True, recipe="fp8_lm", train_iters=1))
    said = capfd.readouterr().out
    assert "recipe fp8_lm: --use-distributed-optimizer is on, which it needs" in said
    assert "optimizer ScaledAdamW of megatron_lowprec" in said
    assert "optimizer: exp_avg E4M3, exp_avg_sq FP16, master FP16" in said
    assert "gradients: exchanged by data-parallel ranks in E4M3" in said


@pytest.mark.parametrize(
    ("recipe", "main_dtype", "options"),
    [
        ("fp8_current+fp8_lm_o3", torch.float16, {}),
        ("fp8_blockwise+fp8_lm_o3", torch.float16, {"hidden_size": 128}),
        (
            "fp8_blockwise",
            torch.float32,
            {"hidden_size": 128, "fp8_param_gather": True, "recipe_override": "optimizer.exp_avg=bf16"},
        ),
    ],
)
def test_fp8_weights_are_cast_from_the_main_weight_of_scaled_adam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, main_dtype: torch.dtype, options: dict[str, Any]
) -> None:
    seen, inner = [], loop.train_step

    def step(trainer: Any, *rest: Any) -> Any:
        result = inner(trainer, *rest)
        (part,) = trainer.optimizer.chained_optimizers
        if "fp8_lm_o3" in recipe:  # fp32, freed by the update
            assert all(shard.decoupled_grad is None for shard in part.get_parameters())
        for weight, main, start in sharded_weights(part):
            assert main is not None
            assert (main.stored.dtype, start, weight.source) == (main_dtype, 0, None)
            values = main.values().view(weight.shape)
            block = block_sizes(weight.spec, values)
            scale = weight_encode_scale(block_amax(values, block), weight.spec)
            codes = fp8_codes(scale_blocks(values, scale, block), torch.ones(1), FORMATS["e4m3"])
            assert torch.equal(weight.codes, codes)
            seen.append(codes)
        return result

    monkeypatch.setattr(loop, "train_step", step)
    with driving(tmp_path) as call:
        call(argv(**LM | {"recipe": recipe, "train_iters": 2} | options, save="out", no_save=True))
    first, second = seen[:8], seen[8:]
    assert len(second) == 8
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "fp8_lm_o2", "grad_reduce_in_bf16": True}, "set --recipe-override gradients.accumulation=buffer"),
        (
            {"recipe": "mxfp8+fp8_lm_o3"},
            "mxfp8.fp8_lm_o3 takes the weight in fprop e4m3 by 1x32",
        ),
        ({"recipe": "fp8_lm_o3", "bf16": None}, "stores FP8 weights, which needs --bf16"),
        ({"recipe": "fp8_delayed+mxfp8"}, "takes optimizer state, gradients and weights from mxfp8"),
    ],
)
def test_options_that_exclude_fp8_lm_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with driving(tmp_path) as call, pytest.raises(UserError, match=message):
        call(argv(**{"save": "out", "bf16": True} | options))
