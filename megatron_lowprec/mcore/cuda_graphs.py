"""Whole transformer layers, forward and backward pass, as CUDA graphs: the host launches two graphs a layer.

Capture executes nothing, so no state needs restoring: weights, gradients, amax histories and RNG states are unchanged.
A step without graphs compiles the kernels and opens NCCL's connections beforehand. A replay is bitwise equal to the
layer that it was captured from:

- Two kinds of microbatch take different branches, and each has its own graphs. The first of a step quantizes the
  weights and overwrites ``main_grad``; later ones read the cached weights and accumulate.
- All graphs share one memory pool and are replayed in capture order: forwards in order, backwards in reverse. A layer's
  output buffer is the next layer's input buffer, and likewise for gradients. Memory freed during one capture may be
  reused by the next, as without graphs. Only quantized weights stay allocated.
- Values that change from step to step are read from device memory: the RNG step (``device_rng_step``), amax histories,
  and the states of torch's generators, which are registered with each graph.
- The graph accumulates weight gradients into ``main_grad``, and the first microbatch overwrites them, so they are not
  set to zero. Autograd receives dummies for them, so that the hooks of Megatron-core's DDP still run.

torch.cuda.make_graphed_callables supports only the default generator, one kind and no shared buffers; Megatron-core's
graph manager needs TransformerEngine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.once_differentiable import once_differentiable
from megatron_lowprec.mcore.graph_recorder import CudaRecorder, Recorder, Recording
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecLinearMixin, await_weights
from megatron_lowprec.mcore.patches import bind
from megatron_lowprec.mcore.rng_step import current_rng_step
from megatron_lowprec.quantization.tensor import QuantizedTensor


class CaptureError(UserError):
    """CUDA refused the capture of a layer; the state of its stream and generators is unknown."""


class _Call(NamedTuple):
    """Arguments of a layer's call."""

    shape: torch.Size
    dtype: torch.dtype
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def same(self, other: _Call) -> bool:
        """Whether graphs captured for one call serve the other; the values of hidden states may differ."""
        if self[:2] != other[:2] or len(self.args) != len(other.args) or self.kwargs.keys() != other.kwargs.keys():
            return False
        pairs = [*zip(self.args, other.args, strict=True), *((v, other.kwargs[k]) for k, v in self.kwargs.items())]
        return all(mine is theirs for mine, theirs in pairs)


class _Pass:
    """A layer's captured forward and backward pass for one kind of microbatch, the first of a step or a later one."""

    def __init__(self, layer: _Layer, later: bool) -> None:
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


class _Layer:
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
        self.linear_gemms = [part.bound_gemms for part in module.modules() if isinstance(part, LowPrecLinearMixin)]
        self.call: _Call
        self.passes: dict[bool, _Pass] = {}
        self.dummies: list[torch.Tensor] = []

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


@once_differentiable("a layer captured as a CUDA graph")
class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, layer: _Layer, captured: _Pass, x: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.layer, ctx.captured = layer, captured
        if x.data_ptr() != captured.x.data_ptr():
            captured.x.copy_(x)
        captured.forward.replay()
        # autograd sets attributes on returned tensors
        return captured.y.detach()

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        layer, captured = ctx.layer, ctx.captured
        if dy.data_ptr() != captured.dy.data_ptr():
            captured.dy.copy_(dy)
        captured.backward.replay()
        for linear_gemms in layer.linear_gemms:
            linear_gemms.main_grad_is_zero = False
        for weight in layer.weights:
            weight.grad_added_to_main_grad = True
            if hasattr(weight, "stored_gradient"):
                weight.stored_gradient.replayed()
        # autograd copies a gradient with other references: return new tensors over the same memory
        return None, None, captured.dx.detach(), *[dummy.detach() for dummy in layer.dummies]


