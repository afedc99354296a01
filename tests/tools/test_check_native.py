"""tools/check_native.py on a CPU: the report of right and of wrong products."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowprec.kernels.mx_gemm import reference
from megatron_lowprec.linear.backends.blackwell_mx import dense
from tests.environment import ROOT
from tools import check_native

SMALL = ["--device", "cpu", "--rehearse", "--shapes", "smoke", "--no-steps", "--tokens", "48", "--recipes"]


def report(tmp_path: Path, recipes: str) -> tuple[int, str, dict[str, Any]]:
    code = check_native.main([*SMALL, recipes, "--out", str(tmp_path)])
    written = (tmp_path / "check_native.txt").read_text()
    return code, written, json.loads((tmp_path / "check_native.json").read_text())


def test_right_products_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, record = report(tmp_path, "mxfp8,nvfp4_all")
    assert code == 0
    assert capsys.readouterr().out == text
    assert "cpu: all 8 layers passed, a rehearsal without block-scaled products" in text
    assert re.search(r"mxfp8 +smoke +qkv +9 +0\b", text)  # three products and six operands
    assert [layer["fault"] for layer in record["layers"]] == [""] * 8
    assert record["steps"] is None
    about, _, *table = (tmp_path / "check_native.md").read_text().splitlines()
    assert "commit" in about
    assert [line.split(" | ")[:4] for line in table[2:]] == [
        ["| `mxfp8`", "4", "24", "12"],
        ["| `nvfp4_all`", "4", "24", "12"],
    ]
    assert record["header"]["command"].startswith("python -m tools.check_native --device cpu")


def test_wrong_products_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(*operands: Any, **options: Any) -> torch.Tensor:
        return torch.zeros_like(reference.mx_gemm(*operands, **options))

    monkeypatch.setattr(dense.BlackwellMxGemms, "_product", lambda *_: zeros)
    code, text, record = report(tmp_path, "mxfp8")
    assert code == 1
    assert "cpu: 4 of 4 layers FAILED" in text
    assert "mxfp8, qkv of smoke: fprop [48, 256] over 128 of E4M3 and E4M3 on cpu" in text
    assert all("all of it is 0" in layer["fault"] for layer in record["layers"])


def test_other_gpus_have_nothing_to_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_native.main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "cpu has no block-scaled products to check, only sm100, sm103, sm120 do" in capsys.readouterr().err


def test_unknown_models_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_native.main([*SMALL, "mxfp8", "--shapes", "smoke,foo", "--out", str(tmp_path)]) == 2
    assert "--shapes foo: not in the table, which has " in capsys.readouterr().err


def test_the_script_runs_the_tool() -> None:
    script = (ROOT / "scripts/check_native.sh").read_text()
    assert script.endswith('exec python -W ignore -m tools.check_native "$@"\n')
