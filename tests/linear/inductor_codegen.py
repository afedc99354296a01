"""Inductor's code for two converted layers on a GPU that this machine has not; nothing is launched.

``python -m tests.linear.inductor_codegen fp8_current`` prints a JSON line: what the generated code calls, whether its
kernels of ours compile for sm_90, and whether their machine code and launches are those of eager mode.

The graphs are traced on the CPU, as Inductor would be given them on a GPU but for the device, and moved.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from megatron_lowprec import convert, get_recipe
from megatron_lowprec.kernels.cast_fp8 import reference as cast_reference
from megatron_lowprec.kernels.dispatch import load
from megatron_lowprec.kernels.launch import Specialized
from megatron_lowprec.linear.backends import traced
from tools.bench.instructions import CompilingDriver, compiling, disassembled

TOKENS, HIDDEN = 512, 256
_H200 = SimpleNamespace(
    name="H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    total_memory=1 << 37,
    warp_size=32,
)
_LAUNCH = re.compile(r"(\w+)\.run\((.*), stream=")
_KERNEL = re.compile(r"^(\w+) = async_compile\.triton\('(\w+)', '''\n(.*?)''', device_str='cuda'\)", re.DOTALL | re.M)


class _Generated(Exception):  # noqa: N818 - not an error
    """Ends a compilation that has its code."""


class Codegen:
    """Compiles graphs up to their code.

    Attributes:
        codes: of each graph.
        casts: arguments of ``plan`` for each cast.
    """

    def __init__(self) -> None:
        self.codes, self.casts = list[str](), list[dict[str, Any]]()

    def compile(self, graph: Any, inputs: Any, is_backward: bool) -> Any:
        """Generate the code of a graph, and return a callable with results of zeros."""
        from torch._guards import detect_fake_mode
        from torch._inductor.compile_fx import compile_fx_inner
        from torch.fx.passes.fake_tensor_prop import FakeTensorProp

        mode, gpu, moved = detect_fake_mode(inputs), torch.device("cuda", 0), copy.deepcopy(graph)
        assert mode is not None
        for node in moved.graph.nodes:
            node.kwargs = {name: gpu if isinstance(each, torch.device) else each for name, each in node.kwargs.items()}
        moved.recompile()
        with pretended_gpu(), self._recording(), mode:
            fakes = [
                torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda")
                if isinstance(each, torch.Tensor)
                else each
                for each in inputs
            ]
            FakeTensorProp(moved, mode).propagate_dont_convert_inputs(*fakes)
        with pretended_gpu(), self._recording():
            try:
                compile_fx_inner(moved, fakes, is_backward=is_backward)
            except Exception as error:
                if _Generated.__name__ not in repr(error):
                    raise
        results = [each.meta["val"] if hasattr(each, "meta") else each for each in _output(graph)]
        run: Any = lambda _: [None if each is None else _zeros(each) for each in results]  # noqa: E731
        run._boxed_call = True
        return run

    @contextmanager
    def _recording(self) -> Iterator[None]:
        from torch._inductor.graph import GraphLowering

        def stops(lowering: Any) -> None:
            code = lowering.codegen()[0]
            self.codes.append(getattr(code, "value", code))
            raise _Generated

        plan = load("cast_fp8").plan

        def recorded(x: Any, rule: Any, ways: Any, *others: Any) -> Any:
            named = dict(zip(("rowwise", "columnwise", "sums"), ways, strict=True))
            shape = [TOKENS if isinstance(size, torch.SymInt) else size for size in x.shape]
            self.casts.append({"shape": shape, "rule": rule, **named})
            return plan(x, rule, ways, *others)

        with patch.object(GraphLowering, "compile_to_module", stops), patch.object(load("cast_fp8"), "plan", recorded):
            yield


def _output(graph: Any) -> Any:
    return next(iter(reversed(graph.graph.nodes))).args[0]


def _zeros(like: Any) -> Any:
    if not isinstance(like, torch.Tensor):
        return int(like)
    return torch.zeros([int(size) for size in like.shape], dtype=like.dtype)


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Inductor takes this machine for one with an H200; no tensor may have data there."""
    from torch._dynamo.device_interface import CudaInterface
    from triton.runtime.driver import driver

    driver.set_active(CompilingDriver(90))
    answers = {
        "torch.cuda.is_available": True,
        "torch.cuda.is_initialized": True,
        "torch.cuda.device_count": 1,
        "torch.cuda.current_device": 0,
        "torch.cuda.get_device_capability": (9, 0),
        "torch.cuda.get_device_properties": _H200,
        "torch.cuda.get_rng_state": torch.zeros(1),
        "torch.cuda.set_rng_state": None,
        "torch.cuda._lazy_init": None,
        "torch.cuda._exchange_device": 0,
        "torch.cuda._maybe_exchange_device": 0,
        "torch._subclasses.fake_tensor.init_gpu_context": None,
        "torch._inductor.scheduler.has_triton": True,
        "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": None,
        "megatron_lowprec.kernels.cast_fp8.rule.converts_fp8": True,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch(name, lambda *_, answer=answer: answer))
        stack.enter_context(patch("torch.version.cuda", "13.0"))
        for name in ("get_device_properties", "get_compute_capability"):
            answer = _H200 if name == "get_device_properties" else 90
            stack.enter_context(patch.object(CudaInterface, name, staticmethod(lambda *_, answer=answer: answer)))
            if hasattr(CudaInterface.Worker, name):
                answers_worker = staticmethod(lambda *_, answer=answer: answer)
                stack.enter_context(patch.object(CudaInterface.Worker, name, answers_worker))
        yield


