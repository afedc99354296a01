"""The FP8 cast kernels give the reference's bits: interpreted here, compiled where there is a GPU."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lowprec.formats import FORMATS
from tests.kernels.cast_cases import Case, differences, gpu_cases, scale_differences, small_cases
from tests.kernels.interpreted import assert_no_differences


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


@pytest.mark.parametrize(("sums", "rows"), [(True, [128, 64]), (False, [128, 128])])
def test_deterministic_sums_have_the_order_of_the_first_tiling(
    monkeypatch: pytest.MonkeyPatch, sums: bool, rows: list[int]
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from megatron_lowprec.kernels import tuning
    from megatron_lowprec.kernels.cast import triton
    from megatron_lowprec.kernels.cast.rule import Fp8Rule
    from megatron_lowprec.kernels.cast.source import source_of

    monkeypatch.setattr(tuning, "LARGE_ENOUGH", 0)
    monkeypatch.setattr(triton, "sum_partials", lambda parts, dtype: parts)
    monkeypatch.setattr(tuning, "fastest", lambda name, candidates, run, device: candidates[-1])
    rule = Fp8Rule(FORMATS["e4m3"], "tensor")
    kernel = triton._CastKernel(rule, torch.device("cpu"), True, True, False, sums, "matrix")
    launched: list[int] = []
    for tiling in kernel._tilings:
        launch = SimpleNamespace(launch=lambda *_, rows=tiling.rows: launched.append(rows))
        kernel._specialized[tiling, True] = launch  # type: ignore[assignment]
    for deterministic in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda chosen=deterministic: chosen)
        kernel.run(source_of(torch.zeros(256, 256, dtype=torch.bfloat16)), torch.ones(1), None)
    assert launched == rows
