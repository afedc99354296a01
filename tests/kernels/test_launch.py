"""Launches of kernels that need memory of their own, with a stand-in for a compiled kernel."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch


class StandIn:
    """A kernel with one constexpr parameter, compiled at its first launch."""

    arg_names = ["x_ptr", "CONSTANT"]  # noqa: RUF012 - as Triton has it

    def __init__(self, scratch: int) -> None:
        self.allocators: list[Any] = []
        metadata = SimpleNamespace(global_scratch_size=scratch)
        self.compiled = SimpleNamespace(run=self.launch, function=1, packed_metadata=(), metadata=metadata)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch

    def launch(self, *_: Any, **__: Any) -> SimpleNamespace:
        from triton.runtime import _allocation

        self.allocators.append(_allocation._allocator.get())
        return self.compiled


def test_descriptors_get_torch_s_memory_and_another_s_allocator_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from triton.runtime import _allocation

    from megatron_lowprec.kernels import launch

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    before = _allocation._allocator.get()
    for scratch, last in ((128, launch._scratch), (0, before)):
        kernel, x = StandIn(scratch), torch.zeros(4)
        specialized = launch.Specialized(kernel, {"CONSTANT": 1})
        for _ in range(2):  # the second runs what the first compiled
            specialized.launch(1, x.device, (x,), launch.specialized_on((x,)))
        assert kernel.allocators == [launch._scratch, last]
        assert _allocation._allocator.get() is before