def generate(recipe: str, dynamic: bool, bias: bool) -> Codegen:
    """The code of forward and backward pass of two layers."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    found = Codegen()
    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: found.compile(graph, inputs, is_backward=False),
        bw_compiler=lambda graph, inputs: found.compile(graph, inputs, is_backward=True),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    with (
        patch.object(traced, "INDUCTOR_LAUNCHES", True),
        patch("megatron_lowprec.linear.backends.resolved.arch_of", lambda _: "sm90"),
        patch("megatron_lowprec.linear.backends.hopper_fp8.dense.load", lambda _: cast_reference),
    ):
        layers = (nn.Linear(HIDDEN, HIDDEN, bias=bias), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN, bias=bias))
        model = convert(nn.Sequential(*layers).bfloat16(), get_recipe(recipe), skip_slower=False)
        x = torch.randn(TOKENS, HIDDEN).bfloat16().requires_grad_()
        y = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic or None)(x)
        y.backward(y.detach())
    return found


def eager(casts: list[dict[str, Any]]) -> tuple[set[tuple[str, str]], list[list[int]]]:
    """Eager kernels with their machine code, and sizes of their launches with the number of programs last.

    Inductor specializes on the divisibility of all sizes; eager kernels leave some out, which no number depends on.
    """
    import triton

    from megatron_lowprec.kernels.cast_fp8 import triton_amax as amax

    code, sizes, launch = set[tuple[str, str]](), list[list[int]](), Specialized.launch

    def recorded(self: Any, programs: Any, device: Any, arguments: Any, key: Any) -> None:
        first = programs if isinstance(programs, int) else programs[0]
        given = [each for each in arguments if isinstance(each, int) and not isinstance(each, bool)]
        sizes.append([*given[-5:], first])
        launch(self, programs, device, arguments, key)

    module = load("cast_fp8")
    with (
        patch.object(module, "_cast_kernel", triton.jit(module._cast_kernel.fn)),
        patch.object(amax, "_amax_kernel", triton.jit(amax._amax_kernel.fn)),
        compiling(90, lambda kernel, built: code.add((kernel.__name__, _canonical(built.asm["cubin"])))),
        patch.object(Specialized, "launch", recorded),
    ):
        for each in casts:
            x, ways = torch.zeros(each["shape"]).bfloat16(), {k: each[k] for k in ("rowwise", "columnwise", "sums")}
            known = torch.ones(1) if each["rule"].granularity == "tensor" else None
            module.cast_fp8(x, each["rule"], amax=known, **ways)
    return code, sizes


def compiled(code: str) -> set[tuple[str, str]]:
    """Kernels of ours in a generated module with their machine code, compiled as the module does; by eager names."""
    from torch._inductor.codecache import PyCodeCache

    found = set[tuple[str, str]]()
    for _, name, source in _KERNEL.findall(code):
        if "user_autotune" in source:
            text = source.replace("\\\\", "\\").replace("\\'\\'\\'", "'''")
            kernel = getattr(PyCodeCache.load(text), name)
            with pretended_gpu():
                result = kernel._precompile_config(kernel.configs[0])
            built = getattr(result, "kernel", result)
            found.add((name.replace("planned_", ""), _canonical(built.asm["cubin"])))
    return found


def _canonical(cubin: bytes) -> str:
    """Instructions, without names, and with parameters numbered as they occur: eager kernels have more of them."""
    numbers = dict[str, str]()
    text = "\n".join(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", disassembled(cubin), re.MULTILINE))
    text = re.sub(r"`\(\w+\)", "", text)
    return re.sub(r"c\[0x0\]\[0x\w+\]", lambda found: numbers.setdefault(found[0], f"parameter {len(numbers)}"), text)


def names_of_globals() -> dict[str, set[str]]:
    """Name -> the values that functions called by the cast kernel have under it: Inductor writes one of a name."""
    from triton import JITFunction

    found, todo = dict[str, set[str]](), [load("cast_fp8")._planned_cast_kernel]
    seen = set[int]()
    while todo:
        function = todo.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for name in function.fn.__code__.co_names:
            if name in function.fn.__globals__:
                value = function.fn.__globals__[name]
                found.setdefault(name, set()).add(repr(value))
                todo += [value] if isinstance(value, JITFunction) else []
    return found


def main(recipe: str, *options: str) -> None:
    """Print what the generated code has."""
    found = generate(recipe, dynamic="dynamic" in options, bias="bias" in options)
    lines = [line for code in found.codes for line in code.splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines)
    launches = [(name, arguments.split(", ")) for name, arguments in _LAUNCH.findall(text)]
    ours = [arguments for name, arguments in launches if not name.startswith("triton_")]
    sizes = [[int(each) for each in arguments if each.isdigit()][:-2] for arguments in ours]
    code, want = eager(found.casts)
    print(
        json.dumps(
            {
                "casts": sum("planned_cast_kernel" in name for name, _ in launches),
                "products": len(re.findall(r"\._scaled_mm(?:\.default)?\(", text)),
                "host_tensors": len(re.findall(r"= empty_strided_cpu\w*\(|device='cpu'", text)),
                "operators": sorted(set(re.findall(r"= torch\.ops\.megatron_lowprec\.(\w+)", text))),
                "other_code": sorted({name for name, _ in set().union(*map(compiled, found.codes)) ^ code}),
                "same_sizes": sorted(sizes) == sorted(want),
                "ambiguous": sorted(name for name, values in names_of_globals().items() if len(values) > 1),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
