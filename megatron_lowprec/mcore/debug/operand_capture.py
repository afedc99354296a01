"""Copies of the operands of chosen linear layers in one step's first microbatch, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

from megatron_lowprec.linear.capture_file import Capture, RankOf
from megatron_lowprec.linear.layer_tensors import GradOutput, SavedForBackward
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.mcore.debug.instrumented import InstrumentedGemms, instrumented
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecLinearMixin
from megatron_lowprec.quantization.random_stream import RngStep


class OperandCapture:
    """Context manager that copies x, w and dy of this rank's layers that match a glob.

    Args:
        chunks: this rank's model chunks.
        globs: matched against ``LinearId.path``.
        seed: the run's seed.
    """

    def __init__(self, chunks: Sequence[nn.Module], globs: Sequence[str], seed: int) -> None:
        self._chunks, self._globs, self._seed = chunks, globs, seed
        self._undo = ExitStack()
        self._layers: list[tuple[LowPrecLinearMixin, _CapturedGemms]] = []

    def __enter__(self) -> OperandCapture:
        for chunk in self._chunks:
            for module in chunk.modules():
                if isinstance(module, LowPrecLinearMixin):
                    inner = module.bound_gemms
                    if any(fnmatchcase(inner.linear_id.path, glob) for glob in self._globs):
                        captured = _CapturedGemms(inner)
                        self._layers.append((module, captured))
                        self._undo.enter_context(instrumented(module, captured))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def found(self) -> list[Capture]:
        """Captures of this rank, in the order of its layers; without layers that had no tokens or no backward pass."""
        captures = []
        for module, gemms in self._layers:
            if gemms.tensors.keys() == {"x", "w", "dy"} and len(gemms.tensors["x"]):
                linear_id: Any = gemms.linear_id
                captures.append(
                    Capture(
                        **gemms.tensors,
                        recipe=gemms.recipe,
                        linear_id=linear_id,
                        iteration=gemms.step + 1,
                        seed=self._seed,
                        amax_in_effect=gemms.amax_in_effect,
                        tensor_parallel=RankOf(module.tp_group.rank(), module.tp_group.size()),
                        data_parallel=_data_parallel(expert=linear_id.expert >= 0),
                    )
                )
        return captures


class _CapturedGemms(InstrumentedGemms):
    """A layer's GEMMs; copies their operands in the first microbatch."""

    def __init__(self, inner: LinearGemms) -> None:
        super().__init__(inner)
        self.tensors: dict[str, torch.Tensor] = {}
        self.amax_in_effect: dict[str, float] = {}
        self.step = 0

    def forward(
        self,
        x_TI: torch.Tensor,
        w_OI: torch.Tensor,
        rng_step: RngStep,
        update_amax: bool = True,
        *rest: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, SavedForBackward]:
        # neither an evaluation nor the first pass of an activation recomputation updates the amax
        if update_amax and not rng_step.microbatch:
            self.step = rng_step.step
            self.tensors |= {"x": _on_host(x_TI), "w": _on_host(w_OI)}
            self.amax_in_effect = {
                tensor: float(history.in_effect[slot]) for tensor, (history, slot) in self._inner.histories.items()
            }
        return self._inner.forward(x_TI, w_OI, rng_step, update_amax, *rest, **options)

    def grad_output(self, dy_TO: torch.Tensor, rng_step: RngStep, **options: Any) -> GradOutput:
        if not rng_step.microbatch:
            self.tensors["dy"] = _on_host(dy_TO)
        return self._inner.grad_output(dy_TO, rng_step, **options)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _data_parallel(expert: bool) -> RankOf:
    """This rank's position among the ranks with other tokens and replicas of the same weights."""
    if expert:
        group = parallel_state.get_expert_data_parallel_group()
    else:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return RankOf(group.rank(), group.size())
