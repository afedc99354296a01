"""Check MX and NVFP4 products of this GPU; writes one text to paste into an issue, one JSON and a table for a page.

``scripts/check_native.sh`` runs it. For the linear layers of each model and each recipe, every operand is compared with
the quantizer's reference, stochastic rounding with the frequencies of its fractions, and every product with the
emulated one, by the check that runs make at their start. Training steps follow, beside bf16 and TransformerEngine where
that is installed. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.files import atomic_write
from megatron_lowprec.kernels.dispatch import arch_of
from megatron_lowprec.linear.backends import resolved, table
from megatron_lowprec.linear.backends.blackwell_mx.start_check import CHECKS, NativeCheckWarning, StartChecks
from megatron_lowprec.linear.backends.blackwell_mx.why_not import WITH_BLOCK_SCALES
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.text_tables import Column, markdown_table, named, render
from tools.bench.machine import header, header_lines
from tools.bench.shapes import LinearShape, models

RECIPES = ("mxfp8", "mxfp8_e5m2_grad", "mxfp8_2d", "mxfp4_rht_sr", "nvfp4_all", "quartet2")
_COLUMNS = (
    *named("recipe", "model", "layer"),
    Column("checks", "checks", "d"),
    Column("worst", "worst, of its bound", ".2g"),
    *named("fault"),
)


def layer_checks(recipe: str, shape: LinearShape, tokens: int, device: torch.device) -> dict[str, Any]:
    """The check of one layer's operands and products: forward and backward pass, with and without accumulation."""
    CHECKS.reset()
    gemms = LinearGemms(get_recipe(recipe), LinearId(1, shape.name), 0, AmaxHistory)
    generator = torch.Generator().manual_seed(0)
    sizes = (shape.out_features, shape.in_features), (tokens, shape.in_features), (tokens, shape.out_features)
    w, x, dy = (torch.randn(size, generator=generator).bfloat16().to(device) for size in sizes)
    total = torch.zeros(sizes[0], device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NativeCheckWarning)  # the fault is in the table
        for microbatch in range(2):
            rng_step = RngStep(0, microbatch)
            _, saved = gemms.forward(x, w, rng_step)
            grad = gemms.grad_output(dy, rng_step)
            gemms.dgrad(grad, w, rng_step)
            gemms.wgrad(grad, saved.input(), rng_step, accumulate_into=total)
    errors = [(isinstance(key[1], int), check.error) for key, check in CHECKS.results.items()]  # a size, or a tensor
    of_products, of_operands = ([error for product, error in errors if product is which] for which in (True, False))
    return {
        "recipe": recipe,
        "model": shape.model,
        "layer": shape.name,
        **CHECKS.as_json(),
        "operands": len(of_operands),
        "products": len(of_products),
        "worst": max([*of_operands, *of_products], default=0.0),
        "worst_product": max(of_products, default=0.0),
    }


def page_table(layers: Sequence[dict[str, Any]], about: str) -> str:
    """A Markdown table by recipe, as docs/results/gpu-tests.md has it, below a line on machine and commit."""
    rows = []
    for recipe in dict.fromkeys(one["recipe"] for one in layers):
        of_recipe = [one for one in layers if one["recipe"] == recipe]
        counts = [str(sum(one[key] for one in of_recipe)) for key in ("operands", "products")]
        worst = f"{max(one['worst_product'] for one in of_recipe):.2g}"
        faults = "; ".join(f"{one['layer']} of {one['model']}: {one['fault']}" for one in of_recipe if one["fault"])
        rows.append([f"`{recipe}`", str(len(of_recipe)), *counts, worst, faults or "none"])
    headings = ["recipe", "layers", "operands", "products", "worst product, of its bound", "faults"]
    return "\n".join([about, "", *markdown_table(headings, rows, left=["recipe", "faults"])])


