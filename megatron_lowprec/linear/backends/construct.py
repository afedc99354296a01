"""Builds backends by their rows in the table; loads a backend's classes when a layer first resolves to it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_lowprec.linear.backends.grouped_protocol import GroupedBackend
from megatron_lowprec.linear.backends.protocol import GemmBackend, LayerContext
from megatron_lowprec.linear.backends.table import BACKENDS

if TYPE_CHECKING:
    from megatron_lowprec.linear.linear_gemms import LinearGemms

_ROWS = {row.name: row for row in BACKENDS}


def dense(name: str, context: LayerContext) -> GemmBackend:
    """The backend of a row for one layer."""
    backend: GemmBackend = _class(name, _ROWS[name].dense)(context)
    backend.name = name
    return backend


def grouped(name: str, experts: Sequence[LinearGemms]) -> GroupedBackend | None:
    """The backend of a row for the experts of a layer; None if the row runs them one after the other."""
    kind = _ROWS[name].grouped
    found: GroupedBackend | None = None if kind is None else _class(name, kind)(experts, name)
    return found


@cache
def _class(name: str, path: str) -> Any:
    module, _, kind = path.partition(".")
    return getattr(import_module(f"megatron_lowprec.linear.backends.{name}.{module}"), kind)
