"""Compare the losses of this tree with those of an earlier revision or another Megatron-core, bit for bit.

    python tools/compare_losses.py --base 54bfb2a --layouts one tp2
    python tools/compare_losses.py --base HEAD --base-site .venv/megatron-core-0.18.2 --recipes bf16,fp8_lm

trains gpt_tiny for some iterations under each recipe in both trees, on CPU processes, and prints the recipes whose
losses or gradient norms differ. Exit code 1 if any does. A change without a purpose in numerics has none; a change of
numerics names its recipes in the CHANGELOG. The base's results are kept under runs/losses, by its commit.
"""

import json
import os
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_lowprec.errors import Parser, UserError, names, run_tool
from megatron_lowprec.files import atomic_write, json_lines
from megatron_lowprec.recipe.registry import get_recipe, recipes

REPOSITORY = Path(__file__).resolve().parents[1]
LAYOUTS = {
    "one": (1, []),
    "tp2": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "dp2": (2, []),
    "zero": (1, ["--use-distributed-optimizer"]),
    "moe": (1, ["--config", "configs/models/moe_tiny.yaml"]),
    "deepseek": (1, ["--config", "configs/models/deepseek_tiny.yaml"]),
}
"""Name -> processes and flags; the last two are other models than gpt_tiny."""

Losses = dict[str, list[float]]
"""``lm loss`` and ``grad-norm`` of each iteration."""


def git(*arguments: str) -> bytes:
    """Output of git in this repository; UserError with its words if it fails."""
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, check=False)
    if done.returncode:
        raise UserError(f"git {' '.join(arguments)}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def train(tree: Path, site: Path | None, recipe: str, layout: str, iterations: int, cache: Path) -> Losses:
    """Losses of one run of gpt_tiny in a tree; UserError if it fails."""
    processes, flags = LAYOUTS[layout]
    if get_recipe(recipe).activations.swiglu_input != "none":
        flags = [*flags, "--swiglu"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with TemporaryDirectory() as folder:
        options = {
            "recipe": recipe,
            "train-iters": iterations,
            "log-interval": 1,
            "eval-iters": 0,
            "data-cache-path": cache,
            "save": folder,
        }
        done = subprocess.run(
            [
                *(sys.executable, *(torchrun if processes > 1 else []), "pretrain_gpt.py", *flags, "--no-save"),
                *(word for name, value in options.items() for word in (f"--{name}", str(value))),
            ],
            cwd=tree,
            env=_environment(tree, site),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UserError(f"{recipe} under {layout} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        rows = list(json_lines(Path(folder) / "metrics.jsonl", print))
    return {key: [row[key] for row in rows if key in row] for key in ("lm loss", "grad-norm")}


def _environment(tree: Path, site: Path | None) -> dict[str, str]:
    paths = os.pathsep.join(str(path) for path in (site, tree) if path is not None)
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def measure(
    tree: Path, site: Path | None, chosen: list[str], layouts: list[str], iterations: int, at_once: int
) -> dict[str, Losses]:
    """``<recipe> <layout>`` -> losses, of all pairs in a tree; with the packages in ``site`` before installed ones."""
    pairs = [(recipe, layout) for layout in layouts for recipe in chosen]
    label = site.name if site else tree.name
    cache = REPOSITORY / "data" / "cache"  # the tokenized text of gpt_tiny, equal in both trees

    def run(pair: tuple[str, str]) -> Losses:
        found = train(tree, site, *pair, iterations, cache)
        print(f"{label}: {' '.join(pair)} ends at {found['lm loss'][-1]:.6f}", file=sys.stderr, flush=True)
        return found

    with ThreadPoolExecutor(at_once) as pool:
        return {" ".join(pair): losses for pair, losses in zip(pairs, pool.map(run, pairs))}


def base_losses(commit: str, site: Path | None, arguments: tuple[list[str], list[str], int, int]) -> dict[str, Losses]:
    """Losses of a commit: those kept from an earlier call, and the missing ones by training its tree."""
    chosen, layouts, iterations, at_once = arguments
    kept = REPOSITORY / "runs" / "losses" / f"{commit}-{iterations}{f'-{site.name}' if site else ''}.json"
    known: dict[str, Losses] = json.loads(kept.read_text()) if kept.exists() else {}
    with TemporaryDirectory() as folder:
        tree = Path(folder) / commit[:8]
        for layout in layouts:
            missing = [name for name in chosen if f"{name} {layout}" not in known]
            if missing and not tree.exists():
                with tarfile.open(fileobj=BytesIO(git("archive", commit))) as archive:
                    archive.extractall(tree, filter="data")
            known |= measure(tree, site, missing, [layout], iterations, at_once)
            kept.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(kept, json.dumps(known))
    return known


def first_difference(old: Losses, new: Losses) -> int | None:
    """The first iteration, from 1, whose loss or gradient norm differs; NaN equals NaN. None if none does."""
    return min(
        (
            step
            for key in new
            for step, (before, after) in enumerate(zip_longest(old[key], new[key]), 1)
            if repr(before) != repr(after)
        ),
        default=None,
    )


def main() -> int:
    """Exit code: 0 if no loss differs."""
    parser = Parser(description=__doc__)
    parser.add_argument("--base", required=True, metavar="REVISION", help="the revision to compare with")
    parser.add_argument(
        "--base-site", metavar="FOLDER", help="packages of the base, such as another release of Megatron-core, unpacked"
    )
    parser.add_argument("--recipes", type=names, help="names with commas between them; default: all of this tree")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["one", "tp2"])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    args = parser.parse_args()
    commit = git("rev-parse", "--verify", f"{args.base}^{{commit}}").decode().strip()
    arguments = (args.recipes or list(recipes()), args.layouts, args.iterations, args.at_once)
    site = Path(args.base_site).resolve() if args.base_site else None
    if site is not None and not site.is_dir():
        raise UserError(f"--base-site {args.base_site}: there is no such folder")
    base = f"{args.base} with {site.name}" if site else args.base
    before, after = base_losses(commit, site, arguments), measure(REPOSITORY, None, *arguments)
    firsts = {name: first_difference(before[name], losses) for name, losses in after.items()}
    differing = {name: first for name, first in firsts.items() if first is not None}
    for name, first in differing.items():
        old, new = before[name]["lm loss"][-1], after[name]["lm loss"][-1]
        print(f"{name}: differs from iteration {first} on; ends at {new:.6f}, at {base} at {old:.6f}")
    equal = len(after) - len(differing)
    print(f"{equal} of {len(after)} runs of {args.iterations} iterations equal those of {base} in each bit")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(run_tool("compare_losses.py", main))
