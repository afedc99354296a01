"""Triton kernels on a CPU: the cases of a module under Triton's interpreter, in a process of its own.

Triton decides when it is imported whether it interprets. A module of cases has ``differences(device)``, which compares
kernels with a reference and returns what is wrong; it calls ``main`` where it is run by itself.
"""

import dataclasses
import inspect
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


class _PatchOnce:
    """Triton's ``_patch_lang``, which runs again for each call of a device function, run once a launch and module."""

    def __init__(self, patch_lang: Callable[[Any], Any]) -> None:
        self._patch_lang = patch_lang
        self._modules = dict[Any, set[int]]()
        self._patched: set[int] = set()
        self._scopes: list[Any] = []

    def __call__(self, fn: Any) -> "_PatchOnce":
        import triton.language as tl

        if fn not in self._modules:
            found = {id(module) for module in fn.__globals__.values() if module is tl or module is tl.core}
            self._modules[fn] = found
        modules = self._modules[fn]
        if not modules or not modules <= self._patched:  # Triton refuses a function without a module
            self._scopes.append(self._patch_lang(fn))
            self._patched |= modules
        return self

    def restore(self) -> None:
        """Called by Triton at the end of a launch."""
        while self._scopes:
            self._scopes.pop().restore()
        self._patched.clear()


