"""Experiments on numbers: what formats, scales, rounding and accumulators do to products, against float64.

    megatron-lowprec lab all --out runs/numerics
    megatron-lowprec lab dot-snr --out runs/numerics
    megatron-lowprec lab operand-error runs/RUN/captures/iteration_10/*.safetensors --out runs/numerics
    megatron-lowprec lab captured-products runs/RUN/captures/*/*.safetensors --device cuda --out runs/numerics
    megatron-lowprec lab recipe-diff mxfp8 mxfp8_ocp --out runs/numerics
    megatron-lowprec lab report runs/RUN --out runs/numerics

An experiment writes NAME.json, NAME.txt and its figures into the folder. Experiments use the quantizers of the recipes.
Data come from a seeded generator on the CPU, so every device gets the same operands. operand-error, recipe-diff and
captured-products take operands that a run wrote by --capture-step; the last compares with a Hopper GPU's products.
report makes one HTML page of all experiments in the folder, and of the telemetry of the runs that it is given
(--log-quantization-interval).
"""

import argparse
import importlib
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.training.config.paths import create_folder

# Experiment: its module in megatron_lowprec.lab.
EXPERIMENTS = {
    "formats": "number_formats",
    "scale-rounding": "scale_rounding",
    "clipping": "clipping",
    "gemm-variance": "gemm_variance",
    "unbiasedness": "unbiasedness",
    "dot-snr": "dot_snr",
    "simfloat": "simfloat_study",
    "accumulator": "accumulator",
}
# The same for experiments with arguments: not in "all".
ON_ARGUMENTS = {
    "operand-error": "captured.operand_error",
    "recipe-diff": "captured.recipe_diff",
    "captured-products": "captured.captured_products",
}


def main(arguments: Sequence[str] | None = None, program: str = "numerics.py") -> int:
    """Exit code: 0, or 2 for a UserError."""
    parser = Parser(prog=program, description=__doc__)
    parser.add_argument(
        "experiment", choices=("all", *EXPERIMENTS, *ON_ARGUMENTS, "report"), help="all: each without arguments"
    )
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="ARGUMENT",
        help="operand-error, captured-products: FILE...; recipe-diff: RECIPE RECIPE [FILE...]; report: [RUN...]",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for tables and figures")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    parser.add_argument("--seed", type=int, default=1234, help="of operands and draws (default: 1234)")
    parser.add_argument(
        "--recipes",
        type=lambda names: names.split(","),
        default=[],
        metavar="NAME,...",
        help="operand-error, captured-products: instead of the files' own",
    )
    parser.add_argument("--draws", type=int, default=16, help="of captured operands, at least 2 (default: 16)")
    parser.add_argument("--quick", action="store_true", help="a smoke test: few samples, short vectors")
    args = parser.parse_args(arguments)
    given = [Path(each).name for each in args.arguments]  # results do not name folders of the machine
    idle = [f"--{name}" for name in _idle(args.experiment) if getattr(args, name) != parser.get_default(name)]
    argv = [args.experiment, *given, "--out", "DIR", "--seed", str(args.seed), "--device", args.device]
    if args.experiment in ON_ARGUMENTS:
        argv += [*(["--recipes", ",".join(args.recipes)] if args.recipes else []), "--draws", str(args.draws)]

    def work() -> None:
        if idle:
            raise UserError(f"{', '.join(idle)} was given, but {args.experiment} does not read it; leave it out")
        _run(args, [*argv, "--quick"] if args.quick else argv)

    return run_tool(program, work)


def _idle(experiment: str) -> tuple[str, ...]:
    """Flags that an experiment does not read."""
    if experiment == "report":
        return ("recipes", "draws", "seed", "device", "quick")
    return () if experiment in ON_ARGUMENTS else ("recipes", "draws")


def _run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    import torch

    from megatron_lowprec.lab.experiment import Lab, header, write

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda was asked, but torch sees no GPU; leave it out to run on the CPU")
    if args.draws < 2:
        raise UserError(f"--draws {args.draws} was asked, but a mean needs at least 2")
    if args.experiment == "report":
        _report(args)
        return
    if args.experiment not in ON_ARGUMENTS and args.arguments:
        raise UserError(
            f"{args.experiment} takes no files and no recipes, but {' '.join(args.arguments)} was given; leave it out"
        )
    create_folder(args.out, "--out")
    lab = Lab(torch.device(args.device), args.seed, args.quick)
    conditions = header(lab.device, ["megatron-lowprec lab", *map(shlex.quote, argv)])
    for name in EXPERIMENTS if args.experiment == "all" else (args.experiment,):
        start = time.perf_counter()
        module = importlib.import_module(f"megatron_lowprec.lab.{(EXPERIMENTS | ON_ARGUMENTS)[name]}")
        given = (args.arguments, args.recipes, args.draws) if name in ON_ARGUMENTS else ()
        result = module.run(lab, *given)
        write(result, args.out / name, conditions)
        print(f"{name}: {time.perf_counter() - start:.0f} s, {args.out / name}.txt")


def _report(args: argparse.Namespace) -> None:
    from megatron_lowprec.lab import page

    create_folder(args.out, "--out")
    print(page.write(args.out, [Path(run) for run in args.arguments]))
