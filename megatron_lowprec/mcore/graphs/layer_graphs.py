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

torch.cuda.make_graphed_callables supports only the default generator, one kind and no shared buffers. Megatron-core's
graph manager has one kind, runs a layer before its capture, which would change amax histories, copies all weight
gradients in each replay, and needs TransformerEngine to free memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.once_differentiable import once_differentiable
from megatron_lowprec.mcore.graphs.captured_layer import Call, CapturedLayer, CaptureError, Pass
from megatron_lowprec.mcore.graphs.graph_recorder import CudaRecorder, Recorder
from megatron_lowprec.mcore.layers.parallel_linear import await_weights
from megatron_lowprec.mcore.patches import bind
from megatron_lowprec.mcore.rng_step import current_rng_step
from megatron_lowprec.quantization.tensor import QuantizedTensor


class LayerGraphs:
    """CUDA graphs of a model's transformer layers, replayed in training steps. The rest of the model runs eagerly.

    A kind of microbatch runs eagerly once; the next step captures it and replays. Layers in evaluation mode, without
    gradients, or outside of a step run eagerly.

    Args:
        model: its recipe bound, and its weights under Megatron-core's data parallelism, which has their ``main_grad``.
            If it is the ``DistributedDataParallel``, gradients that a graph overwrites are not set to zero before.
        recorder: creates the recorder when capture starts.

    Attributes:
        say: called with one line about what was captured.
        held_bytes: bytes that the graphs hold and torch's allocator does not count as allocated.
        replayed: microbatches replayed or captured so far.
    """

    def __init__(self, model: nn.Module, recorder: Callable[[], Recorder] = CudaRecorder) -> None:
        self.say: Callable[[str], object] = lambda line: None
        self._layers = [CapturedLayer(module) for module in model.modules() if isinstance(module, TransformerLayer)]
        self._make_recorder = recorder
        self._inside = self._later = False
        # kinds of microbatches: whether they are not the first of their step
        self._ran: set[bool] = set()
        self._captured: frozenset[bool] = frozenset()
        self.held_bytes = self._eager_peak = self.replayed = 0
        self._cached_weights: list[list[QuantizedTensor]] = []
        self._ends: tuple[torch.Tensor, ...] = ()  # buffers of the first layer's input and the last one's gradient
        weights = [weight for layer in self._layers for weight in layer.weights]
        self._stored = any(hasattr(weight, "stored_gradient") for weight in weights)
        self._model: Any = model
        parallel = isinstance(model, DistributedDataParallel)
        self._zeroed = _other_gradients(model, weights) if parallel and not self._stored else {}
        for buffer in self._zeroed:
            bind("layer_graphs", buffer, reset=partial(self._reset, buffer))
        for layer in self._layers:
            bind("layer_graphs", layer.module, forward=partial(self._forward, layer))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context of a training step's forward and backward passes, as ``begin_step`` and ``end_step``."""
        self.begin_step()
        try:
            yield
        finally:
            self.end_step()

    def begin_step(self) -> None:
        """Begin a training step, before the recipe's; call it before gradients are set to zero, if this does so.

        Layers stay eager if memory does not suffice for the capture, or a draw cannot be captured; ``say`` gets the
        reason.

        Raises:
            CaptureError: CUDA refused the capture.
        """
        if self._layers and self._captured != self._ran:
            try:
                self._capture()
            except CaptureError:
                raise
            except (torch.OutOfMemoryError, UserError) as error:
                self.drop()
                self.say(f"CUDA graphs: off, {str(error).splitlines()[0]}")
        self._inside = True

    def end_step(self) -> None:
        """End a training step: layers run eagerly until the next."""
        self._inside = False

    def peak_bytes(self) -> int:
        """Most bytes allocated at once so far, including those that graphs hold."""
        return max(self._eager_peak, torch.cuda.max_memory_allocated() + self.held_bytes)

    def recapture(self) -> None:
        """Free the graphs, since the layers were bound to other GEMMs; call it before a step, which runs eagerly."""
        if self._captured:
            self._eager_peak, self.held_bytes = self.peak_bytes(), 0
        for layer in self._layers:
            layer.reset()
        self._ran, self._captured, self._ends = set(), frozenset(), ()
        self._cached_weights.clear()

    @property
    def _linear_gemms(self) -> list[LinearGemms]:
        return [linear_gemms for layer in self._layers for linear_gemms in layer.linear_gemms]

    def drop(self) -> None:
        """Restore the layers and free the graphs; call it before NCCL shuts down, since graphs may hold collectives."""
        for layer in self._layers:
            del layer.module.forward
            layer.passes.clear()
        for buffer in self._zeroed:
            del buffer.reset
        self._layers, self._zeroed, self._captured = [], {}, frozenset()
        self._ends = ()
        self._cached_weights.clear()

    def _reset(self, buffer: Any) -> None:
        """Replacement of ``reset`` of a gradient buffer: in replayed steps, zeroes what no graph overwrites."""
        if not (self._inside and self._captured):
            type(buffer).reset(buffer)
            return
        for grads in self._zeroed[buffer]:
            grads.zero_()

    def _forward(self, layer: CapturedLayer, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Replacement of ``TransformerLayer.forward``."""
        if not self._inside or not layer.module.training or not torch.is_grad_enabled():
            return layer.eager(hidden_states, *args, **kwargs)
        if layer is self._layers[0]:
            self._later = current_rng_step().microbatch > 0
            self._ran.add(self._later)
            self.replayed += 1
        call = Call(hidden_states.shape, hidden_states.dtype, args, kwargs)
        if self._later not in self._captured:
            layer.call = call
            for weight in layer.weights:  # a replay of the microbatch before may have left it True
                weight.grad_added_to_main_grad = False
            return layer.eager(hidden_states, *args, **kwargs)
        changed = layer.call.difference(call)
        if changed is not None:
            raise UserError(
                f"CUDA graphs: layer {layer.module.layer_number} was captured with other arguments, and this call has "
                f"{changed}; use --cuda-graph-impl none"
            )
        for part in layer.owners:
            await_weights(part)
        return _Replay.apply(self, layer, layer.passes[self._later], hidden_states, *layer.weights), None

    def _capture(self) -> None:
        started = time.perf_counter()
        layers, call = self._layers, self._layers[0].call
        device, kinds = next(layers[0].module.parameters()).device, sorted(self._ran)
        self._cached_weights.clear()
        torch.cuda.empty_cache()  # else these could lie in a large cached block, which the graphs cannot use
        self._ends = tuple(torch.zeros(call.shape, dtype=call.dtype, device=device) for _ in range(2))
        for layer, dummies in zip(layers, _dummies([layer.weights for layer in layers]), strict=True):
            layer.dummies = dummies
            layer.reset()
        if self._stored:  # as the step will: codes of the step before are reduced
            self._model.zero_grad_buffer()
        recorder = self._make_recorder()  # which measures the memory that is reserved before the graphs'
        with self._capturing():
            for later in kinds:
                for linear_gemms in self._linear_gemms:
                    linear_gemms.main_grad_is_zero = not later
                x, dy = self._ends
                for layer in layers:
                    layer.passes[later] = Pass(layer, later)
                    x = layer.passes[later].capture_forward(x, recorder)
                for layer in reversed(layers):
                    dy = layer.passes[later].capture_backward(dy, recorder)
                self._cached_weights += [linear_gemms.weight_cache.tensors() for linear_gemms in self._linear_gemms]
        self._eager_peak = self.peak_bytes()
        kept = recorder.finish()
        cached = [data for layer in self._cached_weights for w in layer for data in (w.rowwise_data, w.columnwise_data)]
        allocated = {data.data_ptr(): data.nbytes for data in cached if data is not None}
        self.held_bytes = max(0, kept - sum(allocated.values()))
        self._captured = frozenset(kinds)
        self.replayed += 1
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


@once_differentiable("a layer captured as a CUDA graph")
class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, graphs: LayerGraphs, layer: CapturedLayer, captured: Pass, x: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.layer, ctx.captured, ctx.graphs, ctx.replayed = layer, captured, graphs, graphs.replayed
        if x.data_ptr() != captured.x.data_ptr():
            captured.x.copy_(x)
        captured.forward.replay()
        # autograd sets attributes on returned tensors
        return captured.y.detach()

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        layer, captured = ctx.layer, ctx.captured
        if ctx.replayed != ctx.graphs.replayed:
            raise UserError(
                "CUDA graphs hold the activations of one microbatch, and the next began before its backward pass: run "
                "each backward pass before the next forward pass, or use --cuda-graph-impl none"
            )
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
        return None, None, None, captured.dx.detach(), *[dummy.detach() for dummy in layer.dummies]


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
    largest: dict[torch.dtype, torch.Tensor] = {}
    for weight in (weight for layer in weights for weight in layer):
        largest[weight.dtype] = max(weight, largest.get(weight.dtype, weight), key=torch.numel)
    room = {dtype: torch.empty(weight.numel(), dtype=dtype, device=weight.device) for dtype, weight in largest.items()}
    return [[room[weight.dtype][: weight.numel()].view(weight.shape) for weight in layer] for layer in weights]
