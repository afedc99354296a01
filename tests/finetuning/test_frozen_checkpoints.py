"""Frozen layers in ``torch.distributed.checkpoint``: in this process, and by ``checkpoint_worker.py`` on two."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from tests.checks import assert_none_failed
from tests.finetuning import checkpoint_worker
from tests.finetuning.frozen_layers import each_recipe, equal, held, layer_of, passes
from tests.launch import fork_ranks
from tests.weekly import checks_of


@pytest.mark.parametrize("storage", [False, True])
@each_recipe
def test_model_state_dicts_have_every_key(name: str, storage: bool) -> None:
    """torch looks up each key as an attribute: of codes, their format, amaxes and draws."""
    options = {"storage": layer_of("mxfp8").linear_gemms.recipe.fprop.weight} if storage else {}
    model, other = (nn.Sequential(held(name, **options)) for _ in range(2))
    passes(model[0])
    want = model.state_dict()
    assert "0.weight_spec" in want
    for full in (False, True):
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=full))
        assert state.keys() == want.keys()
        assert all(torch.equal(state[key], want[key]) for key in want)
        set_model_state_dict(other, state, options=StateDictOptions(full_state_dict=full))
        assert equal([list(other.state_dict().values())], [list(want.values())])
    assert equal(passes(other[0]), passes(model[0]))


def test_a_part_of_a_full_state_dict_keeps_the_amaxes() -> None:
    """torch adds the codes that it lacks, those of the layer itself, but not the amaxes."""
    model, options = nn.Sequential(held("fp8_delayed")), StateDictOptions(full_state_dict=True, strict=False)
    passes(model[0])
    want = {key: value.clone() for key, value in model.state_dict().items()}
    bias = torch.ones_like(want["0.bias"])
    set_model_state_dict(model, {"0.bias": bias}, options=options)
    got = model.state_dict()
    assert [key for key in want if not torch.equal(got[key], want[key])] == ["0.bias"]
    assert torch.equal(got["0.bias"], bias)


@pytest.mark.slow
def test_all_checks_on_two_ranks(weekly: bool, tmp_path: Path) -> None:
    names, out = checks_of(checkpoint_worker.CHECKS, checkpoint_worker.WEEKLY, weekly), tmp_path / "results.json"
    fork_ranks(2, ["-m", "tests.finetuning.checkpoint_worker", str(out), *names])
    assert_none_failed(out, names)
