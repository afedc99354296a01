"""TransformerEngine's Python part for the tests of this folder; see ``python_part``."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.clients.megatron_lm import NotAvailableError
from tests.te.python_part import imported, obtain

Import = Callable[[str], Any]


@pytest.fixture(scope="module")
def te(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Import]:
    """Imports ``transformer_engine.<name>``, with its environment variables set to what no recipe here means."""
    try:
        site = obtain(tmp_path_factory.mktemp("transformer_engine"))
    except NotAvailableError as why:
        pytest.skip(str(why))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1")
        patch.delenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", raising=False)
        patch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")  # its Python update of amax histories
        patch.setenv("NVTE_TORCH_COMPILE", "0")
        with imported(site):
            yield lambda name: importlib.import_module(f"transformer_engine.{name}")
