"""One launch: ``torchrun -m tools.layout_parity.worker JOB.json``, one layout or several with as many processes.

JOB.json holds ``out``, a file for rows as JSON lines, and groups. A group is a model on a layout at a precision. It is
built once, and each of its recipes runs the group's checks. Rows are written as they come. A check that has a row is
not repeated, so a launch that was killed continues.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.files import json_lines
from megatron_lowprec.training.distributed import startup

Row = dict[str, Any]


def main(job: Mapping[str, Any]) -> None:
    """Run all groups; a recipe that does not fit a layout's sizes gets a failed row, other errors end the launch."""
    ranks = startup.prepare_environment()
    import torch.distributed as dist

    from tools.layout_parity.double import in_double
    from tools.layout_parity.plan import keys_of, row_key
    from tools.layout_parity.setup import Setup, configured

    # Before the process group is initialized: no rank writes yet.
    present = {row_key(row) for row in json_lines(Path(job["out"]), print)}
    device = None
    with Path(job["out"]).open("a", encoding="utf-8") as file:
        for group in job["groups"]:
            missing = [pair for pair, key in keys_of(group).items() if key not in present]
            if not missing:
                continue
            config = configured(group["flags"], ranks)
            if device is None:
                device = startup.initialize(config, ranks)
            else:
                dist.barrier()
                startup.take_down_layout()
                startup.lay_out(config)
            with in_double() if group["name"]["precision"] == "fp64" else nullcontext():
                setup = Setup.of(config, ranks, device)
                for recipe, check in missing:
                    started = time.perf_counter()
                    try:
                        found = CHECKS[check](setup, recipe, group)
                    except UserError as error:
                        found = {"failed": str(error)}
                    seconds = round(time.perf_counter() - started, 3)
                    row = {**group["name"], "recipe": recipe, "check": check, **found, "seconds": seconds}
                    if ranks.rank == 0:
                        file.write(json.dumps(row) + "\n")
                        file.flush()
    if device is not None:
        startup.finalize()


def _base(setup: Any, recipe: str, group: Row) -> Row:
    """Some steps from initialization, and the checkpoint that all layouts load."""
    setup.enter(recipe)
    setup.train(group["steps"], setup.progress)
    setup.save(Path(group["save"]), setup.progress)
    return {"weights": setup.weights()}


def _losses(setup: Any, recipe: str, group: Row) -> Row:
    setup.enter(recipe)
    setup.calibrate()
    losses = _exact(setup.train(group["steps"]))
    # Megatron-core's own layers have no recipe.
    return {"losses": losses, "gemms": {} if setup.config.no_lowprec_linears else setup.trainer.runtime.gemms()}


def _spread(setup: Any, recipe: str, group: Row) -> Row:
    """The same steps from weights moved by one unit in the last place, and also with samples in another order."""
    found: Row = {kind: {} for kind in group["spreads"][recipe]}
    for kind in found:
        for seed in group["seeds"]:
            setup.enter(recipe)
            setup.perturb(seed)
            setup.calibrate()
            found[kind][seed] = _exact(setup.train(group["steps"], order=seed if kind == "reordered" else None))
    return found


def _resume(setup: Any, recipe: str, group: Row) -> Row:
    """2n steps in one run; then n steps, a checkpoint, all state overwritten, the checkpoint loaded, n steps."""
    import torch.distributed as dist

    steps, folder = group["steps"], Path(group["save"])
    startup.seed(setup.config)
    setup.enter(recipe)
    whole = setup.train(2 * steps)
    startup.seed(setup.config)
    setup.enter(recipe)
    progress = replace(setup.progress)
    resumed = setup.train(steps, progress)
    setup.save(folder, progress)
    setup.enter(recipe)
    setup.snapshot.spoil()
    startup.seed(replace(setup.config, seed=4321))
    resumed += setup.train(steps, setup.load(folder))
    dist.barrier()
    if setup.ranks.rank == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return {"whole": _exact(whole), "resumed": _exact(resumed)}


def _operands(setup: Any, recipe: str, group: Row) -> Row:
    from tools.layout_parity import operands

    return operands.operands(setup, recipe)


def _noise(setup: Any, recipe: str, group: Row) -> Row:
    from tools.layout_parity import operands

    return operands.noise(setup, recipe, group.get("layers"))


def _exact(losses: list[float]) -> list[str]:
    return [loss.hex() for loss in losses]


CHECKS: Mapping[str, Callable[[Any, str, Row], Row]] = {
    "base": _base,
    "losses": _losses,
    "spread": _spread,
    "resume": _resume,
    "operands": _operands,
    "noise": _noise,
}

if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
