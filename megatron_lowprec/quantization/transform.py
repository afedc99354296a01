"""Hadamard transforms of a layer's GEMMs at an RNG step; both operands of a GEMM share one draw of signs."""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch.nn.functional import pad

from megatron_lowprec.kernels.dispatch import load
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.quantization.device_rng_step import capturing, device_rng_step, refuse_capture
from megatron_lowprec.quantization.random_stream import RandomStream, RngStep
from megatron_lowprec.recipe.schema import HadamardSpec


class Transform:
    """Hadamard transform of a GEMM at one RNG step.

    ``stream`` gives the random signs; None for those of ``spec``. ``rng_step=None`` takes the stream's own.
    """

    def __init__(self, spec: HadamardSpec, stream: RandomStream | None = None, rng_step: RngStep | None = None) -> None:
        self.spec, self.block, self._rng_step = spec, spec.block, rng_step
        self.stream = None if spec.fixed_signs is not None else stream
        self._scaled: torch.Tensor | None = None
        self._drawn_with: Transform | None = None

    def draw_with(self, other: "Transform") -> None:
        """Draw the signs of both transforms in one launch."""
        if self.block == other.block and self.stream is not None and other.stream is not None:
            self._drawn_with, other._drawn_with = other, self

    def signs(self, device: torch.device) -> torch.Tensor:
        """fp32 [block] of +1 and -1."""
        if self.stream is None:
            return _fixed_signs(self.spec, device)
        refuse_capture("a random Hadamard transform runs")
        stream = self.stream if self._rng_step is None else self.stream.at(self._rng_step)
        return stream.signs(self.block, device)

    def scaled_signs(self, device: torch.device) -> torch.Tensor:
        """fp32 [block] of signs times 1/sqrt(block), for the fused kernel; on a GPU."""
        if self._scaled is None or self._scaled.device != device:  # the layer may have moved
            self._draw(device)
        assert self._scaled is not None
        return self._scaled

    def _draw(self, device: torch.device) -> None:
        if self.stream is None:
            self._scaled = _fixed_signs(self.spec, device, self.block**-0.5)
            return
        both = [self] if self._drawn_with is None else [self, self._drawn_with]
        keys = tuple(Key.of(one.stream.key) for one in both if one.stream is not None)
        rng_step = self.stream.rng_step if self._rng_step is None else self._rng_step
        drawn = load("hadamard").scaled_signs(keys, device_rng_step(rng_step, device), self.block)
        for one, signs in zip(both, drawn, strict=True):
            one._scaled = signs

    def apply(self, matrix: torch.Tensor) -> torch.Tensor:
        """Transform [R, K] along K in fp32, zero-padded to whole blocks; the zeros change no scale and no product.

        Entries are then rounded to the matrix's dtype if ``spec.output`` is ``"operand"``.
        """
        transformed = hadamard_transform(padded(matrix, self.block), self.signs(matrix.device))
        return transformed.to(matrix.dtype).float() if self.spec.output == "operand" else transformed

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether entries of a matrix of this dtype are rounded after the transform."""
        return self.spec.output == "operand" and dtype != torch.float32


@lru_cache(maxsize=16)  # a CUDA graph cannot copy from the host
def _fixed_signs(spec: HadamardSpec, device: torch.device, factor: float = 1.0) -> torch.Tensor:
    return torch.tensor(spec.fixed_signs, dtype=torch.float32, device=device) * factor


class Transforms:
    """Hadamard transforms of one layer's GEMMs.

    Args:
        specs: spec by GEMM; None for no transform.
        streams: stream of random signs by GEMM.
    """

    def __init__(self, specs: Mapping[str, HadamardSpec | None], streams: Mapping[str, RandomStream]) -> None:
        self._specs = {gemm: spec for gemm, spec in specs.items() if spec is not None}
        self._fixed = {gemm: Transform(spec) for gemm, spec in self._specs.items() if spec.fixed_signs is not None}
        self._streams = streams
        self._last: tuple[RngStep, dict[str, Transform]] | None = None

    def of(self, gemm: str) -> tuple[HadamardSpec, RandomStream] | None:
        """Spec of the GEMM's transform, and the stream of its signs; None if it has none."""
        spec = self._specs.get(gemm)
        return None if spec is None else (spec, self._streams[gemm])

    def stream(self, gemm: str) -> RandomStream:
        """Stream of the signs of a GEMM with a transform."""
        return self._streams[gemm]

    def at(self, gemm: str, rng_step: RngStep) -> Transform | None:
        """The GEMM's transform, one object for all callers at an RNG step; None if it has none."""
        if gemm in self._fixed or gemm not in self._specs:
            return self._fixed.get(gemm)
        if self._last is not None and self._last[0] == rng_step and not capturing():
            return self._last[1][gemm]
        drawn = {name: spec for name, spec in self._specs.items() if name not in self._fixed}
        transforms = {name: Transform(spec, self._streams[name], rng_step) for name, spec in drawn.items()}
        if "dgrad" in transforms and "wgrad" in transforms:
            transforms["dgrad"].draw_with(transforms["wgrad"])
        if not capturing():  # a graph draws new signs in each replay
            self._last = rng_step, transforms
        return transforms[gemm]


def padded(matrix: torch.Tensor, multiple: int) -> torch.Tensor:
    """[R, K] zero-padded along K to a multiple of ``multiple``."""
    missing = -matrix.shape[1] % multiple
    return pad(matrix, (0, missing)) if missing else matrix
