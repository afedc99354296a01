"""Command line of ``python -m tools.bench``. Exit code 1: a correctness check failed; 2: a mistake in the arguments."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_lowprec.errors import Parser, UserError
from megatron_lowprec.training.config.paths import output_file
from tools.renamed import current_names

WHAT = {
    "quantize": "fused MX quantizers against a plain copy",
    "linear": "a linear layer's forward and backward over bf16",
    "step": "a whole training step over bf16",
    "scaling": "a whole training step on several GPUs over one, data parallel",
    "ops": "the ops of a step besides its linear layers, against torch and Megatron-core",
    "overhead": "what the Hadamard transform and stochastic rounding cost on top of FP8 and MXFP4",
}
RENAMED = {"around": "ops", "--pieces": "--ops"}
# The overhead at 70B is about as small as the noise of one round; a round of step starts processes.
ROUNDS = {"quantize": 2, "linear": 3, "step": 1, "scaling": 1, "ops": 3, "overhead": 7}


def build_parser() -> argparse.ArgumentParser:
    """One subcommand a measurement; most options are common to all."""
    common = Parser(add_help=False)
    common.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a smoke test, tiny sizes only")
    common.add_argument("--shapes", type=_names, help="models of the table: 345m,1.3b,6.7b,7b,70b")
    common.add_argument("--recipes", type=_names, help="recipes to compare; bf16 is always among them")
    beside = Parser(add_help=False)
    beside.add_argument("--peers", type=_names, default=[], help="measure these in the same run: te,torchao")
    common.add_argument("--linears", type=_names, default=["qkv", "proj", "fc1", "fc2"], help="of a decoder layer")
    common.add_argument("--tokens", type=int, default=8192, help="rows of an activation (default: %(default)s)")
    common.add_argument("--rounds", type=int, help=f"alternatives are measured in turn so many times: {ROUNDS}")
    common.add_argument("--rep-ms", type=float, default=100.0, help="milliseconds of one measurement")
    common.add_argument("--seed", type=int, help="of random inputs; a fresh one each run unless given, and printed")
    common.add_argument("--out", type=output_file, metavar="FILE.json", help="also write everything there")
    parser = Parser(prog="python -m tools.bench", description=__doc__)
    what = parser.add_subparsers(dest="what", required=True)
    parents = {"linear": [common, beside], "step": [common, beside]}
    parts = {name: what.add_parser(name, parents=parents.get(name, [common]), help=text) for name, text in WHAT.items()}
    quantize = parts["quantize"]
    quantize.add_argument("--sizes", default="8192x4096,8192x16384,16384x8192", help="ROWSxCOLUMNS, where no --shapes")
    quantize.add_argument("--formats", type=_names, default=["e2m1", "e4m3"])
    quantize.add_argument("--kinds", type=_names, default=["nearest", "sr", "rht64", "rht64+sr"])
    quantize.add_argument("--directions", type=_names, default=["rows", "columns", "both"])
    parts["linear"].add_argument("--no-graph", action="store_true", help="do not replay the kernels as a CUDA graph")
    for name, iterations in (("step", 20), ("scaling", 15)):
        parts[name].add_argument("--micro-batch", type=int, help="sequences of a GPU; the table's unless given")
        parts[name].add_argument("--warm-up", type=int, default=5, help="iterations before the timed ones")
        parts[name].add_argument("--iterations", type=int, default=iterations, help="timed iterations")
    parts["step"].add_argument(
        "--cuda-graphs", action="store_true", help="also with --cuda-graph-impl local, in rows of their own"
    )
    scaling = parts["scaling"]
    scaling.add_argument("--gpus", type=_names, default=["1", "8"], help="one after the other; on a CPU processes")
    scaling.add_argument("--models", type=_names, dest="shapes", help="the same as --shapes")
    parts["ops"].add_argument("--ops", type=_names, help="norm,bias,gelu,dropout,cast,loss,attention (default: all)")
    parts["overhead"].add_argument(
        "--full-accumulation", action="store_true", help="FP8 GEMM without fast accumulation"
    )
    parts["overhead"].add_argument("--only", choices=("fp8", "backward"), help="one of the two tables")
    return parser


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main(argv: Sequence[str]) -> int:
    """Exit code."""
    argv = current_names(argv, RENAMED)
    args = build_parser().parse_args(argv)
    if args.device == "cpu":
        # Triton reads it when a kernel is defined.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    try:
        return _run(args, argv)
    except UserError as error:
        print(f"python -m tools.bench: error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    import torch

    from tools.bench.machine import header
    from tools.bench.measure import Bench
    from tools.bench.report import Report

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no GPU; --device cpu tries the tool itself, at tiny sizes such as --shapes smoke")
    args.rounds = ROUNDS[args.what] if args.rounds is None else args.rounds
    _check(args)
    if args.seed is None:
        args.seed = int.from_bytes(os.urandom(4), "little")
    args.copy_bytes = 2**31 if args.device == "cuda" else 2**20
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    torch.autograd.set_multithreading_enabled(False)  # as the driver has it
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    report = Report(header(device, argv), shown)
    try:
        importlib.import_module(f"tools.bench.{args.what}").run(args, Bench(device, args.rep_ms), report)
    finally:
        # What was measured before an error cost device time, too.
        if args.out is not None:
            report.write(args.out)
    return 1 if report.failed else 0


def _check(args: argparse.Namespace) -> None:
    from megatron_lowprec.recipe.registry import get_recipe
    from tools.bench.shapes import linears

    for name in args.recipes or ():
        get_recipe(name)
    linears(args.shapes or (), args.linears)
    for name in ("tokens", "rounds"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: wants at least 1")
    known_peers = {"linear": ("te", "torchao"), "step": ("te",)}
    for name in getattr(args, "peers", []):
        if name not in known_peers[args.what]:
            raise UserError(f"--peers {name}: {args.what} has {' and '.join(known_peers[args.what])}")
    if args.what == "ops":
        from tools.bench.op_cases import OPS

        unknown = [name for name in args.ops or () if name not in OPS]
        if unknown:
            raise UserError(f"--ops {','.join(unknown)}: wants some of {', '.join(OPS)}")
    if args.what == "quantize":
        from tools.bench.quantize import DIRECTIONS, FORMAT_NAMES, KINDS, sizes_of

        sizes_of(args)
        for name, known in (("formats", FORMAT_NAMES), ("kinds", KINDS), ("directions", DIRECTIONS)):
            unknown = [value for value in getattr(args, name) if value not in known]
            if unknown:
                raise UserError(f"--{name} {','.join(unknown)}: wants some of {', '.join(known)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
