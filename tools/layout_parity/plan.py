"""What has to run: launches, each of groups that one process group serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_lowprec.recipe.registry import get_recipe
from tools.layout_parity.layouts import LAYOUTS, MODELS, ONE, RESUMED, SAME_NOISE, Layout

BASE_STEPS, RESUME_STEPS = 2, 3
CHECKS = ("losses", "operands", "stock", "resume", "noise")

Group = dict[str, Any]
"""What ``worker.py`` takes: a row's name, the driver's flags, checks, recipes, and what the checks read."""


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    recipes: Sequence[str]
    layouts: Sequence[str] = ()
    checks: Sequence[str] = CHECKS
    steps: int = 6
    seeds: Sequence[int] = tuple(range(1, 9))
    gpus: int = 0

    precisions: Sequence[str] = ("fp64", "fp32")

    def chosen(self, layouts: Sequence[Layout]) -> list[Layout]:
        """Of these those that were asked for and fit."""
        return [
            layout
            for layout in layouts
            if (not self.gpus or layout.processes <= self.gpus) and (not self.layouts or layout.name in self.layouts)
        ]


@dataclass
class Launch:
    """One torchrun."""

    name: str
    processes: int
    groups: list[Group] = field(default_factory=list)


def base_launch(asked: Asked, folder: Path) -> Launch:
    """One process that writes the checkpoints: the same weights and moments for each kind of optimizer state."""
    launch = Launch("base", 1)
    for model, precision, distributed in _bases(asked):
        launch.groups.append(
            group(
                Layout("1", 1, ("--use-distributed-optimizer",) if distributed else (), model),
                precision,
                asked,
                None,
                name={"distributed": distributed},
                # a norm's last bits depend on how gradients lie in memory
                flags=("--clip-grad", "0"),
                checks=["base"],
                recipes=["bf16"],
                steps=BASE_STEPS,
                save=str(base_folder(folder, model, precision, distributed)),
            )
        )
    return launch


def launches(asked: Asked, folder: Path, reference_parts: int = 1) -> list[Launch]:
    """Everything after ``base_launch``; the one-process runs, the longest, cut into parts that run at once."""
    found = []
    if "losses" in asked.checks:
        for part in range(reference_parts):
            launch = Launch(f"reference {part + 1}", 1)
            for layout in ONE:
                if any(other.model == layout.model for other in asked.chosen(LAYOUTS)):
                    launch.groups += references(layout, asked, folder, asked.recipes[part::reference_parts])
            found.append(launch)
    found += [
        Launch(f"{layout.model} {layout.name}", layout.processes, checks_of(layout, asked, folder))
        for layout in asked.chosen(LAYOUTS)
    ]
    if "resume" in asked.checks:
        found += [
            Launch(f"resume {layout.name}", layout.processes, [_resume(layout, asked, folder)])
            for layout in asked.chosen(RESUMED)
        ]
    return [launch for launch in found if launch.groups]


def missing(launches: Sequence[Launch], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was to run and has no row: its launch failed, or was stopped."""
    there = {row_key(row) for row in rows}
    found = []
    for launch in launches:
        for group in launch.groups:
            for recipe in group["recipes"]:
                for check in group["checks"]:
                    key = row_key({**group["name"], "recipe": recipe, "check": check})
                    if key not in there:
                        found.append(", ".join([launch.name, *(str(part) for part in key[2:] if part is not None)]))
    return found


def row_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a row is of."""
    named = ("model", "layout", "precision", "distributed", "linears", "same_noise", "recipe", "check")
    return tuple(row.get(name) for name in named)


def references(layout: Layout, asked: Asked, folder: Path, recipes: Sequence[str]) -> list[Group]:
    """One process's losses, and their spread where sums are not exact."""
    return [
        group(
            layout,
            precision,
            asked,
            folder,
            checks=["losses"] if precision == "fp64" else ["losses", "spread"],
            recipes=list(recipes),
            seeds=list(asked.seeds),
            spreads={name: _spreads(layout, name) for name in recipes},
        )
        for precision in asked.precisions
    ]


