"""Kernels compile for a GPU that is not there."""

import json
from pathlib import Path

import pytest

from tests.kernels.compiling import printed_by


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "parts", "kernel"),
    [
        ("90", ["casts", "around_linears"], "layernorm.triton._norm_forward_kernel"),
        # the kernel of the line below, where it writes no codes or rounds to other formats
        pytest.param("90", ["mx_operands"], "quantize.triton_kernel._mx_kernel", marks=pytest.mark.weekly),
        ("100", ["mx_codes"], "quantize.triton_kernel._mx_kernel"),  # which has instructions of its own there
    ],
)
def test_kernels_compile_for_hopper_and_blackwell(tmp_path: Path, arch: str, parts: list[str], kernel: str) -> None:
    """Each part for one of both, with one tiling; ``make test-compile`` compiles all, weekly, and GPUs run all."""
    printed = printed_by(tmp_path, "tests.kernels.compile_only", arch, *parts)
    assert ("cast_fp8.triton._cast_kernel" in printed) == ("casts" in parts)
    assert kernel in printed


@pytest.mark.slow
@pytest.mark.weekly  # of a benchmark
def test_instructions_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    chosen = ["--formats", "e2m1", "--kinds", "rht64", "--directions", "rows", "--out", str(file)]
    printed_by(tmp_path / "cache", "tools.bench.instructions", *chosen)
    rows = json.loads(file.read_text())["rows"]
    assert {row["direction"] for row in rows} == {"rows"}
    for row in rows:
        # log2(64) additions, signs, two scales and two additions of the rounding, at least
        assert row["fp32"] >= 6 + 1 + 2 + 2
        assert row["integer"] + row["multiply"] + row["fp32"] + row["memory"] <= row["total"]
