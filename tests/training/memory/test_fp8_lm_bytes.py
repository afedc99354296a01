"""Bytes a parameter of FP8-LM's levels: what training holds after the backward pass, and what it sends."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.training import step
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model, resolve_recipe, resolve_run
from megatron_lowprec.training.memory.plan import plan
from tests.launch import fork_ranks
from tests.training.conftest import Drive
from tests.training.helpers import argv

# Wide enough that one-dimensional weights, which keep an fp32 state, are as few as in a real model.
WIDE: dict[str, Any] = {"hidden_size": 256, "num_layers": 2, "bf16": True, "train_iters": 2}
ONE: dict[str, Any] = {"global_batch_size": 2}  # one microbatch
VOCABULARY = 256


def live_storages() -> dict[int, torch.UntypedStorage]:
    """Address -> storage of all tensors of this process; holding it keeps the addresses taken.

    Without subclasses, which have no storage of their own: FP8 weights, and what other tests trace.
    """
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return {storage.data_ptr(): storage for storage in storages}


def held(drive: Drive, monkeypatch: pytest.MonkeyPatch, recipe: str, **options: Any) -> tuple[float, float]:
    """Bytes a parameter before the second update: of the model's weights, and of all other tensors."""
    found: list[tuple[float, float]] = []
    inner, of_other_tests = step.optimizer_step, live_storages()

    def measure(optimizer: Any, *rest: Any) -> Any:
        chunks = optimizer.chained_optimizers[0].model_chunks
        count = sum(weight.numel() for chunk in chunks for weight in chunk.parameters())
        live = {a: storage.nbytes() for a, storage in live_storages().items() if a not in of_other_tests}
        weights = {b.param_data.untyped_storage().data_ptr() for chunk in chunks for b in chunk.buffers}
        working = sum(size for address, size in live.items() if address in weights)
        found.append((working / count, (sum(live.values()) - working) / count))
        return inner(optimizer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(step, "optimizer_step", measure)
        drive(argv(save="out", no_save=True, recipe=recipe, **WIDE | options))
    return found[-1]


# The GEMMs of bf16 have no amax histories and cache no weights, which are not counted here.
@pytest.mark.parametrize(
    ("recipe", "options", "least", "most"),
    [
        ("bf16", ONE | {"use_distributed_optimizer": True}, 16.0, 16.1),
        pytest.param("bf16+fp8_lm_o1", ONE, 13.0, 13.1, marks=pytest.mark.weekly),
        ("bf16+fp8_lm_o2", ONE, 6.0, 6.1),
        ("bf16+fp8_lm_o2", {"recipe_override": "gradients.accumulation=format"}, 6.0, 6.1),
        pytest.param("bf16+fp8_lm_o2", {}, 6.0, 6.1, marks=pytest.mark.weekly),
    ],
)
def test_optimizer_and_gradients_after_the_backward_pass(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, recipe: str, options: dict[str, Any], least: float, most: float
) -> None:
    weights, rest = held(drive, monkeypatch, recipe, **options)
    assert weights == pytest.approx(2.0, rel=0.01)
    assert least <= rest <= most


def test_fp8_weights_need_no_copy(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, rest = held(drive, monkeypatch, "fp8_current+fp8_lm_o3", **ONE)  # without amax histories
    embeddings = (VOCABULARY + 32) * 256
    linear = 2 * 12 * 256**2
    assert weights == pytest.approx((linear + 2 * embeddings) / (linear + embeddings), rel=0.01)
    assert 6.0 <= rest <= 6.1


@pytest.mark.parametrize(("recipe", "weights"), [("fp8_lm_o1", 13.0), ("fp8_lm_o2", 6.0), ("fp8_lm_o3", 6.0)])
def test_the_plan_has_the_same_bytes(recipe: str, weights: float) -> None:
    for batch in (2, 4):
        config, _, _ = parse(argv(recipe=recipe, **WIDE | {"global_batch_size": batch}))
        loaded = load_recipe(recipe)
        config, _ = resolve_recipe(resolve_model(config), loaded, frozenset())
        found = plan(resolve_run(config, 1, gpus=False), loaded, VOCABULARY, 1)
        parts = ("main weights", "moments", "gradients")
        count = found.resident["gradients"]
        assert sum(found.resident[part] for part in parts) == weights * count
        assert found.transient["gradients"] == (4 * 2 * 256 * 1024 if batch == 2 else 4 * count)
        assert found.transient["update"] == 4 * count


@pytest.mark.slow
def test_bytes_on_the_wire(tmp_path: Path) -> None:
    distributed = {"recipe": "fp8_delayed", "use_distributed_optimizer": True}
    cases: dict[str, dict[str, Any]] = {
        "fp32": distributed,
        "bf16": distributed | {"grad_reduce_in_bf16": True},
        "o2": {"recipe": "fp8_lm_o2"},
        "o3": {"recipe": "fp8_lm_o3"},
    }
    common = WIDE | {"hidden_size": 128, "train_iters": 1, "no_save": True}
    lines = [argv(**common | {"save": name} | options) for name, options in cases.items()]
    (tmp_path / "cases.json").write_text(json.dumps(lines))
    fork_ranks(2, ["tests/training/memory/wire_worker.py", "cases.json"], tmp_path)
    sent = dict(zip(cases, json.loads((tmp_path / "wire.json").read_text()), strict=True))
    for name in ("o2", "o3"):
        assert sent[name]["backward"] <= 0.28 * sent["fp32"]["backward"]
        assert sent[name]["backward"] <= 0.55 * sent["bf16"]["backward"]
    assert sum(sent["o3"].values()) <= 0.37 * sum(sent["fp32"].values())
    # the control: the fp32 run sends four bytes a weight, and gathers two
    count = 2 * 12 * 128**2 + (VOCABULARY + 32) * 128
    assert sent["fp32"]["backward"] == pytest.approx(4 * count / 2, rel=0.02)
    assert sent["fp32"]["update"] == pytest.approx(2 * count / 2, rel=0.02)
