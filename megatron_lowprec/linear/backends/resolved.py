"""The backends of one layer's GEMMs, resolved once for a device and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue
from megatron_lowprec.kernels.dispatch import arch_of
from megatron_lowprec.linear.backends.protocol import GemmBackend, LayerContext, check_dtype
from megatron_lowprec.linear.backends.table import BACKENDS, FALLBACK, ROWS, Emulate, resolve
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.quantization.tensor import QuantizedTensor


class Resolved(NamedTuple):
    """The backends of one layer.

    Attributes:
        gemms: GEMM -> its backend.
        one_cast: tensor -> the backend whose cast may quantize it for both GEMMs that use it: one backend, one spec,
            and among the backend's ``one_cast``; else None.
    """

    gemms: dict[str, GemmBackend]
    one_cast: dict[str, GemmBackend | None]


class LayerBackends:
    """Resolves the backends of one layer; a backend is built when a GEMM first resolves to it.

    Args:
        context: of the layer.
        emulate: native backends to leave out.

    Attributes:
        resolved: for tokens; until ``resolve`` that of an expert without tokens.
        one_spec: for each tensor, whether both GEMMs that use it quantize it alike.
        context: of the layer.
    """

    def __init__(self, context: LayerContext, emulate: Emulate) -> None:
        self.context, self._emulate, self._built = context, emulate, dict[str, GemmBackend]()
        gemms = context.recipe.gemms
        specs = {tensor: [getattr(gemms[gemm], tensor) for gemm in sides] for tensor, sides in SIDES.items()}
        self.one_spec = {tensor: by_row == by_column for tensor, (by_row, by_column) in specs.items()}
        self._without_tokens = self._of(dict.fromkeys(gemms, FALLBACK))
        self.resolved = self._without_tokens
        self._resolved_for: tuple[torch.device, torch.dtype] | None = None

    def resolve(self, w_OI: torch.Tensor) -> None:
        """Select the backend of each GEMM by the table, once for a device and dtype; UserError for fp16."""
        key = (w_OI.device, w_OI.dtype)
        if self._resolved_for != key:
            recipe = self.context.recipe
            check_dtype(recipe, w_OI.dtype, self.context.layer_amax.linear_id.path)
            dtype = str(w_OI.dtype).removeprefix("torch.")
            target = Target(arch_of(w_OI.device), w_OI.shape[1], w_OI.shape[0], dtype)
            self.resolved = self._of(resolve(recipe, target, self._emulate))
            self._resolved_for = key

    def of(self, tokens: torch.Tensor | CastPrologue | QuantizedTensor) -> Resolved:
        """The backends for x or dy; an expert without tokens takes the table's last row."""
        return self.resolved if tokens.shape[0] else self._without_tokens

    def built(self, name: str) -> GemmBackend:
        """The backend of a row of the table, whether or not a GEMM resolves to it."""
        if name not in self._built:
            backend: GemmBackend = ROWS[name].load(ROWS[name].dense)(self.context)
            backend.name, self._built[name] = name, backend
        return self._built[name]

    def wrap(self, wrap: Callable[[GemmBackend], GemmBackend]) -> dict[str, GemmBackend]:
        """Replace all backends by wrappers of them; returns those by name."""
        own = {row.name: self.built(row.name) for row in BACKENDS}
        self._use({name: wrap(backend) for name, backend in own.items()})
        return own

    @contextmanager
    def wrapped(self, wrap: Callable[[GemmBackend], GemmBackend]) -> Iterator[None]:
        """Temporarily replace all backends by wrappers of them."""
        own = self.wrap(wrap)
        try:
            yield
        finally:
            self._use(own)

    def _use(self, built: dict[str, GemmBackend]) -> None:
        self._built = built
        self.resolved, self._without_tokens = (
            self._of({gemm: backend.name for gemm, backend in each.gemms.items()})
            for each in (self.resolved, self._without_tokens)
        )

    def _of(self, names: dict[str, str]) -> Resolved:
        """The backends by the names of the GEMMs' rows."""
        gemms, one_cast = {gemm: self.built(name) for gemm, name in names.items()}, dict[str, GemmBackend | None]()
        for tensor, (by_row, by_column) in SIDES.items():
            backend = gemms[by_row]
            together = self.one_spec[tensor] and gemms[by_column] is backend and tensor in backend.one_cast
            one_cast[tensor] = backend if together else None
        return Resolved(gemms, one_cast)
