"""What tests of Blackwell's block-scaled units share: recipes, a pretended GPU, and passes of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from megatron_lowprec.linear.backends import resolved, table
from megatron_lowprec.linear.backends.blackwell_mx import dense
from megatron_lowprec.linear.backends.blackwell_mx.start_check import StartChecks
from megatron_lowprec.linear.backends.table import BACKENDS, choose
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.registry import get_recipe, recipes
from megatron_lowprec.recipe.schema import LinearRecipe
from megatron_lowprec.shipped import names_in

IN, OUT = 128, 256
TOKENS = (37, 0, 64)  # of experts; a tile, a block and a transform end within
STEP = RngStep(7, 0)


def load(name: str) -> LinearRecipe:
    return get_recipe(name) if name in recipes() else load_recipe(name)


def on_blackwell(recipe: LinearRecipe, arch: str = "sm100") -> frozenset[str]:
    """The GEMMs that the backend takes."""
    chosen = {gemm: choose(gemm, spec, Target(arch, IN, OUT)).backend for gemm, spec in recipe.gemms.items()}
    return frozenset(gemm for gemm, backend in chosen.items() if backend == "blackwell_mx")


ALL = [*recipes(), *(f"configs/recipes/{name}.yaml" for name in names_in("configs/recipes"))]
BLOCK_SCALED = [name for name in ALL if on_blackwell(load(name))]


@contextmanager
def pretended(arch: str = "sm100") -> Iterator[None]:
    """Layers on the CPU resolve their GEMMs as on a GPU, to rows that run on a CPU."""
    rows = tuple(row for row in BACKENDS if row.name != "hopper_fp8")
    with patch.object(table, "BACKENDS", rows), patch.object(resolved, "arch_of", lambda _: arch):
        yield


def gemms_of(name: str, expert: int = 0, cache_weights: bool = False) -> LinearGemms:
    return LinearGemms(load(name), LinearId(3, "fc1", expert), 1, AmaxHistory, cache_weights=cache_weights)


def passes(
    name: str, cache_weights: bool = False, finite: bool = False, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Two microbatches through a layer, the second one's weight gradient accumulated."""
    gemms, found = gemms_of(name, cache_weights=cache_weights), dict[str, torch.Tensor]()
    for history, _ in gemms.histories.values():
        history.to(torch.device(device))
    generator = torch.Generator().manual_seed(4)
    w, total = torch.randn(OUT, IN, generator=generator).bfloat16().to(device), torch.ones(OUT, IN, device=device)
    for microbatch in range(2):
        rng_step = RngStep(7, microbatch)
        x, dy = (torch.randn(100, size, generator=generator).bfloat16() for size in (IN, OUT))
        x[3] = 0.0
        if not finite:
            x[5, 7] = torch.inf
        bias = torch.randn(OUT, generator=generator).bfloat16()
        x, dy, bias = (each.to(device) for each in (x, dy, bias))
        found[f"y {microbatch}"], saved = gemms.forward(x, w, rng_step, bias_O=bias, save_input=True)
        grad = gemms.grad_output(dy, rng_step)
        found[f"dx {microbatch}"] = gemms.dgrad(grad, saved.weight, rng_step, saved.weight_amax)
        accumulate = total if microbatch else None
        found[f"dw {microbatch}"] = gemms.wgrad(grad, saved.input(), rng_step, accumulate_into=accumulate).clone()
        for history, _ in gemms.histories.values():
            history.update()
    return found


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for what, value in want.items():
        assert got[what].dtype == value.dtype
        assert torch.equal(got[what].nan_to_num(nan=1e30), value.nan_to_num(nan=1e30)), what


@contextmanager
def unchecked(required: bool = False) -> Iterator[StartChecks]:
    """A pretended GPU whose products are to be checked, with checks of its own."""
    start = StartChecks()
    start.required = required
    with (
        pretended(),
        patch.object(dense, "CHECKS", start),
        patch.object(StartChecks, "applies", staticmethod(lambda _: True)),
    ):
        yield start
