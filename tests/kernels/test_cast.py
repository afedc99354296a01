"""The FP8 cast kernels give the reference's bits: interpreted here, compiled where there is a GPU."""

import pytest
import torch

from megatron_lowprec.formats import FORMATS
from tests.kernels.cast_cases import Case, differences, gpu_cases, scale_differences, small_cases
from tests.kernels.interpreted import assert_no_differences


@pytest.mark.slow
def test_interpreted_kernels_equal_the_reference() -> None:
    assert f"{len(small_cases())} cases compared" in assert_no_differences("tests.kernels.cast_cases")


@pytest.mark.gpu
@pytest.mark.parametrize("case", gpu_cases(), ids=str)
def test_compiled_kernels_equal_the_reference(case: Case) -> None:
    assert differences(case, "cuda") == []


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_scales_of_every_bf16_amax_equal_the_reference(fmt: str) -> None:
    assert scale_differences(fmt, "cuda") == []


@pytest.mark.parametrize("sums", [True, False])
def test_a_cast_that_sums_has_one_tiling_on_every_machine(monkeypatch: pytest.MonkeyPatch, sums: bool) -> None:
    """Ranks that hold copies of a bias would else move them apart: a sum's order is the tiling's."""
    pytest.importorskip("triton", reason="triton is not installed")
    from megatron_lowprec.kernels import tuning
    from megatron_lowprec.kernels.cast_fp8 import triton
    from megatron_lowprec.kernels.cast_fp8.rule import Fp8Rule
    from megatron_lowprec.kernels.launch import Specialized

    monkeypatch.setattr(tuning, "LARGE_ENOUGH", 0)
    monkeypatch.setattr(triton, "sum_partials", lambda parts, dtype: parts)
    launched: list[tuple[int, int]] = []
    monkeypatch.setattr(
        Specialized, "launch", lambda self, *_: launched.append((self._constants["BM"], self._constants["BN"]))
    )
    x, amax = torch.zeros(256, 1024, dtype=torch.bfloat16), torch.ones(1)
    for place in (0, -1):  # what two machines find to be the fastest
        monkeypatch.setattr(tuning, "fastest", lambda name, candidates, run, device, place=place: candidates[place])
        triton.cast_fp8(x, Fp8Rule(FORMATS["e4m3"], "tensor"), rowwise=True, columnwise=True, amax=amax, sums=sums)
    assert len(launched) == 2
    assert len(set(launched)) == (1 if sums else 2)
