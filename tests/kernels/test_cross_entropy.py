"""Cross entropy: the reference against float64."""

import pytest
import torch

from megatron_lowprec.kernels.cross_entropy import reference
from tests.kernels.cross_entropy_cases import differences


def test_reference_against_float64() -> None:
    assert differences("cpu", reference)[1] == []


@pytest.mark.parametrize("part", ["maximum", "total", "target"])
def test_faults_are_found(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    sound = reference.logit_sums

    def wrong(*arguments: object) -> reference.LogitSums:
        sums = sound(*arguments)  # type: ignore[arg-type]
        return sums._replace(**{part: getattr(sums, part) * (1 + 1e-4)})

    monkeypatch.setattr(reference, "logit_sums", wrong)
    assert differences("cpu", reference)[1]


def test_a_nan_reaches_the_loss() -> None:
    logits = torch.zeros(2, 8)
    logits[1, 3] = torch.nan
    total = reference.logit_sums(logits, torch.zeros(2, dtype=torch.int64), 0).total
    assert total.isnan().tolist() == [False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_logits_reach_the_loss_on_a_gpu(bad: float) -> None:
    from megatron_lowprec.kernels.cross_entropy import triton

    logits = torch.zeros(2, 5000, device="cuda", dtype=torch.bfloat16)
    logits[1, 4321] = bad
    sums = triton.logit_sums(logits, torch.zeros(2, dtype=torch.int64, device="cuda"), 0)
    loss = sums.total.log() + sums.maximum - sums.target
    assert loss.isfinite().tolist() == [True, False]
