"""TransformerEngine's Python part on a machine without its compiled parts: real recipes, quantizers and references.

The wheel ``transformer-engine`` without extras is Python alone, and its packages load compiled libraries when they are
imported. ``imported`` registers the packages without running their ``__init__``, and stands in for the compiled module
with its enumerations; a call into it fails.
"""

import dataclasses
import enum
import importlib
import importlib.util
import os
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.clients.megatron_lm import NotAvailableError

_PACKAGES = (
    "transformer_engine",
    "transformer_engine.common",
    "transformer_engine.debug",
    "transformer_engine.debug.pytorch",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.custom_recipes",
)
_DTYPES = "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"


def obtain(folder: Path) -> Path:
    """A folder that contains ``transformer_engine``, from the folder or wheel that ``TRANSFORMER_ENGINE`` names.

    Raises:
        NotAvailableError: it names none.
    """
    given = Path(os.environ.get("TRANSFORMER_ENGINE") or "transformer_engine.whl")
    if given.is_dir():
        return given
    if not given.is_file():
        raise NotAvailableError("TRANSFORMER_ENGINE names no wheel of transformer-engine; make test downloads it")
    zipfile.ZipFile(given).extractall(folder)
    return folder


@contextmanager
def imported(site: Path) -> Iterator[None]:
    """Within it, ``transformer_engine`` can be imported from ``site``; afterwards no module of it is left."""
    before = set(sys.modules)
    for name in _PACKAGES:
        _add(name, str(site / name.replace(".", "/")))
    _add("transformer_engine.pytorch.export").is_in_onnx_export_mode = lambda: False  # needs onnxscript otherwise
    sys.modules["transformer_engine.common"].decode_cudnn_version = None  # type: ignore[attr-defined]
    _add_compiled()
    if importlib.util.find_spec("pydantic") is None:
        _add("pydantic", "")
        _add("pydantic.dataclasses").dataclass = dataclasses.dataclass
    importlib.import_module("transformer_engine.pytorch.tensor")  # the first that its packages import
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] in {"transformer_engine", "transformer_engine_torch", "pydantic"}:
                del sys.modules[name]


def _add(name: str, folder: str | None = None) -> Any:
    module = ModuleType(name)
    if folder is not None:
        module.__path__ = [folder]
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    return module


def _add_compiled() -> None:
    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*_: Any, **__: Any) -> None:
            raise NotImplementedError(f"transformer_engine_torch.{name} is compiled")

        return call

    module = _add("transformer_engine_torch")
    module.DType = enum.IntEnum("DType", _DTYPES, start=0)
    module.FP8FwdTensors = enum.IntEnum("FP8FwdTensors", _slots("INPUT", "WEIGHT", "OUTPUT"), start=0)
    module.FP8BwdTensors = enum.IntEnum("FP8BwdTensors", _slots("GRAD_OUTPUT", "GRAD_INPUT"), start=0)
    module.__getattr__ = missing


def _slots(*tensors: str) -> list[str]:
    return [f"GEMM{i}_{name}" if "GRAD" not in name else f"{name}{i}" for i in (1, 2, 3) for name in tensors]