@contextmanager
def rehearsed() -> Iterator[None]:
    """GEMMs resolve as on compute capability 10.0, and are checked, on any device."""
    rows = tuple(row for row in table.BACKENDS if row.name != "hopper_fp8")
    with (
        patch.object(table, "BACKENDS", rows),
        patch.object(resolved, "arch_of", lambda _: "sm100"),
        patch.object(StartChecks, "applies", staticmethod(lambda _: True)),
    ):
        yield


def all_checks(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Checks of the recipes in the layers of the models."""
    if not options.rehearse and arch_of(device) not in WITH_BLOCK_SCALES:
        raise UserError(
            f"{arch_of(device)} has no block-scaled products to check, only {', '.join(WITH_BLOCK_SCALES)} do; "
            "--rehearse checks the same sources on bf16 values"
        )
    shapes = [shape for model in models(options.shapes.split(",")) for shape in model.linears]
    with rehearsed() if options.rehearse else nullcontext():
        try:
            return [
                layer_checks(recipe, shape, options.tokens, device)
                for recipe in options.recipes.split(",")
                for shape in shapes
            ]
        finally:
            CHECKS.reset()


def step_times(options: argparse.Namespace, out: Path) -> tuple[str, Any]:
    """Output and numbers of ``tools.bench step``, in a process of its own."""
    file = out / "steps.json"
    command = [sys.executable, "-m", "tools.bench", "step", "--shapes", options.shapes, "--recipes", options.recipes]
    command += [
        "--iterations",
        "10",
        "--out",
        str(file),
        *(["--peers", "te"] if find_spec("transformer_engine") else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    numbers = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr, numbers


def check(options: argparse.Namespace, command: str) -> int:
    """Run the checks, then the steps; print the text and write both files."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("check_native needs a GPU, and torch finds none: --device cpu --rehearse runs the model of one")
    layers = all_checks(options, device)
    options.out.mkdir(parents=True, exist_ok=True)
    text, steps = ("", None) if options.no_steps else step_times(options, options.out)
    about, arch = {**header(device, []), "command": command}, arch_of(device)
    faults = [f"{one['recipe']}, {one['layer']} of {one['model']}: {one['fault']}" for one in layers if one["fault"]]
    rows = [{**one, "checks": len(one["checks"]), "fault": "yes" if one["fault"] else ""} for one in layers]
    verdict = f"{len(faults)} of {len(layers)} layers FAILED" if faults else f"all {len(layers)} layers passed"
    about_run = ", a rehearsal without block-scaled products" if options.rehearse else ""
    whole = "\n".join(
        [*header_lines(about), f"{arch}: {verdict}{about_run}", "", render(rows, _COLUMNS), *faults, "", text]
    )
    print(whole.rstrip())
    record = {"header": about, "arch": arch, "rehearsal": options.rehearse, "layers": layers, "steps": steps}
    atomic_write(options.out / "check_native.txt", whole.rstrip() + "\n")
    atomic_write(options.out / "check_native.md", page_table(layers, ", ".join(header_lines(about))) + "\n")
    atomic_write(options.out / "check_native.json", json.dumps(record, indent=1) + "\n")
    return 1 if faults else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 if a check failed, or 2 for a UserError."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("check_native"), help="folder of check_native.txt, .json and .md"
    )
    parser.add_argument("--shapes", default="345m,1.3b", help="models (default: 345m,1.3b)")
    parser.add_argument("--recipes", default=",".join(RECIPES), help=f"recipes (default: {','.join(RECIPES)})")
    parser.add_argument("--tokens", type=int, default=4096, help="rows of an activation (default: 4096)")
    parser.add_argument("--no-steps", action="store_true", help="leave out the training steps")
    parser.add_argument("--rehearse", action="store_true", help="on any device, by its bf16 products or a CPU's model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options, given = parser.parse_args(argv), sys.argv[1:] if argv is None else argv
    return run_tool("check_native.py", lambda: check(options, " ".join(["python -m tools.check_native", *given])))


if __name__ == "__main__":
    sys.exit(main())
