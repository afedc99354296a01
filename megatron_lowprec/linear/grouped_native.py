"""FP8 GEMMs of a layer's experts with block scales on tensor cores: one launch per operand and one per product."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_lowprec.kernels.dispatch import fuses, load
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.linear.native_gemms import rule_of
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, QuantSpec

_BLOCK = 128

Operand = tuple[torch.Tensor, torch.Tensor]
"""FP8 codes and fp32 decode scales."""


class GroupedNativeGemms:
    """The three GEMMs of a layer's experts: 1x128 blocks of tokens' features, 128x128 of weights.

    Rows of an expert are padded with zeros to whole blocks, so the casts of one matrix serve all experts: a block has
    entries of one expert only.

    Args:
        experts: each expert's GEMMs, by one recipe.
    """

    def __init__(self, experts: Sequence[LinearGemms]) -> None:
        self._experts = experts

    def gemms(self, weight: torch.Tensor) -> frozenset[str]:
        """GEMMs that the kernels run, with a weight [O, I]: all three, or none."""
        first = self._experts[0]
        if isinstance(weight, Fp8Weight) or not fuses(weight) or any(size % _BLOCK for size in weight.shape):
            return frozenset()
        first.choose_products(weight)
        of_tensors = {tensor: {getattr(first.recipe.gemms[name], tensor) for name in SIDES[tensor]} for tensor in SIDES}
        for tensor, specs in of_tensors.items():
            granularities = [None if spec is None else spec.granularity for spec in specs]
            if granularities != ["128x128" if tensor == "weight" else "1x128"]:
                return frozenset()
        native = all(first.backend(name) is first.native for name in GEMM_OPERANDS)
        return frozenset(GEMM_OPERANDS if native else ())

    def supports(self, rows: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
        """Whether the kernels run the GEMMs on the input or output gradient of all experts, and their weights."""
        if not all(isinstance(gemms, LinearGemms) for gemms in self._experts):  # instrumented
            return False
        alike = all(w.is_contiguous() and w.dtype == rows.dtype for w in weights)
        return alike and rows.shape[0] > 0 and bool(self.gemms(weights[0]))

    def fprop(
        self,
        x_TI: torch.Tensor,
        tokens: Sequence[int],
        weights: Sequence[torch.Tensor],
        update_amax: bool,
        save_input: bool,
    ) -> tuple[torch.Tensor, Operand | None]:
        """``y = x @ w.T`` of each expert's rows, [T, O]; and x for ``wgrad``, from the same read, if asked."""
        x, for_wgrad = self._tokens("input", x_TI, tokens, rowwise=True, columnwise=save_input)
        assert x is not None
        w = self._weights("fprop", weights, update_amax)
        return load("grouped_fp8_gemm").grouped_fp8_gemm(*x, *w, tokens, out_dtype=x_TI.dtype), for_wgrad

    def backward(
        self,
        dy_TO: torch.Tensor,
        x: torch.Tensor | Operand,
        tokens: Sequence[int],
        weights: Sequence[torch.Tensor],
        totals: Sequence[torch.Tensor],
        overwrite: Sequence[bool],
    ) -> torch.Tensor:
        """``dx = dy @ w`` of each expert's rows, [T, I]; adds ``dy.T @ x`` to each total or overwrites it.

        Args:
            x: the input [T, I], or from ``fprop``.
        """
        op = load("grouped_fp8_gemm")
        by_row, by_column = self._tokens("grad_output", dy_TO, tokens, rowwise=True, columnwise=True)
        assert by_row is not None
        assert by_column is not None
        dx: torch.Tensor = op.grouped_fp8_gemm(*by_row, *self._weights("dgrad", weights), tokens, out_dtype=dy_TO.dtype)
        if isinstance(x, torch.Tensor):
            found = self._tokens("input", x, tokens, rowwise=False, columnwise=True)[1]
            assert found is not None
            x = found
        op.grouped_fp8_wgrad_(*by_column, *x, tokens, totals, overwrite=overwrite)
        return dx

    def _tokens(
        self, tensor: str, matrix: torch.Tensor, tokens: Sequence[int], *, rowwise: bool, columnwise: bool
    ) -> tuple[Operand | None, Operand | None]:
        """Rowwise and columnwise operands of all experts, rows padded."""
        padded = load("grouped_fp8_gemm").pad_groups(matrix.contiguous(), tokens)
        cast = load("cast_fp8").cast_fp8(padded, rule_of(self._spec(tensor)), rowwise=rowwise, columnwise=columnwise)
        return (cast[:2] if rowwise else None), (cast[2:4] if columnwise else None)

    def _weights(self, name: str, weights: Sequence[torch.Tensor], store: bool = True) -> Operand:
        """Weights of all experts for a GEMM, [experts, N, K]; from the first expert's cache if that holds them."""
        cache = self._experts[0].weight_cache
        found: Operand | None = cache.get_group(name)
        if found is None:
            experts, columnwise = len(weights), name == "dgrad"
            # one matrix: with whole blocks of rows no block has two experts
            cast = load("cast_fp8").cast_fp8(
                torch.cat(list(weights)), rule_of(self._spec("weight")), rowwise=not columnwise, columnwise=columnwise
            )
            data, scale = cast[2:4] if columnwise else cast[:2]
            if columnwise:
                blocks = data.shape[1] // _BLOCK
                data = data.unflatten(1, (experts, -1)).transpose(0, 1)
                scale = scale[:, :blocks].unflatten(1, (experts, -1)).transpose(0, 1)
            else:
                data, scale = data.unflatten(0, (experts, -1)), scale.unflatten(0, (experts, -1))
            found = data, scale
            if store and cache.holds(name):
                cache.put_group(name, found)
        return found

    def _spec(self, tensor: str) -> QuantSpec:
        spec: QuantSpec = getattr(self._experts[0].recipe.gemms[SIDES[tensor][0]], tensor)
        return spec
