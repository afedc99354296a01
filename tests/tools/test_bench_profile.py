"""tools.bench profile: a trace by kind of kernel, and the floors of a step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import megatron_lowprec
from megatron_lowprec.errors import UserError
from tools.bench.__main__ import build_parser, main
from tools.bench.commands import profile
from tools.bench.shapes import MODELS

# name, start and duration in microseconds; NCCL is alone for 30 of its 50
KERNELS: tuple[tuple[str, float, float], ...] = (
    ("nvjet_qqtst_128x256_128x6_2x1_v_bz_coopB_TNT", 0.0, 400.0),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", 400.0, 100.0),
    ("_cast_kernel", 500.0, 40.0),
    ("_swiglu_forward_kernel", 560.0, 20.0),
    ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 570.0, 50.0),
    ("_norm_forward_kernel", 610.0, 20.0),
    ("Memcpy DtoD (Device -> Device)", 630.0, 10.0),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", 700.0, 50.0),
    ("_adam_update_kernel", 750.0, 50.0),
    ("_rope_kernel", 800.0, 10.0),
    ("_logit_sums_kernel", 810.0, 10.0),
    ("something_else", 820.0, 10.0),
)
KINDS = {
    "GEMMs": 400.0,
    "attention": 100.0,
    "casts": 40.0,
    "SwiGLU, GELU": 20.0,
    "NCCL": 50.0,
    "norms": 20.0,
    "copies": 10.0,
    "elementwise": 50.0,
    "update": 50.0,
    "rope": 10.0,
    "loss": 10.0,
    "other": 10.0,
    "NCCL, exposed": 30.0,
    "idle": 830.0 - 740.0 - 10.0,  # two streams share 20 microseconds; gaps of 20 and 60
    "step": 830.0,
}

_KERNEL = re.compile(r"^@triton\.jit(?:\([^)]*\))?\ndef (\w+_kernel)\(", re.MULTILINE)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "gpu_memcpy" if name.startswith("Memcpy") else "kernel", "name": name, "ts": ts, "dur": dur}
        for name, ts, dur in reversed(KERNELS)
    ]
    events += [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9e9}, {"ph": "M", "name": "process"}]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_trace_by_kind(trace: Path) -> None:
    rows = {row["kind"]: row for row in profile.table(profile.kernels_of(trace), {"GEMMs": 0.2, "casts": 0.1})}
    assert {kind: row["ms"] for kind, row in rows.items()} == pytest.approx({k: us / 1e3 for k, us in KINDS.items()})
    assert rows["GEMMs"]["kernels"] == [{"name": KERNELS[0][0], "ms": pytest.approx(0.4), "launches": 1}]
    assert rows["step"]["launches"] == len(KERNELS)
    assert rows["step"]["floor_ms"] == pytest.approx(0.3)
    assert rows["idle"]["share"] == pytest.approx(80 / 830)


def test_every_kernel_of_the_package_has_a_name_and_a_kind() -> None:
    sources = (Path(megatron_lowprec.__file__).parent / "kernels").rglob("*.py")
    names = [name for source in sources for name in _KERNEL.findall(source.read_text())]
    assert len(names) == len(set(names)) > 40
    assert [name for name in names if profile.kind_of(name) == "other"] == []


def test_from_the_command_line(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    words = ["profile", "--device", "cpu", "--shapes", "8b", "--recipes", "fp8_current", "--trace", str(trace)]
    assert main([*words, "--out", str(out)]) == 0
    (table,) = json.loads(out.read_text())["tables"]
    assert {row["kind"] for row in table["rows"]} == KINDS.keys()
    assert {row["recipe"] for row in table["rows"]} == {"fp8_current"}


def test_floors_of_8b() -> None:
    """Four microbatches of 8192 tokens on each of four GPUs, by hand from Llama 3's published sizes."""
    args = build_parser().parse_args(["profile", "--tflops", "1000,2000", "--bandwidth", "4"])
    plain, native = (profile.floors(MODELS["8b"], recipe, args) for recipe in ("bf16", "fp8_current"))
    tokens, weights = 4 * 8192, 32 * 4096 * (6144 + 4096 + 3 * 14336)
    head = 6 * tokens * 4096 * 128255 / 1e15 * 1e3
    assert plain["GEMMs"] == pytest.approx(6 * tokens * weights / 1e15 * 1e3 + head)
    assert native["GEMMs"] == pytest.approx(6 * tokens * weights / 2e15 * 1e3 + head)
    assert plain["attention"] == native["attention"] == pytest.approx(6 * tokens * 32 * 4096 * 8192 / 1e15 * 1e3)
    assert plain["SwiGLU, GELU"] == pytest.approx(16 * tokens * 32 * 14336 / 4e12 * 1e3)
    assert "casts" not in plain
    width = 32 * (4096 + 6144 + 4096 + 4096 + 4096 + 28672 + 14336 + 4096)
    assert native["casts"] == pytest.approx(4 * (tokens * width + weights) / 4e12 * 1e3)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    for text, words in (("{", "must be a Chrome trace"), ('{"traceEvents": []}', "has no kernel")):
        path.write_text(text)
        with pytest.raises(UserError, match=words):
            profile.kernels_of(path)
    args = build_parser().parse_args(["profile", "--trace", str(path)])
    with pytest.raises(UserError, match="is of one recipe"):
        profile.run(args, None, type("Silent", (), {"note": lambda *_: None})())  # type: ignore[arg-type]