def checks_of(layout: Layout, asked: Asked, folder: Path) -> list[Group]:
    """All checks of a layout but resuming."""
    groups: list[Group] = []
    for precision in asked.precisions:
        # Megatron-core's distributed optimizer knows fp32, bf16 and fp16; fp64 operands are rounded to fp32 ones first.
        wanted = [("losses", not layout.distributed_optimizer), ("operands", False)]
        checks = [name for name, in_fp64 in wanted if name in asked.checks and (in_fp64 or precision != "fp64")]
        if checks:
            groups.append(group(layout, precision, asked, folder, checks=checks, recipes=list(asked.recipes)))
    if "operands" in asked.checks and layout.tensor_parallel > 1 and layout.model == "gpt":
        gated = replace(layout, model="gated")
        groups.append(group(gated, "fp32", asked, None, checks=["operands"], recipes=list(asked.recipes)))
    if "stock" in asked.checks:
        for linears, flags in (("ours", ()), ("stock", ("--no-lowprec-linears",))):
            flags = ("--no-gradient-accumulation-fusion", *flags)
            what: Group = {"checks": ["losses"], "recipes": ["bf16"], "steps": 3, "name": {"linears": linears}}
            groups.append(group(layout, "bf16", asked, folder, flags=flags, **what))
    drawn = [name for name in asked.recipes if rounds_at_random(name)]
    if "noise" in asked.checks and layout.name == "DP2" and drawn:
        for same in (False, True):
            what = {"checks": ["noise"], "recipes": drawn, "name": {"same_noise": same}}
            groups.append(group(layout, "fp32", asked, folder, flags=(SAME_NOISE,) if same else (), **what))
    return groups


def _spreads(layout: Layout, recipe: str) -> list[str]:
    """What the runs are perturbed by that the layouts' runs of a recipe will be compared with."""
    if layout.model != "gpt":
        return ["reordered"]
    return ["moved", "reordered"] if draws(recipe) else ["moved"]


def _resume(layout: Layout, asked: Asked, folder: Path) -> Group:
    save = str(folder / "resume" / layout.name.replace(" ", "-"))
    what: Group = {"checks": ["resume"], "recipes": list(asked.recipes), "steps": RESUME_STEPS, "save": save}
    return group(layout, "bf16", asked, folder, dropout=0.1, **what)


def draws(recipe: str) -> bool:
    """Whether anything of a recipe is drawn at random: then data-parallel ranks draw other numbers than one process."""
    gemms = get_recipe(recipe).gemms.values()
    transformed = any(gemm.hadamard is not None and gemm.hadamard.signs == "random" for gemm in gemms)
    return transformed or rounds_at_random(recipe)


def rounds_at_random(recipe: str) -> bool:
    """Whether any operand is rounded stochastically."""
    gemms = get_recipe(recipe).gemms.values()
    operands = [quant for gemm in gemms for quant in (gemm.input, gemm.weight, gemm.grad_output) if quant is not None]
    return any(quant.rounding == "stochastic" for quant in operands)


def _bases(asked: Asked) -> list[tuple[str, str, bool]]:
    """(model, precision, distributed optimizer) of every checkpoint that is loaded."""
    found: dict[tuple[str, str, bool], None] = {}
    for layout in [*asked.chosen(LAYOUTS), *(asked.chosen(RESUMED) if "resume" in asked.checks else [])]:
        for precision in dict.fromkeys((*asked.precisions, "fp32", "bf16")):
            found[layout.model, precision, False] = None
            if precision != "fp64":
                found[layout.model, precision, layout.distributed_optimizer] = None
    return list(found)


def base_folder(folder: Path, model: str, precision: str, distributed: bool) -> Path:
    """Where that checkpoint lies."""
    return folder / "base" / f"{model}-{precision}-{'distributed' if distributed else 'plain'}"


def group(
    layout: Layout,
    precision: str,
    asked: Asked,
    folder: Path | None,
    *,
    flags: Sequence[str] = (),
    dropout: float = 0.0,
    name: Mapping[str, Any] | None = None,
    **what: Any,
) -> Group:
    """A model on a layout at a precision, as its checkpoint in ``folder`` has it, or as it is drawn.

    Args:
        flags: of the driver.
        name: goes into every row.
        what: checks, recipes and what else the checks read (``worker.py``).
    """
    every = [*MODELS[layout.model], *layout.flags, *flags]
    every += ["--hidden-dropout", str(dropout), "--attention-dropout", str(dropout)]
    every += ["--bf16" if precision == "bf16" else "--no-bf16"]
    # Megatron-core finds norms of gradients in fp32 alone.
    every += ["--clip-grad", "0"] if precision == "fp64" else []
    # Bits that are compared must not come from atomics.
    every += ["--deterministic-mode"] if asked.gpus else []
    if folder is not None:
        every += ["--load", str(base_folder(folder, layout.model, precision, layout.distributed_optimizer))]
    named = {"model": layout.model, "layout": layout.name, "processes": layout.processes, "precision": precision}
    return {"name": {**named, **(name or {})}, "flags": every, "steps": asked.steps, **what}
