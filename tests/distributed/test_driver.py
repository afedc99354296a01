"""The driver on two processes by torchrun: layouts agree, resume is exact, errors are one line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.training.helpers import argv, losses, rows, torchrun

# No dropout and fp32: what is left between layouts is the order of sums.
COMPARABLE: dict[str, Any] = {
    "train_iters": 3,
    "eval_iters": 1,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "no_save": True,
    "log_params_norm": True,
}


def run(processes: int, folder: Path, name: str, **changes: Any) -> None:
    result = torchrun(processes, argv(save=name, **changes), folder)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one")
    run(1, folder, "out", **COMPARABLE)
    return rows(folder / "out")


@pytest.mark.parametrize(
    "layout",
    [
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ],
    ids=["data", "tensor"],
)
def test_layouts_train_the_same(one_process: list[dict[str, Any]], tmp_path: Path, layout: dict[str, Any]) -> None:
    run(2, tmp_path, "out", **COMPARABLE, **layout)
    for mine, reference in zip(rows(tmp_path / "out"), one_process, strict=True):
        for key in ("lm loss", "lm loss validation", "grad-norm", "params-norm", "learning-rate"):
            if key in reference:
                assert mine[key] == pytest.approx(reference[key], rel=2e-6), key


@pytest.mark.parametrize(
    "layout",
    [
        {"use_distributed_optimizer": True, "recipe": "fp8_delayed"},
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4},
    ],
    ids=["data", "pipeline"],
)
def test_resume_is_bit_equal(tmp_path: Path, layout: dict[str, Any]) -> None:
    common = {**layout, "bf16": True, "train_iters": 4, "save_interval": 2}
    run(2, tmp_path, "whole", **common)
    shutil.copytree(tmp_path / "whole/iter_0000002", tmp_path / "half/iter_0000002")
    (tmp_path / "half/latest_checkpointed_iteration.txt").write_text("2\n")
    run(2, tmp_path, "rest", load="half", **common)
    assert losses(tmp_path / "rest") == losses(tmp_path / "whole")[2:]


def test_experts_over_two_ranks(tmp_path: Path) -> None:
    run(
        2,
        tmp_path,
        "out",
        train_iters=2,
        num_experts=4,
        expert_model_parallel_size=2,
        moe_aux_loss_coeff=1e-2,
        disable_bias_linear=True,
        use_distributed_optimizer=True,
        recipe="mxfp8",
        bf16=True,
    )
    assert len(losses(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # Known before the process group starts, and after it.
        ({"tensor_model_parallel_size": 4}, "2 processes are not divisible"),
        (
            {"mock_data": None, "data_path": ["short.jsonl"], "split": "1", "data_cache_path": "cache"},
            "less than one sample",
        ),
    ],
    ids=["early", "late"],
)
def test_a_user_s_error_is_one_line_from_one_process(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    (tmp_path / "short.jsonl").write_text('{"text": "1 2 3"}\n')
    result = torchrun(2, argv(**changes), tmp_path)
    assert result.returncode != 0
    ours = [line for line in result.stderr.splitlines() if line.startswith("pretrain_gpt.py: error:")]
    assert len(ours) == 1
    assert words in ours[0]
    assert 'pretrain_gpt.py", line' not in result.stderr
    assert "exitcode  : 2" in result.stderr