def _cache_shapes(core: Any, semantic: Any) -> None:
    """Compute the attributes that a block type and a tensor derive from a shape once a shape.

    Equal shapes are then one object, so that operands of one shape are known without a comparison. A number beside a
    tensor becomes a tensor of its shape once: no operation writes to its operands.
    """
    block_type, tensor, checked = core.block_type.__init__, core.tensor.__init__, semantic.binary_op_type_checking_impl
    broadcast = semantic.broadcast_impl_value
    of_types, of_tensors, of_numbers = dict[Any, Any](), dict[int, Any](), dict[Any, Any]()

    def type_init(self: Any, element_ty: Any, shape: Any) -> None:
        known = of_types.get(id(shape))  # of another type
        if known is None:
            key = tuple(getattr(size, "value", size) for size in shape)
            if key not in of_types:
                block_type(self, element_ty, shape)
                of_types[key] = of_types[id(self.shape)] = self.shape, self.numel, str(self.shape)
            known = of_types[key]
        self.element_ty = element_ty
        self.shape, self.numel, text = known
        self.name = f"<{text}, {element_ty}>"

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        key = id(type.shape) if type.is_block() else 0
        if key not in of_tensors:
            tensor(self, handle, type)
            of_tensors[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[key]

    def shape_of(value: Any) -> Any:
        return value.type.shape if value.type.is_block() else None

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if shape_of(lhs) is shape_of(rhs) else broadcast(self, lhs, rhs)

    def binary_op_type_checking_impl(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        tensors = isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor)
        if tensors and lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr() and not div_or_mod:
            return broadcast_impl_value(self, lhs, rhs)
        options = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        if tensors:
            return checked(self, lhs, rhs, *options)
        at = int(isinstance(rhs, core.tensor))
        one, number = (rhs, lhs) if at else (lhs, rhs)
        if isinstance(number, core.constexpr) or not isinstance(one, core.tensor):
            return checked(self, lhs, rhs, *options)
        # zeros of both signs are equal
        key = at, id(shape_of(one)), one.dtype.name, type(number), repr(number), options
        if key not in of_numbers:
            found = checked(self, lhs, rhs, *options)
            if found[at] is not one:  # cast to another type
                return found
            of_numbers[key] = found[1 - at]
        return (of_numbers[key], one) if at else (one, of_numbers[key])

    core.block_type.__init__, core.tensor.__init__ = type_init, tensor_init
    semantic.broadcast_impl_value = broadcast_impl_value
    semantic.binary_op_type_checking_impl = binary_op_type_checking_impl


def _cast_of_bf16(cast: Callable[..., Any], handle: Any) -> Callable[..., Any]:
    """Triton's cast; between bf16 and fp32, which it assembles from their fields, a shift of the bits."""

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar.name, dst_type.scalar
        if source == "bf16" and target.name == "fp32":
            return handle((src.data.astype(np.uint32) << np.uint32(16)).view(np.float32), target)
        if source == "fp32" and target.name == "bf16":
            return handle((src.data.view(np.uint32) >> np.uint32(16)).astype(np.uint16), target)
        return cast(self, src, dst_type)

    return cast_impl


def _generic_reduce(self: Any, inputs: Any) -> list[Any]:
    """Triton's reduction by a custom function, in the same order; its own calls the function for each entry."""
    found: Any = ()
    for entries in zip(*(np.moveaxis(each.handle.data, self.axis, 0) for each in inputs), strict=True):
        part = tuple(self.to_tensor(entry, each.dtype) for entry, each in zip(entries, inputs, strict=True))
        combined = self.combine_fn.fn(*found, *part) if found else part
        found = combined if isinstance(combined, tuple) else (combined,)
    if self.keep_dims:
        found = [self.to_tensor(np.expand_dims(each.handle.data, self.axis), each.dtype) for each in found]
    return list(found)


def remove_interpreter_overhead() -> None:
    """Skip repeated work of Triton's interpreter, two thirds of its time. No result depends on it but
    subnormals that are cast from or to bf16, which its own casts get wrong.

    Each device function call searches Triton's modules for functions to replace. Each operation builds a table of
    dtypes, wraps each size of its result's shape several times, and compares dtypes and shapes that are one object. A
    number beside a tensor is filled into one of its shape each time.
    Integer operations compute an overflow assertion, which the interpreter drops unless ``debug`` is set.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    numpy_dtype, builder, dtypes = interpreter._get_np_dtype, interpreter.interpreter_builder, dict[str, Any]()

    def cached(dtype: Any) -> Any:
        if isinstance(dtype, tl.pointer_type):
            return numpy_dtype(dtype)
        if dtype.name not in dtypes:
            dtypes[dtype.name] = numpy_dtype(dtype)
        return dtypes[dtype.name]

    def interpreted(member: Any) -> Any:
        function = getattr(member, "__wrapped__", member)  # without the check that a kernel calls it

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        return call

    builtins = dict[Any, list[tuple[str, Any]]]()

    def patch_builtin(module: Any, builder: Any, scope: Any) -> None:
        if module not in builtins:
            found = inspect.getmembers(module, tl.core.is_builtin)
            builtins[module] = [(name, interpreted(member)) for name, member in found]
        for name, member in builtins[module]:
            scope.set_attr(module, name, member)

    equal = tl.core.dtype.__eq__
    tl.core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    _cache_shapes(tl.core, type(interpreter.interpreter_semantic))
    interpreter._patch_lang = _PatchOnce(interpreter._patch_lang)
    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = cached
    interpreter.ReduceOps.generic_reduce = _generic_reduce
    builders = interpreter.InterpreterBuilder
    builders.cast_impl = _cast_of_bf16(builders.cast_impl, interpreter.TensorHandle)
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def assert_no_differences(*module: str) -> str:
    """Run a module with its arguments interpreted, and what it prints; skips where Triton is not installed."""
    pytest.importorskip("triton", reason="triton is not installed")
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted", *module],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "compared" in run.stdout
    return run.stdout


def steps_of(module: Any, device: str) -> float:
    """How many steps of its format a rounded result may be off: the interpreter cuts fp32 to bf16, a GPU rounds."""
    return 1.0 if device == "cpu" and module.__name__.endswith(".triton") else 0.5


def main(*differences: Callable[[str], tuple[int, list[str]]]) -> None:
    """Print what differs and how many cases each compared; the exit code says whether anything did."""
    os.environ["TRITON_INTERPRET"] = "1"
    results = [each("cpu") for each in differences]
    for compared, found in results:
        print(*found, f"{compared} compared", sep="\n")
    sys.exit(any(found or not compared for compared, found in results))


if __name__ == "__main__":
    remove_interpreter_overhead()
    del sys.argv[0]  # the module's own command line
    runpy.run_module(sys.argv[0], run_name="__main__")
