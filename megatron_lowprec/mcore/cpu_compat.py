"""Megatron-core on a machine without CUDA: gloo and CPU tensors, by the same Megatron-core code.

Megatron-core names the device in three ways: ``torch.cuda.*`` calls, the literal ``device="cuda"``, and
``Tensor.cuda()`` / ``Tensor.type()``. The first two are answered by a stand-in for the module-global name ``torch``
that only modules under ``megatron.core`` see; torch itself stays as it is for everyone else. The third has no other
handle than two methods of ``torch.Tensor``. A TorchFunctionMode cannot do it: it is off while autograd runs backward.

Nothing but ``install()`` changes anything, and where CUDA is there it changes one missing name only.
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

_CPU = torch.device("cpu")
_PACKAGE = "megatron.core"
# The factories that megatron.core calls with device="cuda" or torch.cuda.current_device() (optimizer.py, schedules.py,
# clip_grads.py, transformer/utils.py).
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")


def install() -> None:
    """Make ``megatron.core`` run here. Call once, before any process group; more calls do nothing."""
    _bind_te_general_gemm()
    if torch.cuda.is_available() or any(isinstance(finder, _LateImports) for finder in sys.meta_path):
        return
    replacement = _torch_replacement()
    for name, module in list(sys.modules.items()):
        if _is_ours(name):
            _hand_over(module, replacement)
    # Megatron-core imports some of its modules inside functions: those must see the replacement as well.
    sys.meta_path.insert(0, _LateImports(replacement))
    _replace_rng_state()
    _replace_tensor_methods()
    _replace_moe_splits()
    # Its warning that a fork of the random tracker touches the CPU's state describes what is wanted here.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def _is_ours(module_name: str) -> bool:
    return module_name == _PACKAGE or module_name.startswith(_PACKAGE + ".")


def _hand_over(module: types.ModuleType, replacement: types.ModuleType) -> None:
    if module.__dict__.get("torch") is torch:
        module.__dict__["torch"] = replacement


def _bind_te_general_gemm() -> None:
    """moe_utils names te_general_gemm in the router's GEMM but binds it only with TE: NameError, CUDA or not."""
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    moe_utils.__dict__.setdefault("te_general_gemm", None)


class _Facade(types.ModuleType):
    """A module with some names replaced; every other name is the target's."""

    def __init__(self, target: types.ModuleType, **replaced: Any) -> None:
        super().__init__(target.__name__)
        self.__dict__.update(replaced)
        self.__dict__["_target"] = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_target"], name)


class _Stream:
    """A stream, or an event of one, where everything happens in program order: waiting is nothing to do."""

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
        # Called around point-to-point transfers and asynchronous saves; a CPU has nothing outstanding.
        synchronize=_nothing,
        empty_cache=_nothing,
        # torch queues a seed for a CUDA that never comes, and the tracker would draw from the wrong stream, silently.
        manual_seed=torch.default_generator.manual_seed,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        # The token dispatcher of experts orders its copies by streams.
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
    """Finds megatron.core's modules as usual and hands them the stand-in once they have run."""

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
    """The tracker of random states reaches CUDA's generators through these two, past torch.cuda's functions."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _replace_tensor_methods() -> None:
    tensor: Any = torch.Tensor
    # language_module.py and tensor_parallel/data.py move tensors by .cuda().
    tensor.cuda = lambda self, *_, **__: self
    # The dispatcher of experts marks tensors as used by a stream.
    tensor.record_stream = _nothing
    # The optimizers sort parameters by "torch.cuda.FloatTensor" and the like, and refuse any other.
    tensor.type = _tensor_type


def _tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    result = torch._C.TensorBase.type(self, dtype, *args, **kwargs)
    if dtype is None and _is_ours(str(sys._getframe(1).f_globals.get("__name__", ""))):
        return result.replace("torch.", "torch.cuda.", 1)
    return result


def _replace_moe_splits() -> None:
    """all_to_all wants its split sizes as numbers, and megatron makes numbers of CUDA tensors only."""
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
