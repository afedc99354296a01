"""What options make of a new model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowprec.linear.weight_cache import QuantizedWeightCache
from megatron_lowprec.training import model
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses

POSITIONS = "embedding.position_embeddings.weight"


def test_positions_alone_have_another_deviation(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    original = model._gpt_chunks

    def recording(*arguments: Any) -> list[torch.nn.Module]:
        chunks = original(*arguments)
        seen.append({name: weight.detach().clone() for name, weight in chunks[0].named_parameters()})
        return chunks

    monkeypatch.setattr(model, "_gpt_chunks", recording)
    for changes in ({}, {"position_embedding_init_std": 0.005}):
        drive(argv(train_iters=1, no_save=True, **changes))
    default, scaled = seen
    assert default[POSITIONS].std() == pytest.approx(0.02, rel=0.1)
    torch.testing.assert_close(scaled[POSITIONS], default[POSITIONS] / 4)
    assert [name for name, weight in default.items() if not torch.equal(weight, scaled[name])] == [POSITIONS]


MOVING = [f"{gemm}.weight.history_update=microbatch" for gemm in ("fprop", "dgrad")]


@pytest.mark.parametrize(
    ("recipe", "overrides", "caches"),
    [
        ("mxfp8", [], True),
        ("fp8_delayed", [], True),
        ("fp8_delayed", MOVING, False),  # a microbatch has a scale of its own
    ],
)
def test_weights_can_be_quantized_for_each_microbatch(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, recipe: str, overrides: list[str], caches: bool
) -> None:
    kept = []
    get = QuantizedWeightCache.get

    def recording(self: QuantizedWeightCache, gemm: str, backend: str) -> Any:
        found = get(self, gemm, backend)
        kept.append(found is not None)
        return found

    monkeypatch.setattr(QuantizedWeightCache, "get", recording)
    short: dict[str, Any] = {"recipe": recipe, "bf16": True, "train_iters": 3, "no_save": True, "lr": 0.05}
    changes = [word for each in overrides for word in ("--recipe-override", each)]
    drive([*argv(save="cached", **short), *changes])
    assert any(kept) == caches
    for option in ("no_cache_weights", "save_memory"):
        kept.clear()
        drive([*argv(save=option, **{option: True}, **short), *changes])
        assert not any(kept)
        assert losses(Path(option)) == losses(Path("cached"))
