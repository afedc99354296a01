"""Matrices of a group, and the counts of their rows that tables of launches contain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch


@lru_cache(maxsize=256)
def units_of(rows: tuple[int, ...], size: int = 1) -> tuple[np.ndarray, np.ndarray, int]:
    """Units of ``size`` rows, the last may be cut: int64 [groups] of each group and before it; and of all groups."""
    units = -(-np.array(rows, dtype=np.int64) // size)
    before = units.cumsum() - units
    for found in (units, before):
        found.flags.writeable = False
    return units, before, int(units.sum())


def addresses_of(tensors: Sequence[torch.Tensor] | torch.Tensor) -> np.ndarray:
    """int64 [groups]: the address of each tensor, or of each index of one's first dimension."""
    if isinstance(tensors, Matrices):
        return tensors.addresses
    if isinstance(tensors, torch.Tensor):
        return tensors.data_ptr() + np.arange(tensors.shape[0]) * (tensors.stride(0) * tensors.element_size())
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """x, contiguous and from a multiple of 16 bytes on, as kernels of groups read it; a copy if it is not."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


class Matrices(Sequence[torch.Tensor]):
    """Matrices [M, N] of one N: tensors of their own, or parts of one tensor, which are made when read.

    Launches take only their addresses.

    Args:
        of: the matrices; or one tensor: [groups, M, N], or with ``rows`` [T, N], contiguous.
        rows: rows of each matrix in [T, N]; their sum is T.

    Attributes:
        columns: N.
        dtype, device: of all.
    """

    def __init__(self, of: Sequence[torch.Tensor] | torch.Tensor, rows: Sequence[int] | None = None) -> None:
        self._whole = of if isinstance(of, torch.Tensor) else None
        self._parts = () if isinstance(of, torch.Tensor) else tuple(of)
        self._split = None if rows is None else tuple(rows)
        first = of if isinstance(of, torch.Tensor) else of[0]
        self.columns, self.dtype, self.device = first.shape[-1], first.dtype, first.device

    @staticmethod
    def of(matrices: Sequence[torch.Tensor] | torch.Tensor) -> Matrices:
        """The same; without effect on ``Matrices``."""
        return matrices if isinstance(matrices, Matrices) else Matrices(matrices)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that hold them: one, or each matrix."""
        return self._parts if self._whole is None else (self._whole,)

    @property
    def kinds(self) -> Sequence[torch.Tensor]:
        """Matrices with all dtypes and strides that occur: parts of one tensor are alike."""
        return self._parts if self._whole is None else (self[0],)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """M of each."""
        if self._split is not None:
            return self._split
        if self._whole is not None:
            return (self._whole.shape[1],) * self._whole.shape[0]
        return tuple(part.shape[0] for part in self._parts)

    @cached_property
    def addresses(self) -> np.ndarray:
        """int64 [groups], in bytes."""
        if self._split is None or self._whole is None:
            return addresses_of(self._parts if self._whole is None else self._whole)
        return self._whole.data_ptr() + units_of(self._split)[1] * (self.columns * self._whole.element_size())

    def joined(self) -> torch.Tensor:
        """The rows of all, one after the other."""
        if self._whole is None:
            return torch.cat(self._parts)
        return self._whole.flatten(0, 1) if self._split is None else self._whole

    def transposed(self) -> Matrices:
        """Transposed views; not of parts of [T, N]."""
        assert self._split is None
        return Matrices([part.t() for part in self._parts] if self._whole is None else self._whole.mT)

    def __len__(self) -> int:
        if self._whole is None:
            return len(self._parts)
        return self._whole.shape[0] if self._split is None else len(self._split)

    def __getitem__(self, i: Any) -> Any:
        if self._whole is None:
            return self._parts[i]
        if self._split is None and not isinstance(i, slice):
            return self._whole[i]
        return tuple(self)[i]

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self._whole is None:
            return iter(self._parts)
        return iter(self._whole.unbind() if self._split is None else self._whole.split(self._split))
