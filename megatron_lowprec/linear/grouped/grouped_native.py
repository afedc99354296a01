"""FP8 GEMMs of a layer's experts on tensor cores: a few launches per operand and one per product."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from megatron_lowprec.kernels.dispatch import load, transpose_groups
from megatron_lowprec.linear.grouped.grouped_backend import GroupedBackend
from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.linear.native_gemms import rule_of
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, QuantSpec

_BLOCK = 128
_BLOCKS = {"input": "1x128", "weight": "128x128", "grad_output": "1x128"}

Operand = tuple[torch.Tensor, torch.Tensor]
"""FP8 codes and fp32 decode scales."""
Weights = tuple[Sequence[torch.Tensor], torch.Tensor]
"""FP8 codes of each expert, and fp32 decode scales of all."""


class GroupedNativeGemms(GroupedBackend):
    """The three GEMMs of a layer's experts, with scales per tensor, row, or block: 1x128 of tokens, 128x128 of weights.

    Rows of an expert are padded with zeros to whole blocks of 128. With block scales the casts of one matrix then serve
    all experts: a block has entries of one expert only.
    """

    def fprop(
        self,
        x_TI: torch.Tensor | QuantizedTensor,
        tokens: Sequence[int],
        weights: Sequence[torch.Tensor],
        update_amax: bool,
        save_input: bool,
    ) -> tuple[torch.Tensor, Operand | None]:
        """``y = x @ w.T`` of each expert's rows, [T, O]; and x for ``backward``, if one cast serves both."""
        x: Operand | None
        for_wgrad: Operand | None
        if isinstance(x_TI, QuantizedTensor):
            x, for_wgrad = self._padded_codes(x_TI, tokens), None
        else:
            both = save_input and self._one_spec("input") and "wgrad" in self.gemms(weights[0])
            x, for_wgrad = self._tokens("input", x_TI, tokens, rowwise=True, columnwise=both, update_amax=update_amax)
        assert x is not None
        w = self._weights("fprop", weights, update_amax)
        return self._product("fprop", x, w, tokens, x_TI.dtype), for_wgrad

    def grad_output(
        self,
        dy_TO: torch.Tensor,
        tokens: Sequence[int],
        codes: QuantizedTensor | None,
        update_amax: bool,
        gemms: Collection[str],
    ) -> tuple[Operand | None, Operand | None]:
        """dy for ``dgrad`` and for ``wgrad``, as far as they are among ``gemms``; ``codes`` of its rows, if known."""
        dgrad, wgrad = "dgrad" in gemms, "wgrad" in gemms
        by_row = by_column = None
        if wgrad or codes is None:
            by_row, by_column = self._tokens(
                "grad_output",
                dy_TO,
                tokens,
                rowwise=dgrad and codes is None,
                columnwise=wgrad,
                update_amax=update_amax,
            )
        if dgrad and codes is not None:
            by_row = self._padded_codes(codes, tokens)
        return by_row, by_column

    def dgrad(
        self,
        dy: Operand,
        tokens: Sequence[int],
        weights: Sequence[torch.Tensor],
        out_dtype: torch.dtype,
        update_amax: bool,
    ) -> torch.Tensor:
        """``dx = dy @ w`` of each expert's rows, [T, I]."""
        return self._product("dgrad", dy, self._weights("dgrad", weights, update_amax), tokens, out_dtype)

    def wgrad(
        self,
        dy: Operand,
        x: torch.Tensor | Operand,
        tokens: Sequence[int],
        totals: Sequence[torch.Tensor],
        overwrite: Sequence[bool],
        update_amax: bool,
    ) -> None:
        """Adds ``dy.T @ x`` of each expert's rows to its total [O, I], or overwrites it.

        Args:
            x: the input [T, I], or from ``fprop``.
        """
        if isinstance(x, torch.Tensor):
            update_amax = update_amax and not self._one_spec("input")  # else the forward pass has recorded it
            found = self._tokens("input", x, tokens, rowwise=False, columnwise=True, update_amax=update_amax)[1]
            assert found is not None
            x = found
        load("grouped_fp8_gemm").grouped_fp8_wgrad_(
            *dy,
            *x,
            tokens,
            totals,
            granularity=self._spec("grad_output", columnwise=True).granularity,
            overwrite=overwrite,
            fast_accumulation=self._experts[0].native.fast_accumulation["wgrad"],
        )

    def _supports(self, name: str, weight: torch.Tensor) -> bool:
        first = self._experts[0]
        specs = {tensor: getattr(first.recipe.gemms[name], tensor) for tensor in GEMM_OPERANDS[name]}
        found = {tensor: None if spec is None else spec.granularity for tensor, spec in specs.items()}
        blocks = {tensor: _BLOCKS[tensor] for tensor in specs}
        known = found in (dict.fromkeys(specs, "tensor"), dict.fromkeys(specs, "row"))
        known = known or (found == blocks and not any(size % _BLOCK for size in weight.shape))
        one_cast = name == "fprop" or self._one_spec("grad_output")
        return known and one_cast and first.backend(name) is first.native

    def _product(
        self, name: str, rows: Operand, weights: Weights, tokens: Sequence[int], out_dtype: torch.dtype
    ) -> torch.Tensor:
        product: torch.Tensor = load("grouped_fp8_gemm").grouped_fp8_gemm(
            *rows,
            *weights,
            tokens,
            granularity=self._spec("input").granularity if name == "fprop" else self._spec("grad_output").granularity,
            out_dtype=out_dtype,
            fast_accumulation=self._experts[0].native.fast_accumulation[name],
        )
        return product

    def _padded_codes(self, x: QuantizedTensor, tokens: Sequence[int]) -> Operand:
        """Codes and scales of all experts' rows, padded by zeros as ``_tokens`` pads them."""
        data, scale = x.rowwise()
        assert scale is not None
        pad_groups = load("grouped_fp8_gemm").pad_groups
        data = pad_groups(data.view(torch.uint8), tokens).view(data.dtype)
        return data, pad_groups(scale, tokens).t().contiguous().t()

    def _tokens(
        self,
        tensor: str,
        matrix: torch.Tensor,
        tokens: Sequence[int],
        *,
        rowwise: bool,
        columnwise: bool,
        update_amax: bool = True,
    ) -> tuple[Operand | None, Operand | None]:
        """Rowwise and columnwise operands of all experts, rows padded."""
        spec, matrix = self._spec(tensor, columnwise=not rowwise), matrix.contiguous()
        experts = matrix.split(list(tokens))
        if spec.granularity == "tensor":
            return self._cast(tensor, experts, rowwise, columnwise, update_amax)
        pad_groups = load("grouped_fp8_gemm").pad_groups
        if spec.granularity == "row":
            by_row = self._cast_rows(tensor, pad_groups(matrix, tokens)) if rowwise else None
            return by_row, self._cast_columns(tensor, experts) if columnwise else None
        padded = pad_groups(matrix, tokens)
        cast = load("cast_fp8").cast_fp8(padded, rule_of(spec), rowwise=rowwise, columnwise=columnwise)
        return (cast[:2] if rowwise else None), (cast[2:4] if columnwise else None)

    def _weights(self, name: str, weights: Sequence[torch.Tensor], update_amax: bool = True) -> Weights:
        """Weights of all experts for a GEMM, [N, K] each; from the first expert's cache if that holds them."""
        cache, columnwise = self._experts[0].weight_cache, name == "dgrad"
        primary = [weight for weight in weights if isinstance(weight, Fp8Weight)]
        if primary and update_amax and primary[0].spec.scaling == "delayed":
            self._record_amax(primary)
        found: Weights | None = cache.get_group(name)
        if found is None:
            if primary:
                found = _primary_weights(primary, columnwise)
            elif self._spec("weight", columnwise).granularity == "128x128":
                data, scale = self._weight_blocks(weights, columnwise)
                found = data.unbind(), scale
            else:
                data, scale = self._weight_tensors(weights, columnwise, update_amax)
                found = data.unbind(), scale
            if update_amax and cache.holds(name):
                cache.put_group(name, found)
        return found

    def _record_amax(self, weights: Sequence[Fp8Weight]) -> None:
        """As ``AmaxHistory.update_amax``, of FP8 primary weights that no cast reads."""
        histories = [gemms.histories["weight"] for gemms in self._experts]
        newest = [history.cells(slot)[1] for history, slot in histories]
        amax = torch.cat([weight.main_amax for weight in weights]).nan_to_num(nan=torch.inf, posinf=torch.inf)
        torch._foreach_maximum_(newest, amax.split(1))

    def _weight_tensors(self, weights: Sequence[torch.Tensor], columnwise: bool, update_amax: bool) -> Operand:
        """With a scale per expert or row; padding adds rows that no product has, or columns beyond K."""
        experts, rows = len(weights), weights[0].shape[0]
        if self._spec("weight", columnwise).granularity == "row" and not columnwise:
            data, scale = self._cast_rows("weight", torch.cat(list(weights)))
            return data.unflatten(0, (experts, -1)), scale.view(experts, -1)
        if self._spec("weight", columnwise).granularity == "row":
            data, scale = self._cast_columns("weight", weights)
        else:
            operand = self._cast("weight", weights, not columnwise, columnwise, update_amax)[columnwise]
            assert operand is not None
            data, scale = operand
        if columnwise:
            return data.unflatten(1, (experts, -1)).transpose(0, 1)[:, :, :rows], scale
        return data.unflatten(0, (experts, -1))[:, :rows], scale

    def _weight_blocks(self, weights: Sequence[torch.Tensor], columnwise: bool) -> Operand:
        """With 128x128 blocks, cast as one matrix: with whole blocks of rows no block has two experts."""
        rule = rule_of(self._spec("weight", columnwise))
        cast = load("cast_fp8").cast_fp8(torch.cat(list(weights)), rule, rowwise=not columnwise, columnwise=columnwise)
        data, scale = cast[2:4] if columnwise else cast[:2]
        if columnwise:
            blocks = data.shape[1] // _BLOCK
            data = data.unflatten(1, (len(weights), -1)).transpose(0, 1)
            return data, scale[:, :blocks].unflatten(1, (len(weights), -1)).transpose(0, 1)
        return data.unflatten(0, (len(weights), -1)), scale.unflatten(0, (len(weights), -1))

    def _cast_rows(self, tensor: str, matrix: torch.Tensor) -> Operand:
        """Codes and scales of rows, which are of one expert each."""
        casts = load("cast_fp8")
        amax = casts.amax_of(matrix, vectors=True)
        reduce = self._experts[0].native.reductions[tensor, False]
        if reduce is not None:
            amax[: matrix.shape[0]] = reduce(amax[: matrix.shape[0]])
        cast = casts.cast_fp8(matrix, rule_of(self._spec(tensor)), rowwise=True, columnwise=False, amax=amax)
        return cast.rowwise_data, cast.rowwise_scale

    def _cast_columns(self, tensor: str, sources: Sequence[torch.Tensor]) -> Operand:
        """Columnwise codes, with a scale for each column of each expert."""
        op, spec = load("grouped_cast_fp8"), self._spec(tensor, columnwise=True)
        amax = op.amax_of_groups(sources, columns=True)
        reduce = self._experts[0].native.reductions[tensor, True]
        amax = (amax if reduce is None else reduce(amax)).unbind()
        cast = op.cast_fp8_groups(sources, rule_of(spec), amax=amax, rowwise=False, columnwise=True)
        return cast.columnwise_data, cast.scale

    def _cast(
        self, tensor: str, sources: Sequence[torch.Tensor], rowwise: bool, columnwise: bool, update_amax: bool
    ) -> tuple[Operand | None, Operand | None]:
        """Rowwise and columnwise codes of each expert's tensor, with a scale each."""
        spec, op, observed = self._spec(tensor, columnwise=not rowwise), load("grouped_cast_fp8"), None
        if spec.scaling == "delayed":
            histories = [gemms.histories[tensor] for gemms in self._experts]
            amax, newest = zip(*(history.cells(slot) for history, slot in histories), strict=True)
            observed = newest if update_amax else None
        else:
            found = op.amax_of_groups(sources)
            reduce = self._experts[0].native.reductions[tensor, not rowwise]
            amax = (found if reduce is None else reduce(found)).split(1)
        cast = op.cast_fp8_groups(
            sources, rule_of(spec), amax=amax, observed=observed, rowwise=rowwise, columnwise=columnwise
        )
        by_row = None if cast.rowwise_data is None else (cast.rowwise_data, cast.scale)
        return by_row, None if cast.columnwise_data is None else (cast.columnwise_data, cast.scale)

    def _one_spec(self, tensor: str) -> bool:
        return self._spec(tensor) == self._spec(tensor, columnwise=True)

    def _spec(self, tensor: str, columnwise: bool = False) -> QuantSpec:
        spec: QuantSpec = getattr(self._experts[0].recipe.gemms[SIDES[tensor][columnwise]], tensor)
        return spec


def _primary_weights(weights: Sequence[Fp8Weight], columnwise: bool) -> Weights:
    """Codes and scales of ``Fp8Weight.quantized``: for fprop the stored codes, for dgrad a transposed copy of all."""
    scales = [weight.decode_scale for weight in weights]
    scale = torch.cat(scales) if weights[0].spec.block is None else torch.stack(scales)
    if not columnwise:
        return [weight.elements() for weight in weights], scale
    codes = transpose_groups([weight.elements() for weight in weights])
    return codes.unbind(), scale if scale.dim() == 1 else scale.transpose(1, 2).contiguous()
