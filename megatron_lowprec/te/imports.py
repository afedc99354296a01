"""Imports of TransformerEngine, with one line for the user where it is missing."""

from importlib import import_module
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.te.translation import INSTALL, TESTED_VERSION


def import_te(module: str) -> Any:
    """The module ``transformer_engine.<module>``.

    Raises:
        UserError: it cannot be imported, with the reason.
    """
    try:
        return import_module(f"transformer_engine.{module}")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise UserError(
            f"transformer_engine.{module} cannot be imported: {' '.join(str(error).split())[:300]}; this project "
            f"translates to TransformerEngine {TESTED_VERSION}: {INSTALL}"
        ) from None
