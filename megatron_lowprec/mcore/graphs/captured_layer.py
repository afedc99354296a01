"""A transformer layer's captured passes: its forward and its backward as one recording each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore.graphs.graph_recorder import Recorder, Recording
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecLinearMixin


class CaptureError(UserError):
    """CUDA refused the capture of a layer; the state of its stream and generators is unknown."""


class Call(NamedTuple):
    """Arguments of a layer's call."""

    shape: torch.Size
    dtype: torch.dtype
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def difference(self, other: Call) -> str | None:
        """What of ``other`` graphs captured for this call do not serve; the values of hidden states may differ."""
        if self[:2] != other[:2]:
            return f"hidden states {list(other.shape)} of {other.dtype}, not {list(self.shape)} of {self.dtype}"
        mine, theirs = ({**dict(enumerate(call.args)), **call.kwargs} for call in (self, other))
        changed = [name for name in mine.keys() | theirs if mine.get(name) is not theirs.get(name)]
        return f"another {', '.join(sorted(map(str, changed)))}" if changed else None


class Pass:
    """A layer's captured forward and backward pass for one kind of microbatch, the first of a step or a later one."""

    def __init__(self, layer: CapturedLayer, later: bool) -> None:
        self._layer, self._later = layer, later

    def capture_forward(self, x: torch.Tensor, recorder: Recorder) -> torch.Tensor:
        """Capture the forward pass on x [s, b, h]; returns the output buffer, the next layer's input."""
        self.x = x
        self.forward, y = self._recorded("forward", self._run_forward, recorder)
        self.x, self.y = recorder.alias(x), recorder.alias(y)
        return y.detach()

    def capture_backward(self, dy: torch.Tensor, recorder: Recorder) -> torch.Tensor:
        """Capture the backward pass on ``dy``; returns the buffer of dx, the gradient that the layer before reads."""
        self.dy = dy
        self.backward, dx = self._recorded("backward", self._run_backward, recorder)
        self.dy, self.dx = recorder.alias(dy), recorder.alias(dx)
        return dx

    def _recorded(
        self, name: str, work: Callable[[], torch.Tensor], recorder: Recorder
    ) -> tuple[Recording, torch.Tensor]:
        try:
            return recorder.record(work, draws=name == "forward")
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(
                f"CUDA graphs: the {name} pass of layer {self._layer.module.layer_number} cannot be captured: "
                f"{str(error).splitlines()[0]}; use --cuda-graph-impl none"
            ) from error

    def _run_forward(self) -> torch.Tensor:
        self._leaf = self.x.detach().requires_grad_()
        call = self._layer.call
        with self._layer.own_leaves() as self._weights:
            self._y = self._layer.eager(self._leaf, *call.args, **call.kwargs)[0].contiguous()
        return self._y

    def _run_backward(self) -> torch.Tensor:
        dx, *grads = torch.autograd.grad(self._y, (self._leaf, *self._weights), self.dy)
        left: list[tuple[torch.Tensor, torch.Tensor]] = [
            (weight.main_grad, grad)  # type: ignore[attr-defined]
            for weight, grad in zip(self._weights, grads, strict=True)
            if not (weight.grad_added_to_main_grad or hasattr(weight, "stored_gradient"))  # type: ignore[attr-defined]
        ]
        _accumulate(left, overwrite=not self._later)
        del self._leaf, self._y, self._weights
        return dx.contiguous()


def _accumulate(grads: Sequence[tuple[torch.Tensor, torch.Tensor]], overwrite: bool) -> None:
    """Add (main gradient, gradient) pairs, or overwrite main gradients, in few launches.

    torch adds tensors of several dtypes one by one. So biases and norms, which are many and small, become fp32 first.
    """
    if overwrite:
        small, large = grads, []
    else:
        small = [pair for pair in grads if pair[0].dim() == 1]
        large = [pair for pair in grads if pair[0].dim() > 1]
    if small:
        mains = [main for main, _ in small]
        values = mains if overwrite else [torch.empty_like(main) for main in mains]
        torch._foreach_copy_(values, [grad for _, grad in small])
        if not overwrite:
            torch._foreach_add_(mains, values)
    for main, grad in large:
        main.add_(grad)


def _store(leaf: Any, grad: torch.Tensor) -> None:
    """Hook of a weight whose gradient is stored in FP8: casts it as soon as it is complete, and frees it."""
    leaf.stored_gradient.capture(None if leaf.grad_added_to_main_grad else grad)


class CapturedLayer:
    """A layer and its captured passes, keyed by whether the microbatch is not the first of its step."""

    def __init__(self, module: TransformerLayer) -> None:
        self.module, self.eager = module, module.forward
        self._places = [
            (part, name)
            for part in module.modules()
            for name, weight in part._parameters.items()
            if weight is not None and weight.requires_grad
        ]
        self.owners = list(dict.fromkeys(part for part, _ in self._places))
        self.weights: list[Any] = [part._parameters[name] for part, name in self._places]
        self.call: Call
        self.dummies: list[torch.Tensor] = []
        self.reset()

    def reset(self) -> None:
        """Free the captured passes, and take the GEMMs to which the linears are bound now."""
        self.passes: dict[bool, Pass] = {}
        linears = (part for part in self.module.modules() if isinstance(part, LowPrecLinearMixin))
        self.linear_gemms = [linear.bound_gemms for linear in linears]

    @contextlib.contextmanager
    def own_leaves(self) -> Iterator[list[nn.Parameter]]:
        """Temporarily replace the parameters by new leaves over the same memory.

        DDP holds the autograd nodes that accumulate its parameters' gradients. Autograd would run these on the stream
        that created them, and a capture must not leave its own stream.
        """
        leaves = []
        for (part, name), weight in zip(self._places, self.weights, strict=True):
            leaf = nn.Parameter(weight.detach())
            leaf.__dict__.update(weight.__dict__)
            leaf.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            if hasattr(leaf, "stored_gradient"):
                leaf.register_hook(partial(_store, leaf))
            part._parameters[name] = leaf
            leaves.append(leaf)
        try:
            yield leaves
        finally:
            for (part, name), weight in zip(self._places, self.weights, strict=True):
                part._parameters[name] = weight
