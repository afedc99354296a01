"""Layers under a recipe without the driver: what it would have refused before is refused here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megatron_lowprec import KeepBf16, UserError, get_recipe
from megatron_lowprec.mcore.runtime import bind_recipe
from megatron_lowprec.training import loop
from tests.training.conftest import Drive
from tests.training.helpers import LLAMA, argv


@pytest.fixture
def with_chunks(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Calls a function with the chunks of a bf16 model, its process groups being there."""

    def call(work: Callable[[Any], object], **changes: Any) -> None:
        monkeypatch.setattr(loop, "train", lambda run: work(run.trainer.chunks))
        drive(argv(no_save=True, **changes))

    return call


def test_sizes_that_no_block_divides(with_chunks: Callable[..., None]) -> None:
    mxfp8 = get_recipe("mxfp8")

    def refused(chunks: Any) -> None:
        with pytest.raises(UserError, match=r"fprop of layers\.1\.self_attention\.\w+ has .* 80 input features"):
            bind_recipe(chunks, mxfp8, num_layers=2, seed=1)
        kept = replace(mxfp8, keep_bf16=KeepBf16(names=("*",)))
        assert len(bind_recipe(chunks, kept, num_layers=2, seed=1).kept) == 8

    with_chunks(refused, hidden_size=80, num_layers=2)


def test_halves_of_a_gated_layer(with_chunks: Callable[..., None]) -> None:
    def refused(chunks: Any) -> None:
        with pytest.raises(UserError, match=r"dgrad of layers\.1\.mlp\.linear_fc1 has .* 48 output features"):
            bind_recipe(chunks, get_recipe("mxfp4"), num_layers=2, seed=1)

    # 96 rows of weight are a multiple of 32, each half's 48 are not
    with_chunks(refused, **{**LLAMA, "hidden_size": 64, "ffn_hidden_size": 48})
