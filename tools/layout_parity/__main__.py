"""Compare every recipe on every parallel layout with one process: losses, operands, resuming, rounding noise.

    python -m tools.layout_parity                      # two and four processes on CPU cores
    python -m tools.layout_parity --gpus 4             # by NCCL, on two and four of them
    python -m tools.layout_parity --layouts TP2,PP2 --recipes mxfp4_rht_sr

The exit code is 1 if anything differs by more than allowed, or if a launch failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_lowprec import get_recipe, recipes
from megatron_lowprec.errors import Parser, UserError, names, run_tool
from megatron_lowprec.training.config.paths import output_file
from megatron_lowprec.training.distributed.startup import versions
from megatron_lowprec.training.monitoring.run_metadata import commit
from tools.layout_parity import layouts, plan
from tools.layout_parity.compare import compare
from tools.layout_parity.launch import REPOSITORY, Runner
from tools.layout_parity.page import in_short, render

_REFERENCE_PARTS = 6  # at most, of the one-process runs

Content = dict[str, Any]
"""Content of the JSON file."""


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = Parser(prog="python -m tools.layout_parity", description=__doc__)
    known = ", ".join(dict.fromkeys(layout.name for layout in layouts.LAYOUTS))
    parser.add_argument("--gpus", type=int, default=0, help="number of GPUs to use; 0 for CPU cores (default)")
    parser.add_argument("--launches-at-once", type=int, help="launches that share the GPUs (default: one a GPU, or 1)")
    parser.add_argument("--recipes", type=names, help="default: all of the registry")
    parser.add_argument("--layouts", type=names, default=[], help=f"default: all that fit, of {known}")
    parser.add_argument("--checks", type=names, default=list(plan.CHECKS), help=f"of {', '.join(plan.CHECKS)}")
    parser.add_argument("--precisions", type=names, help="of fp64, fp32, bf16; default fp64,fp32, on GPUs fp32,bf16")
    parser.add_argument("--steps", type=int, default=6, help="steps of each run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=6, help="number of perturbed one-process runs, seeds 1, 2, …")
    parser.add_argument("--folder", type=Path, help="keep all files here, and continue from them (default: temporary)")
    parser.add_argument("--out", type=output_file, help="default reports/layout-parity-cpu.md or -gpu.md, .json beside")
    parser.add_argument("--compare", type=Path, metavar="FILE.json", help="run nothing: compare that file's rows again")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code."""
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(argv)
    if arguments.compare is not None:
        return _publish(json.loads(arguments.compare.read_text(encoding="utf-8")), arguments.out or arguments.compare)
    with tempfile.TemporaryDirectory(prefix="layout-parity-") as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        return run_tool(parser.prog, lambda: _run(folder, _selection(arguments), arguments, " ".join(argv)))


def _selection(arguments: argparse.Namespace) -> plan.Selection:
    chosen = arguments.recipes or [name for name in recipes() if not get_recipe(name).changes_training]
    for name in chosen:
        if get_recipe(name).changes_training:
            raise UserError(
                f"--recipes {name}: this tool changes recipes under one fp32 optimizer, and this one rounds state or "
                "gradients on each data-parallel rank, so layouts differ by more than the order of sums; "
                "tests/distributed/test_fp8_lm.py trains it on layouts"
            )
    precisions = arguments.precisions or (["fp32", "bf16"] if arguments.gpus else ["fp64", "fp32"])
    known = {layout.name for layout in (*layouts.LAYOUTS, *layouts.RESUMED)}
    for flag, given, allowed in (
        ("--layouts", arguments.layouts, known),
        ("--checks", arguments.checks, plan.CHECKS),
        ("--precisions", precisions, ("fp64", "fp32", "bf16")),
    ):
        unknown = [name for name in given if name not in allowed]
        if unknown:
            raise UserError(f"{flag} {','.join(unknown)}: not among {', '.join(sorted(allowed))}")
    if arguments.gpus:
        import torch

        if torch.cuda.device_count() < arguments.gpus:
            raise UserError(f"--gpus {arguments.gpus}: torch sees {torch.cuda.device_count()}")
    seeds = tuple(range(1, arguments.seeds + 1))
    return plan.Selection(
        chosen, arguments.layouts, arguments.checks, arguments.steps, seeds, arguments.gpus, precisions
    )


def _run(folder: Path, selected: plan.Selection, arguments: argparse.Namespace, given: str) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    out = arguments.out or REPOSITORY / "reports" / f"layout-parity-{'gpu' if selected.gpus else 'cpu'}.md"
    runner = Runner(folder, selected.gpus, arguments.launches_at_once or max(1, selected.gpus))
    started = time.monotonic()
    planned = plan.launches(selected, folder, min(runner.at_once, _REFERENCE_PARTS))
    header = _header(selected, given)
    written, shown = -1, 0

    def content() -> Content:
        rows = runner.rows()
        return {
            **header,
            "minutes": round((time.monotonic() - started) / 60, 1),
            "launches": [asdict(one) for one in runner.done],
            "rows": rows,
            "missing": plan.missing(planned, rows),
        }

    def tick() -> None:
        """Print finished launches, and write the rows so far, which survive if this process is killed."""
        nonlocal written, shown
        for one in runner.done[shown:]:
            print(f"{one.name}: {one.seconds:.0f} s" + (f", FAILED: {one.said}" if one.code else ""), flush=True)
        shown, found = len(runner.done), content()
        if len(found["rows"]) != written:
            written = len(found["rows"])
            _write(found, out)

    try:
        runner.run([plan.base_launch(selected, folder)], tick)
        if not any(one.code for one in runner.done):
            runner.run(planned, tick)
    finally:
        result = _publish(content(), out)
    return result


def _write(content: Content, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _publish(content: Content, out: Path) -> int:
    """Compare the rows, write them and the page, and return the exit code."""
    verdicts = compare(content["rows"])
    _write(content, out)
    failed = [f"launch {one['name']} failed: {one['said']}" for one in content["launches"] if one["code"]]
    notes = [*failed, f"Took {content['minutes']} minutes."]
    versions_of = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    at = content.get("commit") or "not recorded"
    conditions = f"`{content['command']}`: {content['device']}; {versions_of}; commit {at}."
    title = f"Recipes on parallel layouts, {content['device']}, {content['date']}"
    missing = content.get("missing", [])
    page = render(title, verdicts, content["facts"], conditions, notes, missing)
    out.with_suffix(".md").write_text(page, encoding="utf-8")
    wrong = [verdict for verdict in verdicts if not verdict.ok]
    for verdict in wrong:
        print(f"more than allowed: {verdict}", flush=True)
    print(f"{in_short(verdicts, missing)} {out.with_suffix('.md')}")
    return 1 if failed or wrong or missing or not verdicts else 0


def _header(selected: plan.Selection, given: str) -> Content:
    device = f"{len(os.sched_getaffinity(0))} CPU cores, gloo"
    if selected.gpus:
        import torch

        device = f"{selected.gpus} x {torch.cuda.get_device_name(0)}, NCCL"
    return {
        "command": f"python -m tools.layout_parity {given}".strip(),
        "date": datetime.date.today().isoformat(),
        "device": device,
        "versions": dict(versions()),
        "commit": commit("tools"),
        "facts": {
            "base": plan.BASE_STEPS,
            "steps": selected.steps,
            "batch": layouts.BATCH,
            "microbatch": layouts.MICROBATCH,
            "sequence": layouts.SEQUENCE,
            "seeds": list(selected.seeds),
        },
    }


if __name__ == "__main__":
    sys.exit(main())
