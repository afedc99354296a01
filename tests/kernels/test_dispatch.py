"""An op has one signature, its reference's; dispatch alone imports the modules of Triton kernels."""

import ast
import inspect
from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest
import torch

import megatron_lowprec
from megatron_lowprec.kernels import dispatch
from megatron_lowprec.quantization.error_stats import error_stats
from megatron_lowprec.quantization.quantizer import quantize
from megatron_lowprec.recipe.schema import QuantSpec

PACKAGE = Path(megatron_lowprec.__file__).parent
KERNELS = PACKAGE / "kernels"
OPS = [path.parent.name for path in sorted(KERNELS.glob("*/triton.py")) if (path.parent / "reference.py").exists()]


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_takes_the_arguments_of_its_reference(op: str) -> None:
    """What a kernel has besides, tiling for measurements, is keyword-only and has a default."""
    pytest.importorskip("triton")
    kernels, reference = (import_module(f"megatron_lowprec.kernels.{op}.{name}") for name in ("triton", "reference"))
    shared = [
        (value, getattr(reference, name))
        for name, value in vars(kernels).items()
        if isinstance(value, FunctionType) and value.__module__ == kernels.__name__ and hasattr(reference, name)
    ]
    assert shared or op in ("hadamard", "philox", "quantize")
    for kernel, function in shared:
        mine = list(inspect.signature(kernel).parameters.values())
        theirs = list(inspect.signature(function).parameters.values())
        assert [(p.name, p.kind, p.default) for p in mine[: len(theirs)]] == [
            (p.name, p.kind, p.default) for p in theirs
        ], kernel
        assert all(p.kind == p.KEYWORD_ONLY and p.default is not p.empty for p in mine[len(theirs) :]), kernel


def test_dispatch_alone_imports_triton_modules() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.is_relative_to(KERNELS):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found += [f"{path.name}: {name}" for name in names if name.startswith("megatron_lowprec.kernels")]
    assert len(found) > 10
    assert [name for name in found if ".triton" in name] == []


def test_a_tensor_on_a_cpu_takes_the_reference() -> None:
    y, bias = torch.randn(3, 4), torch.randn(4)
    amax = torch.zeros(1)
    out = dispatch.bias_gelu(y, bias, amax)
    torch.testing.assert_close(out, torch.nn.functional.gelu(y + bias, approximate="tanh"))
    assert torch.equal(amax, out.abs().amax().view(1))
    assert dispatch.bias_gelu.__name__ == "bias_gelu"


def test_a_fused_tensor_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("megatron_lowprec.kernels.gelu.triton")
    monkeypatch.setattr(dispatch, "fuses", lambda _: True)
    monkeypatch.setattr(triton, "bias_gelu", lambda *args: args)
    assert dispatch.bias_gelu(1, 2, 3) == (1, 2, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("granularity", "columns", "fused"),
    [("1x32", 96, True), ("3x8", 96, True), ("1x4", 96, False), ("1x24", 96, False), ("1x24", 24, True)],
)
def test_statistics_of_an_operand_take_the_kernel_where_a_cell_has_one_scale(
    granularity: str, columns: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("megatron_lowprec.kernels.operand_stats.triton")
    monkeypatch.setattr(dispatch, "fuses", lambda _: True)
    monkeypatch.setattr(triton, "operand_stats", lambda *_: "kernel")
    x = torch.randn(6, columns)
    found = error_stats(x, quantize(x, QuantSpec("e4m3", granularity)))
    assert isinstance(found, str) == fused
