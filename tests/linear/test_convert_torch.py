"""Converted models under torch's recomputation and autocast."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron_lowprec import KeepBf16, convert, get_recipe
from tests.linear.conversions import CONVERTIBLE, EACH_TIME, gradients
from tests.linear.tiny_models import build, train
from tests.weekly import also_weekly


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", ["fp8_delayed", "mxfp4_rht_sr", "fp8_mxfp4_rht_sr"])
def test_recomputation_changes_no_bit(name: str, how: str) -> None:
    found = []
    for each in ("", how):
        model = convert(build(recompute=each), name)
        found.append((train(model, 3), gradients(model)))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


@pytest.mark.parametrize("name", also_weekly(CONVERTIBLE, EACH_TIME))
def test_autocast_is_the_layer_in_bf16(name: str, generator: torch.Generator) -> None:
    """The GEMMs themselves are outside autocast, also in a backward pass within it."""
    narrow, wide = (nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)) for _ in range(2))
    wide.load_state_dict(narrow.state_dict())
    recipe = replace(get_recipe(name), keep_bf16=KeepBf16())
    convert(narrow.bfloat16(), recipe)
    convert(wide, recipe)
    x, dy = torch.randn(64, 128, generator=generator), torch.randn(64, 128, generator=generator).bfloat16()
    torch.manual_seed(0)
    y = narrow(x.bfloat16())
    y.backward(dy)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        got = wide(x)
        got.backward(dy)
    assert torch.equal(got, y)
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad.float())
