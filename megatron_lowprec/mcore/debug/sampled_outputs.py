"""Error of GEMM outputs on sampled rows, against the product of the unquantized operands."""

from __future__ import annotations

from typing import Any

import torch

from megatron_lowprec.linear.layer_tensors import GradOutput, SavedForBackward
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.mcore.debug.instrumented import InstrumentedGemms
from megatron_lowprec.quantization.error_stats import COUNTS, output_stats
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor

SAMPLED = 64


class RowSample:
    """Up to SAMPLED indices of a dimension, drawn without replacement from the run's seed; the same in every step."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn: dict[tuple[int, torch.device], torch.Tensor] = {}

    def of(self, size: int, device: torch.device) -> torch.Tensor:
        """int64 [min(size, SAMPLED)], in ascending order."""
        if (size, device) not in self._drawn:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(self._seed))
            self._drawn[size, device] = order[:SAMPLED].sort().values.to(device)
        return self._drawn[size, device]


class SampledGemms(InstrumentedGemms):
    """A layer's GEMMs; measures outputs of the quantized ones in the first microbatch.

    Outputs of fprop (without its bias) and of dgrad are sampled in tokens. wgrad's are sampled in both dimensions, so
    that only SAMPLED columns of x stay in memory until the backward pass.

    Attributes:
        stats: GEMM -> ``output_stats`` of this rank's output, before any reduction over tensor-parallel ranks; zeros
            if it was not computed, as for an expert without tokens.
    """

    def __init__(self, inner: LinearGemms, sample: RowSample, device: torch.device) -> None:
        super().__init__(inner)
        self._unmeasured = {name for name, gemm in inner.recipe.gemms.items() if gemm.quantized}
        zeros = torch.zeros(COUNTS, dtype=torch.float64, device=device)
        self.stats = dict.fromkeys(sorted(self._unmeasured), zeros)
        self._sample = sample
        self._x_columns: torch.Tensor | None = None

    def forward(
        self,
        x_TI: torch.Tensor,
        w_OI: torch.Tensor,
        rng_step: RngStep,
        update_amax: bool = True,
        bias_O: torch.Tensor | None = None,
        *rest: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, SavedForBackward]:
        y, saved = self._inner.forward(x_TI, w_OI, rng_step, update_amax, bias_O, *rest, **options)
        if self._measures("fprop", x_TI, rng_step):
            rows = self._sample.of(len(x_TI), x_TI.device)
            product = y[rows] if bias_O is None else y[rows].float() - bias_O
            self._measure("fprop", x_TI[rows].float() @ w_OI.float().t(), product)
        if self._measures("wgrad", x_TI, rng_step):
            self._x_columns = x_TI[:, self._sample.of(x_TI.shape[1], x_TI.device)]
        return y, saved

    def dgrad(self, dy: GradOutput, w_OI: torch.Tensor, rng_step: RngStep, *rest: Any) -> torch.Tensor:
        dx = self._inner.dgrad(dy, w_OI, rng_step, *rest)
        if self._measures("dgrad", dy.matrix, rng_step):
            rows = self._sample.of(len(dx), dx.device)
            self._measure("dgrad", dy.matrix[rows].float() @ w_OI.float(), dx[rows])
        return dx

    def wgrad(
        self, dy: GradOutput, x: torch.Tensor | QuantizedTensor, rng_step: RngStep, **options: Any
    ) -> torch.Tensor:
        dw = self._inner.wgrad(dy, x, rng_step, **options)
        if self._measures("wgrad", dy.matrix, rng_step) and self._x_columns is not None:
            rows, columns = (self._sample.of(size, dw.device) for size in dw.shape)
            # dw may be main_grad, which was zero before the first microbatch
            self._measure("wgrad", dy.matrix[:, rows].float().t() @ self._x_columns.float(), dw[rows][:, columns])
            self._x_columns = None
        return dw

    def _measures(self, gemm: str, tokens: torch.Tensor, rng_step: RngStep) -> bool:
        """An activation recomputation computes an output again, and an expert may get no tokens."""
        return gemm in self._unmeasured and not rng_step.microbatch and len(tokens) > 0

    def _measure(self, gemm: str, exact: torch.Tensor, output: torch.Tensor) -> None:
        self._unmeasured.remove(gemm)
        self.stats[gemm] = output_stats(exact, output)
