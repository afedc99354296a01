"""Recordings of work as CUDA graphs that share a memory pool."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Protocol

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import _MODEL_PARALLEL_RNG_TRACKER_NAME as _FORKED


class Recording(Protocol):
    """Captured work that can be replayed on the same memory."""

    def replay(self) -> None:
        """Run the captured work."""


class Recorder(Protocol):
    """Captures work as recordings."""

    def record(self, work: Callable[[], torch.Tensor], draws: bool) -> tuple[Recording, torch.Tensor]:
        """Capture ``work``; returns the recording and its result's buffer. ``draws``: it uses torch's generators."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's memory, without keeping it allocated."""

    def finish(self) -> int:
        """Finish capturing; returns the bytes that all recordings hold. Peak memory statistics start anew."""


class CudaRecorder:
    """Captures CUDA graphs into one memory pool."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        # destroying a graph of an earlier run during a capture is an error
        gc.collect()
        # else the pool cannot reuse the memory of the step before
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_reserved()
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def record(self, work: Callable[[], torch.Tensor], draws: bool) -> tuple[Recording, torch.Tensor]:
        """Capture; the device executes nothing."""
        graph = torch.cuda.CUDAGraph()
        if draws:  # the default generator is registered with every graph
            graph.register_generator_state(get_cuda_rng_tracker().get_states()[_FORKED])
        with torch.cuda.stream(self._stream):
            # other threads (NCCL's watchdog) may query the device meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph, result

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Alias by address: the pool may reuse the memory for later captures."""
        assert tensor.is_contiguous()
        place = _Place(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        return torch.as_tensor(place, device=tensor.device).view(tensor.dtype).view(tensor.shape)

    def finish(self) -> int:
        """Bytes of the memory pool."""
        # a capture first writes the generators' device state on its own stream; replays write it on another
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_reserved() - self._before


class _Place:
    """Bytes on a GPU as ``__cuda_array_interface__``, which torch reads without taking ownership."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
