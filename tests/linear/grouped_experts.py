"""Experts of one layer, by the loop or by the grouped ops' references on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from unittest.mock import patch

import torch

from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.linear import grouped_gemms
from megatron_lowprec.linear.backends import resolved
from megatron_lowprec.linear.backends.emulated import grouped as grouped_emulated
from megatron_lowprec.linear.backends.hopper_fp8 import grouped as grouped_hopper_fp8
from megatron_lowprec.linear.grouped_gemms import GroupedLinearGemms
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.coverage import primary_weight_spec
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.registry import get_recipe
from tests.kernels.mx_recipes import nvfp4_recipe

STEP = RngStep(0, 0)
TOKENS, IN, OUT = (5, 0, 150, 32), 128, 256
ROUNDED = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-18}  # sums of another order, rounded once
NVFP4 = nvfp4_recipe()
TETRAJET, UE5M3 = "configs/recipes/tetrajet.yaml", "configs/recipes/ue5m3.yaml"
SHARD = {"O": ShardSlice(256, gate_offset=128, gate_stride=256)}


@contextmanager
def grouped_ops(arch: str = "cpu", module_of_ops: str = "reference") -> Iterator[list[str]]:
    """The grouped paths on a CPU, as on ``arch``, with the ops' references; the ops that were taken."""
    taken = []

    def load(op: str) -> object:
        taken.append(op)
        return import_module(f"megatron_lowprec.kernels.{op}.{module_of_ops}")

    with ExitStack() as stack:
        for module in (grouped_emulated, grouped_hopper_fp8):
            stack.enter_context(patch.object(module, "load", load))
        stack.enter_context(patch.object(grouped_gemms, "fuses", lambda _: True))
        stack.enter_context(patch.object(resolved, "arch_of", lambda _: arch))
        yield taken


def passes(
    name: str, accumulates: bool, saves: bool = True, primary: bool = False, save_memory: bool = False
) -> dict[str, torch.Tensor]:
    """Two microbatches through the experts of one layer; ``primary`` for FP8 primary weights.

    ``name`` is that of a recipe or of a file, and after spaces overrides.
    """
    base, *overrides = name.split()
    recipe = NVFP4 if name == NVFP4.name else load_recipe(base, overrides)
    experts = [
        LinearGemms(
            recipe,
            LinearId(3, "fc1", expert, spans=SHARD, split="O"),
            1,
            AmaxHistory,
            cache_weights=True,
            save_memory=save_memory,
        )
        for expert in range(4)
    ]
    generator, found = torch.Generator().manual_seed(4), {}
    weights = [torch.randn(OUT, IN, generator=generator).bfloat16() for _ in experts]
    if primary:
        spec = primary_weight_spec(get_recipe(name))
        assert spec is not None
        weights = [Fp8Weight.of(weight, spec) for weight in weights]
    totals = [torch.full((OUT, IN), torch.nan) if accumulates else None for _ in experts]
    for gemms in experts:
        gemms.main_grad_is_zero = accumulates
    for microbatch, tokens in enumerate((TOKENS, TOKENS[::-1])):
        group, rng_step = GroupedLinearGemms(experts), RngStep(7, microbatch)
        x, dy = (torch.randn(sum(tokens), size, generator=generator).bfloat16() for size in (IN, OUT))
        found[f"y {microbatch}"], saved = group.forward(x, tokens, weights, rng_step, save_input=saves)
        saved = saved.without_tensors().with_tensors(saved.tensors())
        found[f"dx {microbatch}"], dw = group.backward(dy, tokens, saved, rng_step, totals)
        found[f"dw {microbatch}"] = torch.stack(dw).clone()
        for tensor in experts[0].histories:
            histories = [gemms.histories[tensor][0] for gemms in experts]
            found[f"amax of {tensor} {microbatch}"] = torch.cat([history.newest for history in histories])
            for history in histories:
                history.update()
    return found
