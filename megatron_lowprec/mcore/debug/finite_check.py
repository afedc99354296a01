"""Finds the first tensor with NaN or Inf, by repeating a forward and backward pass with checks.

Checked are every operand and product of every GEMM, and the output and output gradient of every other leaf module. A
step without the check has no overhead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_lowprec.linear.layer_tensors import GradOutput, SavedForBackward
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.mcore.debug.finite import all_finite
from megatron_lowprec.mcore.debug.instrumented import InstrumentedGemms, instrumented
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecLinearMixin
from megatron_lowprec.mcore.rng_step import current_rng_step
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.schema import GEMM_OPERANDS

_PRODUCT = "product of finite operands"


@dataclass(frozen=True, order=True)
class Finding:
    """A tensor that is not finite; the least of several is the one that may have caused the others.

    Microbatches are independent, a backward follows its forward, and ``depth`` counts pipeline stages in the order of
    the pass. On one stage ``order`` counts checked tensors. ``gemm`` is the name for ``--rerun-in-bf16``, empty outside
    of quantized GEMMs.
    """

    microbatch: int
    backward: bool
    depth: tuple[int, int]
    order: int
    rank: int
    what: str
    gemm: str
    nans: int
    infs: int
    values: int

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.nans:,} NaN and {self.infs:,} Inf among {self.values:,} values, "
            f"on rank {self.rank} in microbatch {self.microbatch}"
        )


class FiniteCheck:
    """Context manager that checks the tensors computed by this rank's model chunks.

    Attributes:
        first: the first finding of this rank, or None.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.first: Finding | None = None
        self._chunks, self._order = chunks, 0
        self._undo = ExitStack()

    def __enter__(self) -> FiniteCheck:
        for number, chunk in enumerate(self._chunks):
            for name, module in _named_parts(chunk):
                if isinstance(module, LowPrecLinearMixin):
                    self._undo.enter_context(instrumented(module, _CheckedGemms(module.bound_gemms, number, self)))
                else:
                    self._undo.callback(module.register_forward_hook(self._hook(name, number)).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def inspect(self, what: str, tensor: Any, chunk: int, microbatch: int, backward: bool, gemm: str = "") -> None:
        """Record the tensor if it is not finite and precedes the first finding so far."""
        self._order += 1
        if not torch.is_tensor(tensor) or not tensor.is_floating_point() or bool(all_finite(tensor)):
            return
        depth = (chunk, parallel_state.get_pipeline_model_parallel_rank())
        finding = Finding(
            microbatch,
            backward,
            (-depth[0], -depth[1]) if backward else depth,
            self._order,
            torch.distributed.get_rank(),
            what,
            gemm,
            int(tensor.isnan().sum()),
            int(tensor.isinf().sum()),
            tensor.numel(),
        )
        if self.first is None or finding < self.first:
            self.first = finding

    def _hook(self, name: str, chunk: int) -> Any:
        def inspect_output(module: nn.Module, inputs: Any, output: Any) -> None:
            microbatch = current_rng_step().microbatch
            for tensor in output if isinstance(output, tuple) else (output,):
                self.inspect(f"{name}, output", tensor, chunk, microbatch, backward=False)
                if torch.is_tensor(tensor) and tensor.requires_grad:
                    what = f"{name}, gradient of its output"
                    tensor.register_hook(
                        lambda grad, what=what: self.inspect(what, grad, chunk, microbatch, backward=True)
                    )

        return inspect_output


class _CheckedGemms(InstrumentedGemms):
    """A layer's GEMMs; checks every operand and product."""

    def __init__(self, inner: LinearGemms, chunk: int, check: FiniteCheck) -> None:
        super().__init__(inner)
        self._path, self._chunk, self._check = inner.linear_id.path, chunk, check

    def forward(
        self, x_TI: torch.Tensor, w_OI: torch.Tensor, rng_step: RngStep, *rest: Any, **options: Any
    ) -> tuple[torch.Tensor, SavedForBackward]:
        self._check_operands("fprop", x_TI, w_OI, rng_step)
        bias = options["bias_O"] if "bias_O" in options else rest[1] if len(rest) > 1 else None
        self._check_tensor("fprop", "bias", bias, rng_step, in_gemm=False)
        y, saved = self._inner.forward(x_TI, w_OI, rng_step, *rest, **options)
        self._check_tensor("fprop", _PRODUCT, y, rng_step)
        return y, saved

    def dgrad(self, dy: GradOutput, w_OI: torch.Tensor, rng_step: RngStep, *rest: Any) -> torch.Tensor:
        self._check_operands("dgrad", dy.matrix, w_OI, rng_step)
        dx: torch.Tensor = self._inner.dgrad(dy, w_OI, rng_step, *rest)
        self._check_tensor("dgrad", _PRODUCT, dx, rng_step)
        return dx

    def wgrad(
        self, dy: GradOutput, x: torch.Tensor | QuantizedTensor, rng_step: RngStep, **options: Any
    ) -> torch.Tensor:
        # The forward pass already checked x before quantization.
        second = x.columnwise_scale if isinstance(x, QuantizedTensor) else x
        self._check_operands("wgrad", dy.matrix, second, rng_step)
        dw: torch.Tensor = self._inner.wgrad(dy, x, rng_step, **options)
        self._check_tensor("wgrad", _PRODUCT, dw, rng_step)
        return dw

    def _check_operands(self, name: str, first: torch.Tensor, second: torch.Tensor | None, rng_step: RngStep) -> None:
        for operand, tensor in zip(GEMM_OPERANDS[name], (first, second), strict=True):
            self._check_tensor(name, f"operand {operand}", tensor, rng_step)

    def _check_tensor(
        self, name: str, what: str, tensor: torch.Tensor | None, rng_step: RngStep, in_gemm: bool = True
    ) -> None:
        quantized = in_gemm and self._inner.recipe.gemms[name].quantized
        gemm = f"{self._path.split()[0]}.{name}" if quantized else ""
        told = f"{self._path}, {name}, {what}"
        self._check.inspect(told, tensor, self._chunk, rng_step.microbatch, name != "fprop", gemm)


def _named_parts(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Leaf modules of a chunk and its linear layers, named by global layer number."""
    inside: set[nn.Module] = set()
    for layer in chunk.modules():
        if isinstance(layer, TransformerLayer):
            for name, module in layer.named_modules():
                inside.add(module)
                if _is_part(module):
                    yield f"layers.{layer.layer_number}.{name}", module
    for name, module in chunk.named_modules():
        if module not in inside and _is_part(module):
            yield name.removeprefix("module.").removeprefix("module.").removeprefix("decoder."), module


def _is_part(module: nn.Module) -> bool:
    return isinstance(module, LowPrecLinearMixin) or next(module.children(), None) is None