class LayerGraphs:
    """CUDA graphs of a model's transformer layers, replayed in training steps. The rest of the model runs eagerly.

    Layers run eagerly within ``step`` until each kind of microbatch has run once; the next ``step`` captures and
    replays. Outside ``step``, or without gradients, layers always run eagerly.

    Args:
        model: under data parallelism, its recipe bound; all layers of one microbatch run before those of the next.
        several: whether a step may have more than one microbatch.
        recorder: creates the recorder when capture starts.

    Attributes:
        say: called with one line about what was captured.
        held_bytes: bytes that the graphs hold and torch's allocator does not count as allocated.
    """

    def __init__(self, model: nn.Module, several: bool, recorder: Callable[[], Recorder] = CudaRecorder) -> None:
        self.say: Callable[[str], object] = lambda line: None
        self._layers = [_Layer(module) for module in model.modules() if isinstance(module, TransformerLayer)]
        self._linear_gemms = [linear_gemms for layer in self._layers for linear_gemms in layer.linear_gemms]
        self._several, self._make_recorder = several, recorder
        self._inside = self._captured = self._later = False
        self.held_bytes = self._eager_peak = 0
        self._microbatches = 0
        self._cached_weights: list[list[QuantizedTensor]] = []
        self._ends: tuple[torch.Tensor, ...] = ()  # buffers of the first layer's input and the last one's gradient
        weights = [weight for layer in self._layers for weight in layer.weights]
        self._stored = any(hasattr(weight, "stored_gradient") for weight in weights)
        self._model: Any = model
        self._zeroed = {} if self._stored else _other_gradients(model, weights)
        for buffer in self._zeroed:
            bind("layer_graphs", buffer, reset=partial(self._reset, buffer))
        for layer in self._layers:
            bind("layer_graphs", layer.module, forward=partial(self._forward, layer))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context of a training step's forward and backward passes; enter it before gradients are set to zero.

        Layers stay eager if memory does not suffice for the capture, or a draw cannot be captured; ``say`` gets the
        reason.

        Raises:
            CaptureError: CUDA refused the capture.
        """
        if self._layers and not self._captured and self._microbatches > self._several:
            try:
                self._capture()
            except CaptureError:
                raise
            except (torch.OutOfMemoryError, UserError) as error:
                self.drop()
                self.say(f"CUDA graphs: off, {str(error).splitlines()[0]}")
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def peak_bytes(self) -> int:
        """Most bytes allocated at once so far, including those that graphs hold."""
        return max(self._eager_peak, _peak_bytes(torch.device("cuda")) + self.held_bytes)

    def drop(self) -> None:
        """Restore the layers and free the graphs; call it before NCCL shuts down, since graphs may hold collectives."""
        for layer in self._layers:
            del layer.module.forward
            layer.passes.clear()
        for buffer in self._zeroed:
            del buffer.reset
        self._layers, self._zeroed, self._captured = [], {}, False
        self._ends = ()
        self._cached_weights.clear()

    def _reset(self, buffer: Any) -> None:
        """Replacement of ``reset`` of a gradient buffer: in replayed steps, zeroes what no graph overwrites."""
        if not (self._inside and self._captured):
            type(buffer).reset(buffer)
            return
        for grads in self._zeroed[buffer]:
            grads.zero_()

    def _forward(self, layer: _Layer, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Replacement of ``TransformerLayer.forward``."""
        if not self._inside or not torch.is_grad_enabled():
            return layer.eager(hidden_states, *args, **kwargs)
        if layer is self._layers[0]:
            microbatch = current_rng_step().microbatch
            self._later = microbatch > 0
            self._microbatches = max(self._microbatches, microbatch + 1)
        call = _Call(hidden_states.shape, hidden_states.dtype, args, kwargs)
        if not self._captured:
            layer.call = call
            return layer.eager(hidden_states, *args, **kwargs)
        if not call.same(layer.call):
            raise RuntimeError(f"layer {layer.module.layer_number} was captured for {layer.call}, not for {call}")
        for part in layer.owners:
            await_weights(part)
        return _Replay.apply(layer, layer.passes[self._later], hidden_states, *layer.weights), None

    def _capture(self) -> None:
        started = time.perf_counter()
        layers, call = self._layers, self._layers[0].call
        device = layers[0].weights[0].device
        torch.cuda.empty_cache()  # else these could lie in a large cached block, which the graphs cannot use
        self._ends = tuple(torch.zeros(call.shape, dtype=call.dtype, device=device) for _ in range(2))
        for layer, dummies in zip(layers, _dummies([layer.weights for layer in layers]), strict=True):
            layer.dummies = dummies
        if self._stored:  # as the step will: codes of the step before are reduced
            self._model.zero_grad_buffer()
        recorder = self._make_recorder()  # which measures the memory that is reserved before the graphs'
        kinds = (False, True) if self._several else (False,)
        with self._capturing():
            for later in kinds:
                for linear_gemms in self._linear_gemms:
                    linear_gemms.main_grad_is_zero = not later
                x, dy = self._ends
                for layer in layers:
                    layer.passes[later] = _Pass(layer, later)
                    x = layer.passes[later].capture_forward(x, recorder)
                for layer in reversed(layers):
                    dy = layer.passes[later].capture_backward(dy, recorder)
                self._cached_weights += [linear_gemms.weight_cache.tensors() for linear_gemms in self._linear_gemms]
        self._eager_peak = _peak_bytes(device)
        kept = recorder.finish()
        cached = [data for layer in self._cached_weights for w in layer for data in (w.rowwise_data, w.columnwise_data)]
        allocated = {data.data_ptr(): data.nbytes for data in cached if data is not None}
        self.held_bytes = max(0, kept - sum(allocated.values()))
        self._captured = True
        self.say(
            f"CUDA graphs: {len(layers)} layers captured, {2 * len(kinds) * len(layers)} graphs, in "
            f"{time.perf_counter() - started:.1f} s; they keep {kept / 2**30:.2f} GiB"
        )

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        """Capture context of the layers: Megatron-core's hooks off, its generator, quantized weights cached."""
        sequence_parallel = self._layers[0].module.config.sequence_parallel
        # as TransformerBlock does around its layers
        generator = get_cuda_rng_tracker().fork() if sequence_parallel else contextlib.nullcontext()
        cuda_graphs._set_capture_start()
        try:
            for linear_gemms in self._linear_gemms:
                linear_gemms.weight_cache.clear()
                linear_gemms.weight_cache.under_capture = True
            with generator:
                yield
        finally:
            cuda_graphs._set_capture_end()
            for linear_gemms in self._linear_gemms:
                linear_gemms.weight_cache.clear()
                linear_gemms.weight_cache.under_capture = linear_gemms.main_grad_is_zero = False


