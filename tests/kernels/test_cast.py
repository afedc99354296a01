"""The FP8 cast kernels give the reference's bits: interpreted here, compiled where there is a GPU."""

from types import SimpleNamespace

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
    from megatron_lowprec.kernels.cast_fp8.prologue import prologue_of
    from megatron_lowprec.kernels.cast_fp8.rule import Fp8Rule

    monkeypatch.setattr(tuning, "LARGE_ENOUGH", 0)
    monkeypatch.setattr(triton, "sum_partials", lambda parts, dtype: parts)
    launched: list[object] = []
    for place in (0, -1):  # what two machines find to be the fastest
        monkeypatch.setattr(tuning, "fastest", lambda name, candidates, run, device, place=place: candidates[place])
        kernel = triton._CastKernel(
            Fp8Rule(FORMATS["e4m3"], "tensor"), torch.device("cpu"), True, True, False, sums, "matrix"
        )
        for tiling in kernel._tilings:
            launch = SimpleNamespace(launch=lambda *_, tiling=tiling: launched.append(tiling))
            kernel._specialized[tiling, True] = launch  # type: ignore[assignment]
        kernel.run(prologue_of(torch.zeros(256, 1024, dtype=torch.bfloat16)), torch.ones(1), None)
    assert len(set(launched)) == (1 if sums else 2)
