"""The launches of a comparison: each is one torchrun with groups of checks that share its process group."""

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
"""Input of ``worker.py``: a row's name, the driver's flags, checks, recipes, and arguments of the checks."""


@dataclass(frozen=True)
class Selection:
    """What the command line selects."""

    recipes: Sequence[str]
    layouts: Sequence[str] = ()
    checks: Sequence[str] = CHECKS
    steps: int = 6
    seeds: Sequence[int] = tuple(range(1, 9))
    gpus: int = 0
    precisions: Sequence[str] = ("fp64", "fp32")

    def of(self, layouts: Sequence[Layout]) -> list[Layout]:
        """The selected ones of these layouts that fit on the GPUs."""
        fitting = [layout for layout in layouts if not self.gpus or layout.processes <= self.gpus]
        return [layout for layout in fitting if not self.layouts or layout.name in self.layouts]


@dataclass
class Launch:
    """One torchrun."""

    name: str
    processes: int
    groups: list[Group] = field(default_factory=list)


def base_launch(selected: Selection, folder: Path) -> Launch:
    """One process that writes the checkpoints: the same weights and moments for each kind of optimizer state."""
    bases: dict[tuple[str, str, bool], None] = {}
    for layout in [*selected.of(LAYOUTS), *(selected.of(RESUMED) if "resume" in selected.checks else [])]:
        for precision in dict.fromkeys((*selected.precisions, "fp32", "bf16")):
            bases[layout.model, precision, False] = None
            if precision != "fp64":
                bases[layout.model, precision, layout.distributed_optimizer] = None
    launch = Launch("base", 1)
    for model, precision, distributed in bases:
        one = Layout("1", 1, ("--use-distributed-optimizer",) if distributed else (), model)
        what: Group = {"checks": ["base"], "recipes": ["bf16"], "steps": BASE_STEPS}
        what["save"] = str(base_folder(folder, model, precision, distributed))
        # Without clipping: a norm's last bits depend on how gradients lie in memory.
        flags, name = ("--clip-grad", "0"), {"distributed": distributed}
        launch.groups.append(group(one, precision, selected, None, flags=flags, name=name, **what))
    return launch


def launches(selected: Selection, folder: Path, reference_parts: int = 1) -> list[Launch]:
    """Everything after ``base_launch``; the one-process runs, the longest, in parts that run at the same time."""
    chosen = selected.of(LAYOUTS)
    found = []
    for part in range(reference_parts if "losses" in selected.checks else 0):
        launch = Launch(f"reference {part + 1}", 1)
        for layout in ONE:
            if any(other.model == layout.model for other in chosen):
                launch.groups += _references(layout, selected, folder, selected.recipes[part::reference_parts])
        found.append(launch)
    for layout in chosen:
        groups = checks_of(layout, selected, folder)
        found.append(Launch(f"{layout.model} {layout.name}", layout.processes, groups))
    for layout in selected.of(RESUMED) if "resume" in selected.checks else ():
        what: Group = {"checks": ["resume"], "recipes": list(selected.recipes), "steps": RESUME_STEPS}
        what["save"] = str(folder / "resume" / layout.name.replace(" ", "-"))
        groups = [group(layout, "bf16", selected, folder, dropout=0.1, **what)]
        found.append(Launch(f"resume {layout.name}", layout.processes, groups))
    return [launch for launch in found if launch.groups]


