"""Every recipe on every layout against one process: losses, operands, stock layers, resuming, rounding noise.

    python -m tools.layout_parity                      # two and four processes on CPU cores
    python -m tools.layout_parity --gpus 4             # by NCCL, on two and four of them
    python -m tools.layout_parity --layouts TP2,PP2 --recipes mxfp4_rht_sr

The exit code is 1 where anything differs by more than it may, or a launch failed.
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
from megatron_lowprec.errors import Parser, UserError
from megatron_lowprec.training.config.paths import output_file
from megatron_lowprec.training.distributed.startup import versions
from tools.layout_parity import layouts, plan
from tools.layout_parity.judge import judge
from tools.layout_parity.launch import REPOSITORY, Runner
from tools.layout_parity.page import render
from tools.layout_parity.plan import Asked

_PARTS = 6  # that the one-process runs are cut into at most

Content = dict[str, Any]
"""What the JSON file holds."""


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = Parser(prog="python -m tools.layout_parity", description=__doc__)
    known = ", ".join(dict.fromkeys(layout.name for layout in layouts.LAYOUTS))
    parser.add_argument("--gpus", type=int, default=0, help="use so many GPUs of this machine; 0 for its CPU cores")
    parser.add_argument("--launches-at-once", type=int, help="default: one a GPU, which they share; on a CPU one")
    parser.add_argument("--recipes", type=_names, help="default: all of the registry")
    parser.add_argument("--layouts", type=_names, default=[], help=f"default: all that fit, of {known}")
    parser.add_argument("--checks", type=_names, default=list(plan.CHECKS), help=f"of {', '.join(plan.CHECKS)}")
    parser.add_argument("--precisions", type=_names, help="of fp64, fp32, bf16; default fp64,fp32, on GPUs fp32,bf16")
    parser.add_argument("--steps", type=int, default=6, help="of each run")
    parser.add_argument("--seeds", type=int, default=6, help="perturbed runs of one process; their seeds are 1, 2, …")
    parser.add_argument("--folder", type=Path, help="keep what is written, and go on from there; default temporary")
    parser.add_argument(
        "--out", type=output_file, help="default docs/results/layout-parity-cpu.md or -gpu.md; .json beside it"
    )
    parser.add_argument(
        "--judge", type=Path, metavar="FILE.json", help="run nothing: judge the rows of that file again"
    )
    return parser


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code."""
    arguments = build_parser().parse_args(argv)
    if arguments.judge is not None:
        return _publish(json.loads(arguments.judge.read_text(encoding="utf-8")), arguments.out or arguments.judge)
    given = " ".join(sys.argv[1:] if argv is None else argv)
    try:
        asked = _asked(arguments)
    except UserError as error:
        print(f"python -m tools.layout_parity: error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="matrix-") as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return _run(asked, arguments, folder, given)


def _asked(arguments: argparse.Namespace) -> Asked:
    chosen = arguments.recipes or [name for name in recipes() if not get_recipe(name).changes_training]
    for name in chosen:
        if get_recipe(name).changes_training:
            raise UserError(
                f"--recipes {name}: the matrix changes recipes under one fp32 optimizer, and this one has its own; "
                "tests/distributed/test_fp8_lm.py trains it on layouts"
            )
    precisions = arguments.precisions or (["fp32", "bf16"] if arguments.gpus else ["fp64", "fp32"])
    known = {layout.name for layout in (*layouts.LAYOUTS, *layouts.RESUMED)}
    for given, allowed, what in (
        (arguments.layouts, known, "--layouts"),
        (arguments.checks, plan.CHECKS, "--checks"),
        (precisions, ("fp64", "fp32", "bf16"), "--precisions"),
    ):
        unknown = [name for name in given if name not in allowed]
        if unknown:
            raise UserError(f"{what} {','.join(unknown)}: wants some of {', '.join(sorted(allowed))}")
    if arguments.gpus:
        import torch

        if torch.cuda.device_count() < arguments.gpus:
            raise UserError(f"--gpus {arguments.gpus}: torch sees {torch.cuda.device_count()}")
    seeds = tuple(range(1, arguments.seeds + 1))
    return Asked(chosen, arguments.layouts, arguments.checks, arguments.steps, seeds, arguments.gpus, precisions)


def _run(asked: Asked, arguments: argparse.Namespace, folder: Path, given: str) -> int:
    out = arguments.out or _default_out(asked.gpus)
    runner = Runner(folder, asked.gpus, arguments.launches_at_once or max(1, asked.gpus))
    started = time.monotonic()
    wanted = plan.launches(asked, folder, min(runner.at_once, _PARTS))
    header = _header(asked, given)
    written, shown = -1, 0

    def content() -> Content:
        rows = runner.rows()
        return {
            **header,
            "minutes": round((time.monotonic() - started) / 60, 1),
            "launches": [asdict(one) for one in runner.done],
            "rows": rows,
            "missing": plan.missing(wanted, rows),
        }

    def tick() -> None:
        """Say what has ended, and keep what there is: a run that is killed leaves it behind."""
        nonlocal written, shown
        for one in runner.done[shown:]:
            print(f"{one.name}: {one.seconds:.0f} s" + (f", FAILED: {one.said}" if one.code else ""), flush=True)
        shown, found = len(runner.done), content()
        if len(found["rows"]) != written:
            written = len(found["rows"])
            _write(found, out)

    try:
        runner.run([plan.base_launch(asked, folder)], tick)
        if not any(one.code for one in runner.done):
            runner.run(wanted, tick)
    finally:
        result = _publish(content(), out)
    return result


def _write(content: Content, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _publish(content: Content, out: Path) -> int:
    """Rows, verdicts and the page of them; the exit code."""
    verdicts = judge(content["rows"])
    _write({**content, "verdicts": [asdict(verdict) for verdict in verdicts]}, out)
    failed = [f"launch {one['name']} failed: {one['said']}" for one in content["launches"] if one["code"]]
    took = f"Took {content['minutes']} minutes."
    versions_of = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    conditions = f"`{content['command']}`: {content['device']}; {versions_of}."
    title = f"Recipes on parallel layouts, {content['device']}, {content['date']}"
    missing = content.get("missing", [])
    page = render(title, verdicts, content["facts"], [conditions], [*failed, took], missing)
    out.with_suffix(".md").write_text(page, encoding="utf-8")
    wrong = [verdict for verdict in verdicts if not verdict.ok]
    for verdict in wrong:
        where = f"{verdict.check}, {verdict.model} {verdict.layout}, {verdict.recipe}, {verdict.precision}"
        print(f"more than allowed: {where}: {verdict.says}", flush=True)
    without = f", {len(missing)} checks without a result" if missing else ""
    print(f"{len(verdicts)} cells, {len(wrong)} more than allowed{without}; {out.with_suffix('.md')}")
    return 1 if failed or wrong or missing or not verdicts else 0


def _default_out(gpus: int) -> Path:
    return REPOSITORY / "docs" / "results" / f"layout-parity-{'gpu' if gpus else 'cpu'}.md"


def _header(asked: Asked, given: str) -> Content:
    return {
        "command": f"python -m tools.layout_parity {given}".strip(),
        "date": datetime.date.today().isoformat(),
        "device": _device(asked.gpus),
        "versions": dict(versions()),
        "facts": {
            "base": plan.BASE_STEPS,
            "steps": asked.steps,
            "batch": layouts.BATCH,
            "microbatch": layouts.MICROBATCH,
            "sequence": layouts.SEQUENCE,
            "seeds": list(asked.seeds),
        },
    }


def _device(gpus: int) -> str:
    if not gpus:
        return f"{len(os.sched_getaffinity(0))} CPU cores, gloo"
    import torch

    return f"{gpus} x {torch.cuda.get_device_name(0)}, NCCL"


if __name__ == "__main__":
    sys.exit(main())
