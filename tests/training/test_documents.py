"""--eod-mask-loss, --reset-position-ids and --reset-attention-mask: documents of a sample are independent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

from megatron_lowprec.training import loop
from megatron_lowprec.training.data.batches import Batches, document_mask
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses

RESET: dict[str, Any] = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
EOD = 7


@pytest.mark.parametrize("ends", [[], [0], [9], [3, 4, 8]], ids=str)
def test_the_mask_is_megatron_core_s(ends: list[int]) -> None:
    tokens = torch.zeros(2, 10, dtype=torch.int64)
    tokens[1, ends] = EOD
    for row, found in zip(tokens, document_mask(tokens, EOD), strict=True):
        want, _, _ = _get_ltor_masks_and_position_ids(row, EOD, False, True, False, True)
        assert torch.equal(found, want)


@pytest.mark.parametrize(
    "model",
    [{}, {"attention_backend": "local"}, {"position_embedding_type": "rope", "recompute_granularity": "selective"}],
    ids=["learned positions", "Megatron-core's attention", "rope"],
)
def test_a_document_is_computed_as_if_it_were_alone(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    def check(run: loop.Run) -> None:
        split, chunk = run.data["train"], run.trainer.chunks[0].eval()
        assert split is not None
        batch = next(Batches(split, 0, run.config, run.device))
        tokens, positions = batch["tokens"], batch["position_ids"]
        assert tokens is not None
        assert positions is not None
        # as documents of 11, 14 and 7 tokens
        tokens[0, [10, 24]] = split.eod
        ids, visible = positions[0].clone(), document_mask(tokens, split.eod)
        for start, end in ((0, 11), (11, 25), (25, 32)):
            ids[start:end] = torch.arange(end - start)
        with torch.no_grad():
            whole = chunk(tokens[:1], ids[None], visible[:1])
            for start, end in ((0, 11), (11, 25), (25, 32)):
                alone = chunk(tokens[:1, start:end], torch.arange(end - start)[None], None)
                torch.testing.assert_close(whole[:, start:end], alone, atol=1e-5, rtol=1e-5)
            joined = chunk(tokens[:1], ids[None], None)
            assert (joined[:, 11:] - whole[:, 11:]).abs().max() > 1e-3

    monkeypatch.setattr(loop, "train", check)
    drive(argv(save="out", no_save=True, init_method_std=0.2, use_cpu_initialization=True, **RESET, **model))


def test_batches_follow_the_documents_of_the_data(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mock data have its token here and there; a step trains on what is left, and differs from one without."""
    seen: list[dict[str, Any]] = []
    original = Batches.__next__

    def recording(self: Batches) -> dict[str, Any]:
        seen.append(original(self))
        return seen[-1]

    monkeypatch.setattr(Batches, "__next__", recording)
    drive(argv(save="reset", no_save=True, global_batch_size=16, **RESET))
    with_ends = 0
    for batch in seen:
        for tokens, positions, mask, hidden in zip(
            *(batch[name] for name in ("tokens", "position_ids", "loss_mask", "attention_mask")), strict=True
        ):
            ends = (tokens == 255).nonzero()[:, 0].tolist()
            with_ends += bool(ends)
            assert (mask == 0).nonzero()[:, 0].tolist() == ends
            starts = [0, *(end + 1 for end in ends if end < 31)]
            assert (positions == 0).nonzero()[:, 0].tolist() == starts
            assert torch.equal((~hidden[0]).sum(-1), positions + 1)
    assert with_ends > 2
    monkeypatch.undo()


def test_each_flag_changes_the_loss(drive: Drive) -> None:
    for name in ("none", *RESET):
        flags = {} if name == "none" else {name: True}
        drive(argv(save=name, no_save=True, train_iters=1, global_batch_size=16, **flags))
    assert len({tuple(losses(Path(name))) for name in ("none", *RESET)}) == 4
