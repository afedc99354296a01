"""One linear layer without bias of TransformerEngine and torchao, forward and backward: rows of ``linear --peers``.

TransformerEngine's GEMM writes the weight gradient to fp32 ``main_grad``; torchao's is copied there afterwards. Rows
with cached weights add it, as ours do. A layer keeps the weight it was built with, whatever inputs it gets.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.te import te_recipe
from tools.bench.cases.layer import Tensors, tensors
from tools.bench.measure import distance, errors_as_faults, one_line
from tools.bench.shapes import LinearShape

PEERS = {"te": ("transformer_engine", "transformer_engine.pytorch"), "torchao": ("torchao", "torchao.float8")}
"""Name on the command line -> distribution, module."""
TE_RECIPES = ("bf16", "fp8_delayed", "fp8_current", "fp8_blockwise")

Layer = Callable[[Tensors], None]
Make = Callable[[Tensors], Layer]


def peer_layers(names: Sequence[str], device: torch.device) -> tuple[dict[str, Make], list[str]]:
    """Row -> function that builds its layer from the first inputs, for installed peers; and a line about each peer."""
    makes: dict[str, Make] = {}
    notes = []
    for name in names:
        distribution, _ = PEERS[name]
        reason = absent(name, device)
        if reason is not None:
            notes.append(f"peer {name} is missing: {reason}")
            continue
        makes |= {"te": _te_layers, "torchao": _torchao_layers}[name]()
        notes.append(f"peer {name}: {distribution} {importlib.metadata.version(distribution)}")
    if any(row.startswith("TE ") for row in makes):
        notes.append("TE fp8_blockwise: fp32 scales, as ours; its own default is powers of two")
    return makes, notes


def absent(name: str, device: torch.device) -> str | None:
    """The reason why a peer cannot be measured, or None; imports it."""
    distribution, module = PEERS[name]
    if importlib.util.find_spec(distribution) is None:
        return "not installed; tools/bench/README.md says how to install it"
    if name == "te" and device.type != "cuda":
        return "it needs a GPU"
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return f"cannot be imported: {one_line(error)}"
    return None


# ---- TransformerEngine
def _te_layers() -> dict[str, Make]:
    rows: dict[str, Make] = {}
    for name in TE_RECIPES:
        recipe = get_recipe(name)
        rows[f"TE {name}"] = _te_make(recipe, cached=False)
        if recipe.quantized:
            rows[f"TE {name}, cached"] = _te_make(recipe, cached=True)
    return rows


def _te_make(asked: Recipe, cached: bool) -> Make:
    def make(t: Tensors) -> Layer:
        import transformer_engine.pytorch as te

        recipe = te_recipe(asked) if asked.quantized else None
        out_features, in_features = t.weight.shape
        options = {"params_dtype": t.weight.dtype, "device": t.weight.device, "fuse_wgrad_accumulation": True}
        linear = te.Linear(in_features, out_features, bias=False, **options)
        linear.weight.data.copy_(t.weight.detach())
        linear.weight.overwrite_main_grad = not cached  # as in ours, in the first microbatch of a step
        # None: quantize the weight in each call; True, then False: cache it, as in a step's microbatches.
        first: bool | None = True if cached else None

        def call(t: Tensors) -> None:
            nonlocal first
            t.x.grad = None
            linear.weight.main_grad = t.main_grad
            with te.autocast(recipe=recipe) if recipe is not None else nullcontext():
                y = linear(t.x, is_first_microbatch=first)
            y.backward(t.dy)
            first = False if cached else None

        return call

    return make


# ---- torchao
def _torchao_layers() -> dict[str, Make]:
    return {f"torchao {name}, compiled": _torchao_make(name) for name in ("tensorwise", "rowwise")}


def _torchao_make(name: str) -> Make:
    def make(t: Tensors) -> Layer:
        import torch._dynamo
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # Code compiled for another shape would turn this one's sizes into variables.
        torch._dynamo.reset()
        out_features, in_features = t.weight.shape
        linear = torch.nn.Linear(in_features, out_features, bias=False, device="meta", dtype=t.weight.dtype)
        linear.weight = torch.nn.Parameter(t.weight.detach())
        linear = convert_to_float8_training(linear, config=Float8LinearConfig.from_recipe_name(name))
        compiled = torch.compile(linear, dynamic=False)

        def call(t: Tensors) -> None:
            t.x.grad = linear.weight.grad = None
            compiled(t.x).backward(t.dy)
            assert linear.weight.grad is not None
            t.main_grad.copy_(linear.weight.grad)

        return call

    return make


# ---- the gate
@errors_as_faults
def fault(row: str, make: Make, device: torch.device, generator: torch.Generator) -> str | None:
    """Error of a peer's gradients if too large, or too small for FP8; None if it is as expected.

    FP8 keeps 3 or 4 significant bits (1% to 10% of such sums), bf16 eight.
    """
    least, most = (0.0, 0.01) if row.endswith("bf16") else (0.01, 0.15)
    t = tensors(LinearShape("check", "check", 256, 384), 512, device, generator)
    call = make(t)
    for _ in range(3):  # delayed scaling uses scales of earlier steps
        t.main_grad.zero_()
        call(t)
    call(t)
    x, weight, dy = (tensor.detach().double() for tensor in (t.x, t.weight, t.dy))
    assert t.x.grad is not None
    added = 2 if row.endswith("cached") else 1  # the last call's gradient, added to the one before or replacing it
    for name, found, exact in (("dgrad", t.x.grad, dy @ weight), ("wgrad", t.main_grad, added * dy.t() @ x)):
        if not least < (error := distance(found, exact)) < most:
            return f"{name} has a relative error of {error:.1e}; expected {least:g} to {most:g}"
    return None