def _peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def _other_gradients(model: Any, weights: Sequence[nn.Parameter]) -> dict[Any, list[torch.Tensor]]:
    """Gradient buffer -> the ranges of gradients of all other weights; nothing ever writes between weights."""
    overwritten = {id(weight) for weight in weights}
    found: dict[Any, list[torch.Tensor]] = {}
    for buffer in model.buffers + model.expert_parallel_buffers:
        places = sorted(
            (start, end) for weight, (start, end, _) in buffer.param_index_map.items() if id(weight) not in overwritten
        )
        merged: list[tuple[int, int]] = []
        for start, end in places:
            if merged and merged[-1][1] == start:
                start = merged.pop()[0]
            merged.append((start, end))
        found[buffer] = [buffer.grad_data[start:end] for start, end in merged]
    return found


def _dummies(weights: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Placeholders for gradients of the weights, aliasing one buffer; never read."""
    sizes: dict[torch.dtype, int] = {}
    for weight in (weight for layer in weights for weight in layer):
        sizes[weight.dtype] = max(sizes.get(weight.dtype, 0), weight.numel())
    room = {dtype: torch.empty(size, dtype=dtype, device=weights[0][0].device) for dtype, size in sizes.items()}
    return [[room[weight.dtype][: weight.numel()].view(weight.shape) for weight in layer] for layer in weights]
