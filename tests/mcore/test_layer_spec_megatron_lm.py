"""Layers from ``layer_spec`` under the arguments of Megatron-LM, whose loop they would run in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lowprec import UserError
from tests.mcore.spec_loop import MICROBATCHES, SEED, Loop, expected, tracked

pytestmark = pytest.mark.usefixtures("world", "bounded")


def as_in_megatron_lm(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> SimpleNamespace:
    from megatron_lowprec.mcore import step_tracker
    from megatron_lowprec.mcore.layers import transformer_layer

    batch = {"rampup_batch_size": None, "global_batch_size": 2, "micro_batch_size": 1, "data_parallel_size": 1}
    args = SimpleNamespace(**{"seed": SEED, "calculate_per_token_loss": False, **batch, **arguments})
    for module in (step_tracker, transformer_layer):
        monkeypatch.setattr(module, "megatron_lm_args", lambda: args)
    return args


def test_gradients_histories_follow_the_number_of_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM divides the loss by it, so half as many make the gradients twice as large. Also behind a resume."""
    from megatron_lowprec.mcore import step_tracker

    args = as_in_megatron_lm(monkeypatch, curr_iteration=0)
    found = []
    for later, resumes in ((MICROBATCHES, False), (MICROBATCHES / 2, False), (MICROBATCHES / 2, True)):
        count = [MICROBATCHES, later]
        monkeypatch.setattr(step_tracker, "get_num_microbatches", lambda count=count: count[args.curr_iteration])
        loop = Loop(tracked("fp8_delayed"))
        for args.curr_iteration in range(2):
            if args.curr_iteration and resumes:
                saved, loop = loop.model.state_dict(), Loop(tracked("fp8_delayed"))
                loop.model.load_state_dict(saved)
            loop.run()
        fc1 = loop.model.decoder.layers[0].mlp.linear_fc1.get_extra_state()
        found.append({name: fc1[name] for name in ("input", "grad_output")})
        args.curr_iteration = 0
    same, *others = found
    for halved in others:
        assert torch.equal(same["input"], halved["input"])
        # the first step's entry; the second step's has its own gradients
        assert halved["grad_output"][2] == 2 * same["grad_output"][2] > 0


def test_an_own_loop_with_megatron_lm_s_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Megatron-LM's own loop sets the iteration."""
    as_in_megatron_lm(monkeypatch)
    loop = Loop(tracked("mxfp4_rht_sr"))
    loop.run()
    assert loop.losses == expected("mxfp4_rht_sr")[0][:MICROBATCHES]


def test_an_update_as_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    as_in_megatron_lm(monkeypatch, optimizer_cuda_graph=True)
    with pytest.raises(UserError, match="--optimizer-cuda-graph cannot hold the update under a recipe"):
        tracked("mxfp8")


def test_attention_masks_that_would_not_be_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.enums import AttnBackend

    as_in_megatron_lm(monkeypatch, reset_attention_mask=True)
    with pytest.raises(UserError, match="--reset-attention-mask needs --attention-backend unfused"):
        tracked("mxfp8")
    for name in ("FLASH", "FUSED", "UNFUSED"):  # Megatron-core refuses another choice in one process
        monkeypatch.delenv(f"NVTE_{name}_ATTN", raising=False)
    tracked("mxfp8", attention_backend=AttnBackend.unfused)
