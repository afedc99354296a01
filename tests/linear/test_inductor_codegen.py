"""Casts that Inductor launches: what its code for a GPU calls, and that the machine code is eager mode's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.weekly import also_weekly


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "options"),
    also_weekly(
        [("fp8_current", ""), ("fp8_current", "dynamic"), ("fp8_rowwise", "bias")],
        [],
    ),
)
def test_inductor_launches_the_casts(recipe: str, options: str, tmp_path: Path) -> None:
    """Each cast and each scaled product is in the generated code, and no operator of ours.

    Kernels of ours compile for sm_90 from that code, to the instructions of eager mode's, and run as many programs with
    the same sizes. So codes and scales are equal.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    found = _codegen(tmp_path, recipe, *filter(None, [options]))
    assert found["casts"] == 2 * (2 + 2)  # of two layers: x and w, then dy in both directions and w
    assert found["operators"] == []
    assert found["products"] == 2 * 3
    if options != "dynamic":  # whose kernels have bounds checks, and sizes are symbols
        assert found["other_code"] == []
        assert found["same_sizes"]
    assert found["host_tensors"] == 0  # a CUDA graph would repeat their values
    assert found["ambiguous"] == []  # Inductor writes one value of a name


@pytest.mark.slow
@pytest.mark.weekly
def test_scales_of_blocks_are_cast_by_operators(tmp_path: Path) -> None:
    """Inductor's options would contract their multiply-adds, which eager mode's forbid."""
    pytest.importorskip("triton", reason="triton is not installed")
    found = _codegen(tmp_path, "fp8_blockwise")
    assert found["casts"] == 0
    assert found["operators"] == ["cast", "product"]  # whose products Inductor could not tell by their sizes


def _codegen(folder: Path, *arguments: str) -> dict[str, Any]:
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    tuned = {"MEGATRON_LOWPREC_TUNE": "0", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.linear.inductor_codegen", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, **caches, **tuned},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