def missing(launches: Sequence[Launch], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Planned checks that have no row because their launch failed or was stopped."""
    present = {row_key(row) for row in rows}
    return [
        ", ".join([launch.name, *(str(part) for part in key[2:] if part is not None)])
        for launch in launches
        for group in launch.groups
        for key in keys_of(group).values()
        if key not in present
    ]


def keys_of(group: Group) -> dict[tuple[str, str], tuple[Any, ...]]:
    """(recipe, check) -> key of its row, for all rows of a group."""
    pairs = [(recipe, check) for recipe in group["recipes"] for check in group["checks"]]
    return {(recipe, check): row_key({**group["name"], "recipe": recipe, "check": check}) for recipe, check in pairs}


def row_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The identity of a row."""
    named = ("model", "layout", "precision", "distributed", "linears", "same_noise", "recipe", "check")
    return tuple(row.get(name) for name in named)


def _references(layout: Layout, selected: Selection, folder: Path, recipes: Sequence[str]) -> list[Group]:
    """One process's losses, and their spread where sums are not exact."""
    kinds = {}  # recipe -> perturbations of the runs that the layouts' runs are compared with
    for name in recipes:
        kinds[name] = [] if layout.model != "gpt" else ["moved"]
        kinds[name] += ["reordered"] if layout.model != "gpt" or draws(name) else []
    what: Group = {"recipes": list(recipes), "seeds": list(selected.seeds), "spreads": kinds}
    checks = {
        precision: ["losses"] if precision == "fp64" else ["losses", "spread"] for precision in selected.precisions
    }
    return [group(layout, precision, selected, folder, checks=checks[precision], **what) for precision in checks]


def checks_of(layout: Layout, selected: Selection, folder: Path) -> list[Group]:
    """All checks of a layout but resuming."""
    groups: list[Group] = []
    recipes = list(selected.recipes)
    for precision in selected.precisions:
        # Megatron-core's distributed optimizer knows fp32, bf16 and fp16; fp64 operands are rounded to fp32 ones first.
        in_fp64 = {"losses": not layout.distributed_optimizer, "operands": False}
        checks = [name for name in in_fp64 if name in selected.checks and (in_fp64[name] or precision != "fp64")]
        if checks:
            groups.append(group(layout, precision, selected, folder, checks=checks, recipes=recipes))
    if "operands" in selected.checks and layout.tensor_parallel > 1 and layout.model == "gpt":
        gated = replace(layout, model="gated")
        groups.append(group(gated, "fp32", selected, None, checks=["operands"], recipes=recipes))
    if "stock" in selected.checks:
        for linears, flags in (("ours", ()), ("stock", ("--no-lowprec-linears",))):
            flags = ("--no-gradient-accumulation-fusion", *flags)
            what: Group = {"checks": ["losses"], "recipes": ["bf16"], "steps": 3, "name": {"linears": linears}}
            groups.append(group(layout, "bf16", selected, folder, flags=flags, **what))
    stochastic = [name for name in recipes if rounds_stochastically(name)]
    if "noise" in selected.checks and layout.name == "DP2" and stochastic:
        for same in (False, True):
            what = {"checks": ["noise"], "recipes": stochastic, "name": {"same_noise": same}}
            groups.append(group(layout, "fp32", selected, folder, flags=(SAME_NOISE,) if same else (), **what))
    return groups


def draws(recipe: str) -> bool:
    """Whether a recipe uses random numbers; data-parallel ranks then draw other numbers than one process."""
    transforms = [gemm.hadamard for gemm in get_recipe(recipe).gemms.values()]
    return rounds_stochastically(recipe) or any(t is not None and t.signs == "random" for t in transforms)


def rounds_stochastically(recipe: str) -> bool:
    """Whether any operand is rounded stochastically."""
    gemms = get_recipe(recipe).gemms.values()
    operands = [quant for gemm in gemms for quant in (gemm.input, gemm.weight, gemm.grad_output) if quant is not None]
    return any(quant.rounding == "stochastic" for quant in operands)


def base_folder(folder: Path, model: str, precision: str, distributed: bool) -> Path:
    """The folder of a checkpoint of ``base_launch``."""
    return folder / "base" / f"{model}-{precision}-{'distributed' if distributed else 'plain'}"


def group(
    layout: Layout,
    precision: str,
    selected: Selection,
    folder: Path | None,
    *,
    flags: Sequence[str] = (),
    dropout: float = 0.0,
    name: Mapping[str, Any] | None = None,
    **what: Any,
) -> Group:
    """A model on a layout at a precision, loaded from its checkpoint in ``folder`` or, with None, initialized.

    Args:
        flags: of the driver.
        name: goes into every row.
        what: checks, recipes and arguments of the checks (``worker.py``).
    """
    every = [*MODELS[layout.model], *layout.flags, *flags]
    every += ["--hidden-dropout", str(dropout), "--attention-dropout", str(dropout)]
    every += ["--bf16" if precision == "bf16" else "--no-bf16"]
    # Megatron-core computes gradient norms in fp32 only.
    every += ["--clip-grad", "0"] if precision == "fp64" else []
    # Bits that are compared must not come from atomics.
    every += ["--deterministic-mode"] if selected.gpus else []
    if folder is not None:
        every += ["--load", str(base_folder(folder, layout.model, precision, layout.distributed_optimizer))]
    named = {"model": layout.model, "layout": layout.name, "processes": layout.processes, "precision": precision}
    return {"name": {**named, **(name or {})}, "flags": every, "steps": selected.steps, **what}
