"""Runs Megatron-core without CUDA: gloo and CPU tensors, with unchanged Megatron-core code.

Megatron-core names the device in three ways: ``torch.cuda.*`` calls, the literal ``device="cuda"``, and
``Tensor.cuda()`` / ``Tensor.type()``. A facade replaces the module-global name ``torch`` for the first two, in modules
under ``megatron.core`` only. The third requires patching two methods of ``torch.Tensor``. A TorchFunctionMode cannot
replace them: it is inactive while autograd runs backward. The constructor of gloo groups is the only other change in
torch.

Only ``install()`` has effects; with CUDA available it only binds one missing name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_lowprec.mcore import patches

_CPU = torch.device("cpu")
_package = "megatron.core"
# Factories that megatron.core calls with device="cuda" or torch.cuda.current_device() (optimizer.py, schedules.py,
# clip_grads.py, transformer/utils.py).
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")


def install(package: str = "megatron.core") -> None:
    """Make ``megatron.core`` run without CUDA. Call it before any process group is created; it is idempotent.

    Args:
        package: "megatron" includes Megatron-LM's training code.
    """
    global _package
    _package = package
    bind_te_general_gemm()
    if torch.cuda.is_available() or any(isinstance(finder, _LateImports) for finder in sys.meta_path):
        return
    replacement = _torch_replacement()
    for name, module in list(sys.modules.items()):
        if _is_ours(name):
            _hand_over(module, replacement)
    # Megatron-core imports some of its modules inside functions: these need the replacement as well.
    sys.meta_path.insert(0, _LateImports(replacement))
    _replace_rng_state()
    _replace_tensor_methods()
    _replace_moe_splits()
    _share_gloo_device()
    # Megatron-core warns that a fork of the RNG tracker changes the CPU's state, which is intended here.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def _is_ours(module_name: str) -> bool:
    return module_name == _package or module_name.startswith(_package + ".")


def _hand_over(module: types.ModuleType, replacement: types.ModuleType) -> None:
    if module.__dict__.get("torch") is torch:
        module.__dict__["torch"] = replacement


def bind_te_general_gemm() -> None:
    """In 0.16 the router's GEMM uses te_general_gemm, which is bound only with TE: NameError, even with CUDA."""
    if not hasattr(importlib.import_module("megatron.core.transformer.moe.moe_utils"), "te_general_gemm"):
        patches.bind("router_gemm", te_general_gemm=None)


class _Facade(types.ModuleType):
    """A module with some names replaced; other names resolve in the target."""

    def __init__(self, target: types.ModuleType, **replaced: Any) -> None:
        super().__init__(target.__name__)
        self.__dict__.update(replaced)
        self.__dict__["_target"] = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_target"], name)


class _Stream:
    """A CUDA stream or event on a CPU, where execution is in program order: waiting is a no-op."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> _Stream:
        return self

    wait_event = record_event = synchronize = wait = record = wait_stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = None  # type: ignore[assignment]


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _torch_replacement() -> _Facade:
    cuda = _Facade(
        torch.cuda,
        # Passed as device= in many places (param_and_grad_buffer.py first).
        current_device=lambda: _CPU,
        # Called around point-to-point transfers and asynchronous saves; a CPU has no pending work.
        synchronize=_nothing,
        empty_cache=_nothing,
        # torch queues a seed for a CUDA that never initializes, and the tracker would silently use the wrong stream.
        manual_seed=torch.default_generator.manual_seed,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        # The MoE token dispatcher orders its copies by streams.
        Stream=_Stream,
        current_stream=lambda *_: _Stream(),
        default_stream=lambda *_: _Stream(),
        stream=lambda *_: contextlib.nullcontext(),
    )
    return _Facade(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if (isinstance(device, str) and device.startswith("cuda")) or getattr(device, "type", None) == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return wrapper


class _LateImports(importlib.abc.MetaPathFinder):
    """Imports megatron.core's modules as usual, then installs the replacement in them."""

    def __init__(self, replacement: types.ModuleType) -> None:
        self._replacement = replacement

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _is_ours(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_hand_over(module: types.ModuleType) -> None:
            run(module)
            _hand_over(module, self._replacement)

        spec.loader.exec_module = run_and_hand_over  # type: ignore[method-assign]
        return spec


def _replace_rng_state() -> None:
    """Replace the two functions by which the RNG tracker accesses CUDA's generators without torch.cuda."""
    patches.bind(
        "cpu_random",
        _get_cuda_rng_state=lambda *_, **__: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
    )


def _replace_tensor_methods() -> None:
    patches.bind(
        "cpu_tensors",
        # language_module.py and tensor_parallel/data.py move tensors by .cuda().
        cuda=lambda self, *_, **__: self,
        # The MoE token dispatcher records a stream on tensors.
        record_stream=_nothing,
        # The optimizers group parameters by "torch.cuda.FloatTensor" and the like, and reject any other type.
        type=_tensor_type,
    )


def _tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    result = torch._C.TensorBase.type(self, dtype, *args, **kwargs)
    if dtype is None and _is_ours(str(sys._getframe(1).f_globals.get("__name__", ""))):
        return result.replace("torch.", "torch.cuda.", 1)
    return result


def _replace_moe_splits() -> None:
    """all_to_all needs its split sizes as numbers, and Megatron-core converts only CUDA tensors."""

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    patches.bind("cpu_splits", maybe_move_tensor_to_cpu=maybe_move_tensor_to_cpu)


def _share_gloo_device() -> None:
    """Create later gloo groups with the device of the first one.

    A device has a thread that polls 100 times a second. Megatron-core creates about 20 groups, whose own devices would
    take several percent of a core in each process.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo
    construct = gloo.__init__
    shared: list[Any] = []

    @functools.wraps(construct)
    def with_shared_device(self: Any, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        options, timeout = gloo._Options(), kwargs.get("timeout")
        if shared and timeout is not None:
            options._devices, options._threads, options._timeout = shared, 2 * len(shared), timeout
            args, kwargs = (options,), {}
        construct(self, store, rank, size, *args, **kwargs)
        shared[:] = shared or self.options._devices

    patches.bind("cpu_groups", __init__=with_shared_device)
