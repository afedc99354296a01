"""Imports of TransformerEngine, with one line for the user where it is missing or too old."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.te.translation import INSTALL, TESTED_VERSION

_DISTRIBUTION = "transformer_engine"
_OLDEST = tuple(map(int, TESTED_VERSION.split(".")[:2]))  # older ones lack fields and quantizers


def import_te(module: str) -> Any:
    """The module ``transformer_engine.<module>``.

    Raises:
        UserError: it cannot be imported, with the reason; it is too old.
    """
    try:
        found = version(_DISTRIBUTION)
    except PackageNotFoundError:
        found = TESTED_VERSION  # on the path without metadata
    if tuple(map(int, found.split(".")[:2])) < _OLDEST:
        raise UserError(
            f"TransformerEngine {found} is installed, but recipes are translated to {TESTED_VERSION}: {INSTALL}"
        )
    try:
        return import_module(f"transformer_engine.{module}")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise UserError(
            f"transformer_engine.{module} cannot be imported: {' '.join(str(error).split())[:300]}; this project "
            f"translates to TransformerEngine {TESTED_VERSION}: {INSTALL}"
        ) from None
