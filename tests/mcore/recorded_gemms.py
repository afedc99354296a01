"""What the GEMMs of layers are given, and quantize, is kept; and one of them is computed again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_lowprec.linear.backends.emulated import dense as emulated
from megatron_lowprec.linear.layer_tensors import GradOutput
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.random_stream import RngStep


class Recorder:
    """Keeps every GEMM's matrices, contracted dimension last, and quantized operands."""

    def __init__(self) -> None:
        self.calls: list[tuple[LinearId, str, torch.Tensor, torch.Tensor, RngStep, list[Any]]] = []
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> "Recorder":
        self._record("forward", "fprop", lambda x, w: (x, w))
        self._record("dgrad", "dgrad", lambda dy, w: (_matrix(dy), w.t()))
        self._record("wgrad", "wgrad", lambda dy, x: (_matrix(dy).t(), x.t()))
        product = emulated.gemm

        def gemm(a: Any, b: Any, **options: Any) -> Any:
            alpha = torch.as_tensor(options["alpha"])  # the product of both tensor scales
            self.calls[-1][-1].extend(((a, options["a_scale"], alpha), (b, options["b_scale"], alpha)))
            return product(a, b, **options)

        self._patch.setattr(emulated, "gemm", gemm)
        return self

    def __exit__(self, *_: Any) -> None:
        self._patch.undo()

    def _record(
        self, method: str, gemm: str, matrices: Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        compute = getattr(LinearGemms, method)

        def recorded(linear_gemms: Any, first: Any, second: Any, rng_step: Any, *args: Any, **options: Any) -> Any:
            a, b = matrices(first, second)
            self.calls.append((linear_gemms.linear_id, gemm, a.clone(), b.clone(), rng_step, []))
            return compute(linear_gemms, first, second, rng_step, *args, **options)

        self._patch.setattr(LinearGemms, method, recorded)


def _matrix(dy: torch.Tensor | GradOutput) -> torch.Tensor:
    return dy.matrix if isinstance(dy, GradOutput) else dy


def multiply(linear_gemms: LinearGemms, gemm: str, a: torch.Tensor, b: torch.Tensor, rng_step: RngStep) -> None:
    """One GEMM of matrices as ``Recorder`` keeps them."""
    if gemm == "fprop":
        linear_gemms.fprop(a, b, rng_step)
    elif gemm == "dgrad":
        linear_gemms.dgrad(a, b.t(), rng_step)
    else:
        linear_gemms.wgrad(a.t(), b.t(), rng_step)
