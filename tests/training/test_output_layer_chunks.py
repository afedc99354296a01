"""--output-layer-chunk-size: the same training, resumed with and without it, in the memory that the plan counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec import UserError, get_recipe
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.memory.plan import plan
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses, many_runs, rows

CHUNKS: dict[str, Any] = {"output_layer_chunk_size": 24}  # of 64 tokens


def numbers(folder: Path) -> list[float]:
    """Losses of training and validation."""
    found = [row[key] for row in rows(folder) for key in ("lm loss", "lm loss validation") if key in row]
    assert found
    return found


def test_a_run_trains_evaluates_and_resumes(drive: Drive, capfd: pytest.CaptureFixture[str]) -> None:
    """With chunks until the end, and where a resumed run begins or leaves them; a checkpoint is the same."""
    common: dict[str, Any] = {"save_interval": 2, "eval_iters": 1, "eval_interval": 2, "lr_decay_iters": 4}
    for name, first, then in (("off", {}, {}), ("on", CHUNKS, CHUNKS), ("begins", {}, CHUNKS), ("ends", CHUNKS, {})):
        drive(argv(save=name, train_iters=2, **common, **first))
        assert ("logits of 24 of a microbatch's 64 tokens at once" in capfd.readouterr().out) == bool(first)
        drive(argv(save=name, train_iters=4, **common, **then))
        noted = "options: --output-layer-chunk-size" in capfd.readouterr().out
        assert noted == (first != then), name
        # 24 fp32 sums in another order, and weights that follow
        assert numbers(Path(name)) == pytest.approx(numbers(Path("off")), rel=1e-5), name
    assert len(losses(Path("on"))) == 4


LAYOUTS: dict[str, dict[str, Any]] = {
    "last stage of two": {"pipeline_model_parallel_size": 2},
    "untied": {"pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": True},
    "sequence parallel": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "untie_embeddings_and_output_weights": True,
    },
    "overlapped": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "untie_embeddings_and_output_weights": True,
    },
    "stored gradients": {"recipe": "fp8_lm_o2", "bf16": True},
}


@pytest.mark.slow
def test_layouts_train_alike(tmp_path: Path) -> None:
    cases = {f"{name} {on}": {**more, **CHUNKS} if on else more for name, more in LAYOUTS.items() for on in (0, 1)}
    # four microbatches, so that a stage has several on their way
    common = {"train_iters": 3, "global_batch_size": 8, "eval_iters": 1, "eval_interval": 3, "no_save": True}
    many_runs(2, [argv(save=name, **common, **more) for name, more in cases.items()], tmp_path)
    assert json.loads((tmp_path / "errors.json").read_text()) == {}
    for name, more in LAYOUTS.items():
        want, got = (numbers(tmp_path / f"{name} {on}") for on in (0, 1))
        # in bf16 the first loss is equal; then weights differ by the rounding of the tied gradient
        assert got == pytest.approx(want, rel=1e-3 if "bf16" in more else 1e-5), name


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"output_layer_chunk_size": 64}, "64 saves no memory: a microbatch has 64 tokens on a rank; give fewer"),
        ({**CHUNKS, "no_gradient_accumulation_fusion": True}, "excludes --no-gradient-accumulation-fusion; leave one"),
        ({**CHUNKS, "grad_reduce_in_bf16": True}, "excludes --grad-reduce-in-bf16; leave one"),
        ({"output_layer_chunk_size": 0}, "--output-layer-chunk-size 0: wants at least 1"),
    ],
)
def test_what_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_run(resolve_model(parse(argv(**more))[0]), 1, gpus=True)


@pytest.mark.parametrize("arch", ["sm90", "cpu"])
def test_the_plan_has_the_logits_of_a_chunk(arch: str) -> None:
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "bf16": True}
    whole, chunk = (
        plan(
            resolve_run(resolve_model(parse(argv(**sizes, **more))[0]), 2, gpus=True), get_recipe("bf16"), 256, 2, arch
        )
        for more in ({}, CHUNKS)
    )
    assert chunk.transient["logits"] == 24 * 128 * (2 if arch == "sm90" else 2 + 8)
    assert whole.transient["logits"] == chunk.transient["logits"] * 64 / 24
    assert {**whole.transient, "logits": 0} == {**chunk.transient, "logits": 0}
