"""Gradients of a whole GPT under a recipe, along the fp32 gradients: an unbiased recipe keeps their length.

An error with a direction, such as a saturated operand or a sum in too few bits, shortens them. Noise does not.
"""

from statistics import mean

import pytest
import torch

from tests.mcore.fused_model import DEVICE, SEQUENCE, VOCABULARY, build
from tests.mcore.one_process import one_process

SAMPLES = 64
UNBIASED = ("bf16", "fp8_blockwise", "mxfp8", "mxfp4_sr", "mxfp4_rht_sr", "fp8_mxfp4_rht_sr")
BIASED = {"mxfp8_ocp": 0.99, "mxfp4_rht": 0.95, "mxfp4": 0.95}  # to nearest, with scales rounded down: they saturate


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """fp64 gradients of the linear layers' weights."""
    tokens = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE + 1), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    positions = torch.arange(SEQUENCE, device=DEVICE).expand(SAMPLES, -1)
    model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean().backward()
    return {
        name: weight.grad.double()
        for name, weight in model.named_parameters()
        if "linear_" in name and name.endswith("weight") and weight.grad is not None
    }


def lengths() -> dict[str, float]:
    """Recipe -> length of its gradient along the fp32 gradient of the same weights, the mean over linear layers."""
    with one_process():
        plain = build("gpt", True, hidden_size=256)
        for weight in plain.parameters():
            weight.data.copy_(weight.data.bfloat16())  # so that all models have the same
        want, found = gradients(plain), {}
        for recipe in (*UNBIASED, *BIASED):
            model = build("gpt", True, recipe, torch.bfloat16, hidden_size=256)
            model.load_state_dict(plain.state_dict(), strict=False)
            got = gradients(model)
            assert got.keys() == want.keys()
            assert len(got) == 8
            found[recipe] = mean(float((got[name] * want[name]).sum() / want[name].square().sum()) for name in want)
    return found


def check() -> None:
    found = lengths()
    assert {recipe: found[recipe] for recipe in UNBIASED} == pytest.approx(dict.fromkeys(UNBIASED, 1.0), abs=0.01)
    assert all(found[recipe] < limit for recipe, limit in BIASED.items()), found


@pytest.mark.skipif(DEVICE != "cpu", reason="the GPU has a test of its own")
def test_on_a_cpu() -> None:
    check()


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check()
