"""Repeated launches of a Triton kernel without binding its signature, which costs the host more than the launch."""

from collections.abc import Callable, Hashable, Mapping
from contextvars import copy_context
from functools import lru_cache, partial
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

EMPTY: dict[str, Callable[..., torch.Tensor]] = {
    kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}") for kind in ("cpu", "cuda")
}
"""Device type -> an empty tensor by size, stride and dtype, on the current device.

As Inductor's code allocates, past torch's dispatcher.
"""
MOST_LAYOUTS = 4096
"""Matrices in a cache of launches, which a model with other numbers of tokens in each step would fill."""


def specialized_on(arguments: tuple[Any, ...]) -> Hashable:
    """Properties of arguments on which Triton specializes a kernel, the width of integers included."""
    return tuple(
        (each.dtype, each.data_ptr() % 16 == 0)
        if isinstance(each, torch.Tensor)
        else (each.base.dtype, *each.block_shape)
        if each.__class__ is TensorDescriptor
        else each.__class__
        if isinstance(each, (bool, float, type(None)))
        else (each == 1, each % 16 == 0, -(2**31) <= each < 2**31)
        for each in arguments
    )


def launch(
    kernel: Any,
    programs: int | tuple[int, int],
    arguments: tuple[Any, ...],
    constants: Mapping[str, Any],
    **options: Any,
) -> None:
    """``kernel[programs](*arguments, **constants, **options)``, on the current device, that of the first argument.

    The result must not depend on properties of numbers other than those of ``specialized_on``.
    """
    specialized = _specialized(kernel, tuple(constants.items()), tuple(options.items()))
    specialized.launch(programs, arguments[0].device, arguments, specialized_on(arguments))


@lru_cache(maxsize=1024)
def _specialized(kernel: Any, constants: tuple[Any, ...], options: tuple[Any, ...]) -> "Specialized":
    return Specialized(kernel, dict(constants), **dict(options))


class Specialized:
    """A Triton kernel with fixed constexpr parameters and options.

    Args:
        kernel: a ``triton.jit`` function, its constexpr parameters last.
        constants: the constexpr parameters, in signature order.
        options: launch options such as num_warps.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any], **options: Any) -> None:
        names = getattr(kernel, "arg_names", None) or list(constants)
        assert names[-len(constants) :] == list(constants), (
            f"constants of {kernel} in another order than its signature's"
        )
        self._kernel, self._constants, self._options = kernel, constants, options
        self._values = tuple(constants.values())
        self._compiled: dict[Hashable, tuple[Any, ...]] = {}

    def launch(
        self,
        programs: int | tuple[int, int],
        device: torch.device,
        arguments: tuple[Any, ...],
        specialized_on: Hashable,
    ) -> None:
        """Run programs on the current stream of ``device``, the current device.

        Args:
            programs: their number, or the sizes of a grid of two dimensions.
            arguments: the other parameters, in signature order.
            specialized_on: properties on which Triton specializes them: dtypes, alignment, divisibility by 16, ones.
        """
        across, down = (programs, 1) if isinstance(programs, int) else programs
        key = (device.index, specialized_on)
        known = self._compiled.get(key)
        if known is not None:
            run, function, metadata = known
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            run(across, down, 1, stream, function, metadata, None, None, None, *arguments, *self._values)
            return
        compiled = _with_scratch(self._kernel[(across, down, 1)], *arguments, **self._constants, **self._options)
        if hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
            run = compiled.run if not compiled.metadata.global_scratch_size else partial(_with_scratch, compiled.run)
            self._compiled[key] = (run, compiled.function, compiled.packed_metadata)


def _with_scratch(run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """``run`` with torch's memory for the tensor descriptors of a kernel, which another's allocator does not see."""

    def in_own_context() -> Any:
        triton.set_allocator(_scratch)
        return run(*arguments, **options)

    return copy_context().run(in_own_context)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Bytes on the current device; torch's begin at multiples of 512."""
    assert 512 % alignment == 0
    return torch.empty(size, dtype=torch.uint8, device="cuda")
