"""What options make of a new model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lowprec.training import model
from tests.training.conftest import Drive
from tests.training.helpers import argv

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
