"""No autograd function of the package can be differentiated twice without a word."""

from importlib import import_module
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

import megatron_lowprec
from megatron_lowprec import UserError
from megatron_lowprec.mcore import cpu_compat

PACKAGE = Path(megatron_lowprec.__file__).parent
MODULES = [
    ".".join(("megatron_lowprec", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in sorted(PACKAGE.rglob("*.py"))
    if "(torch.autograd.Function):" in path.read_text()
]


def test_each_refuses_a_gradient_to_differentiate_and_forward_mode() -> None:
    cpu_compat.install()
    for module in MODULES:
        import_module(module)
    functions = [
        function
        for function in torch.autograd.Function.__subclasses__()
        if function.__module__.startswith("megatron_lowprec.")
    ]
    assert len(functions) >= 15
    for function in functions:
        with torch.enable_grad(), pytest.raises(UserError, match="create_graph=True reached"):
            function.backward(MagicMock(), torch.ones(1))
        with pytest.raises(UserError, match="forward-mode differentiation reached"):
            function.jvp(MagicMock(), torch.ones(1))
