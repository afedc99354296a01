"""Command line of ``python -m tools.bench``. Exit code 1: a correctness check failed; 2: an invalid argument."""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lowprec.errors import Parser, UserError, names, run_tool
from megatron_lowprec.training.config.paths import output_file

# Subcommand: rounds, subject. The overhead at 70B is as small as the noise of one round; each round of step and scaling
# starts processes.
COMMANDS = {
    "quantize": (2, "fused MX quantizers against a plain copy"),
    "linear": (3, "a linear layer's forward and backward over bf16"),
    "experts": (3, "the experts of a layer, forward and backward, over Megatron-core's in bf16"),
    "step": (1, "a training step over bf16"),
    "hugging_face": (2, "a training step of Hugging Face models: convert over bf16, eager and compiled"),
    "frozen": (2, "a training step over frozen linear layers: weights as codes and in bf16, over bf16"),
    "megatron_lm": (
        1,
        "a training step in Megatron-LM, stock, under --spec and with TransformerEngine",
    ),
    "profile": (1, "kernels of a profiled training step by kind, beside their floors"),
    "scaling": (1, "weak scaling of a training step: several GPUs over one, data parallel"),
    "exchange": (1, "gradients over data-parallel ranks: FP8-LM beside reduce-scatters in fp32 and bf16"),
    "ops": (3, "the ops of a step besides its linear layers, against torch and Megatron-core"),
    "overhead": (7, "the cost of the Hadamard transform and of stochastic rounding"),
}
PEERS = {"linear": ("te", "torchao"), "experts": ("te",), "step": ("te",), "hugging_face": ("torchao",)}
OF_MODELS = ("hugging_face", "frozen")
"""Commands on models of Hugging Face, which have their own linear layers and tokens."""


def build_parser() -> argparse.ArgumentParser:
    """One subcommand for each measurement; most options are common to all."""
    common = Parser(add_help=False)
    common.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a smoke test at tiny sizes")
    common.add_argument(
        "--shapes",
        type=names,
        help="345m,1.3b,6.7b,7b,70b,smoke; experts: deepseek_16b,smoke; "
        "hugging_face: llama,gpt2,qwen3_moe,smoke,smoke_experts",
    )
    common.add_argument("--rounds", type=int, help="rounds in which all variants are measured in turn")
    common.add_argument("--out", type=output_file, metavar="FILE.json", help="write all numbers to this file")
    recipes = Parser(add_help=False)
    recipes.add_argument("--recipes", type=names, help="recipes to compare; bf16 is always included")
    recipes.add_argument(
        "--rep-ms", type=float, default=100.0, help="milliseconds of one measurement (default: %(default)s)"
    )
    recipes.add_argument("--seed", type=int, help="of random inputs (default: drawn at random and printed)")
    sizes = Parser(add_help=False)
    sizes.add_argument(
        "--linears", type=names, default=["qkv", "proj", "fc1", "fc2"], help="linear layers (default: all)"
    )
    sizes.add_argument("--tokens", type=int, default=8192, help="rows of an activation (default: %(default)s)")
    parser = Parser(prog="python -m tools.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    parts = {
        name: commands.add_parser(
            name,
            # rows of Megatron-LM have their own recipes
            parents=[common, *([] if name == "megatron_lm" else [recipes] if name in OF_MODELS else [recipes, sizes])],
            help=text,
            description=f"{text} (default: --rounds {rounds})",
        )
        for name, (rounds, text) in COMMANDS.items()
    }
    for name, known in PEERS.items():
        parts[name].add_argument("--peers", type=names, default=[], help=f"libraries beside it: {','.join(known)}")
    quantize = parts["quantize"]
    quantize.add_argument("--sizes", default="8192x4096,8192x16384,16384x8192", help="ROWSxCOLUMNS, without --shapes")
    quantize.add_argument("--formats", type=names, default=["e2m1", "e4m3", "nvfp4"])
    quantize.add_argument(
        "--kinds", type=names, default=["nearest", "sr", "rht64", "rht64+sr", "h16", "h16+sr", "square"]
    )
    quantize.add_argument("--directions", type=names, default=["rows", "columns", "both"])
    for name, warm_up, iterations in (("step", 5, 20), ("scaling", 5, 15), ("megatron_lm", 10, 20)):
        parts[name].add_argument("--micro-batch", type=int, help="sequences per GPU (default: the model's)")
        parts[name].add_argument(
            "--warm-up", type=int, default=warm_up, help="iterations before the timed ones (default: %(default)s)"
        )
        parts[name].add_argument(
            "--iterations", type=int, default=iterations, help="timed iterations (default: %(default)s)"
        )
    parts["step"].add_argument(
        "--cuda-graphs", action="store_true", help="each recipe with --cuda-graph-impl none and local"
    )
    parts["step"].add_argument(
        "--snapshots", action="store_true", help="repeat with a quantization-error snapshot in every step"
    )
    parts["step"].add_argument(
        "--optimizers", type=names, default=[], help="optimizers other than adam, beside it under each recipe: muon,sgd"
    )
    client = parts["megatron_lm"]
    client.set_defaults(recipes=None, linears=(), rep_ms=0.0, seed=0)
    paths: dict[str, Any] = {"type": _paths, "metavar": "PATH,PATH"}
    client.add_argument("--clients", required=True, **paths, help="folders or tarballs of Megatron-LM releases")
    client.add_argument(
        "--megatron-core", default=[], **paths, help="folders with megatron-core of their series (default: installed)"
    )
    client.add_argument("--te", type=Path, metavar="FOLDER", help="with TransformerEngine, for rows te-* only")
    client.add_argument("--rows", type=names, default=["*"], help="patterns of rows, such as spec-*,te-bf16")
    client.add_argument("--limit", type=float, default=240.0, help="seconds of a row (default: %(default)s)")
    parts["scaling"].add_argument(
        "--gpus", type=names, default=["1", "8"], help="numbers of GPUs, on a CPU of processes (default: 1,8)"
    )
    profile = parts["profile"]
    profile.add_argument("--gpus", type=int, default=4, help="data-parallel processes (default: %(default)s)")
    profile.add_argument("--microbatches", type=int, default=4, help="of a step on a GPU (default: %(default)s)")
    profile.add_argument("--micro-batch", type=int, help="sequences of a microbatch (default: the model's)")
    profile.add_argument("--trace", type=Path, metavar="FILE", help="read this trace of one of --recipes instead")
    profile.add_argument(
        "--tflops", type=_rates, default=(989.4, 1978.9), metavar="BF16,FP8", help="dense peaks (default: H100, H200)"
    )
    profile.add_argument("--bandwidth", type=float, default=4.8, help="of memory in TB/s (default: %(default)s, H200)")
    parts["exchange"].add_argument("--gpus", type=int, default=2, help="ranks, on a CPU processes (default: 2)")
    parts["hugging_face"].add_argument("--no-eager", action="store_true", help="only compiled models")
    parts["hugging_face"].add_argument(
        "--cuda-graphs", action="store_true", help="repeat compiled models with mode reduce-overhead"
    )
    parts["ops"].add_argument(
        "--ops", type=names, help="norm,bias,gelu,dropout,cast,transpose,loss,attention (default: all)"
    )
    overhead = parts["overhead"]
    overhead.add_argument("--full-accumulation", action="store_true", help="run the FP8 GEMM without fast accumulation")
    overhead.add_argument("--only", choices=("fp8", "backward"), help="only one of the two tables")
    return parser


def _paths(text: str) -> list[Path]:
    return [Path(name) for name in names(text)]


def _rates(text: str) -> tuple[float, float]:
    bf16, fp8 = map(float, text.split(","))
    return bf16, fp8


def main(argv: Sequence[str]) -> int:
    """Exit code."""
    args = build_parser().parse_args(argv)
    if args.device == "cpu":
        # Triton reads this when a kernel is defined.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    return run_tool("python -m tools.bench", lambda: _run(args, argv))


def _run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    import torch

    from tools.bench.machine import header
    from tools.bench.measure import Bench
    from tools.bench.report import Report

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no GPU; --device cpu runs a smoke test, with tiny sizes such as --shapes smoke")
    check(args)
    if args.seed is None:
        args.seed = int.from_bytes(os.urandom(4), "little")
    args.copy_bytes = 2**31 if args.device == "cuda" else 2**20
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    torch.autograd.set_multithreading_enabled(False)  # as in the driver
    shown = json.loads(json.dumps(vars(args), default=str))
    report = Report(header(device, argv), shown)
    try:
        importlib.import_module(f"tools.bench.commands.{args.command}").run(args, Bench(device, args.rep_ms), report)
    finally:
        # What was measured before an error is kept.
        if args.out is not None:
            report.write(args.out)
    return 1 if report.failed else 0


def check(args: argparse.Namespace) -> None:
    """Set the default of --rounds; raises UserError for values that the measurement does not know."""
    from megatron_lowprec.recipe.registry import get_recipe
    from tools.bench.shapes import EXPERTS, linears

    if args.rounds is None:
        args.rounds, _ = COMMANDS[args.command]
    for name in args.recipes or ():
        get_recipe(name)
    if args.command not in OF_MODELS:
        linears((args.shapes or ()) if args.command != "experts" else (), args.linears)
    for name in ("tokens", "rounds"):
        if getattr(args, name, 1) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: must be at least 1")
    known: dict[str, Sequence[str]] = {"peers": PEERS.get(args.command, ())}
    if args.command == "experts":
        known["shapes"] = tuple(EXPERTS)
    if args.command in OF_MODELS:
        from tools.bench.commands.hugging_face import CASES

        known["shapes"] = tuple(CASES)
    if args.command == "ops":
        from tools.bench.cases.op_cases import OPS

        known["ops"] = tuple(OPS)
    if args.command == "quantize":
        from tools.bench.commands.quantize import DIRECTIONS, FORMAT_NAMES, KINDS, sizes_of

        sizes_of(args)
        known |= {"formats": FORMAT_NAMES, "kinds": KINDS, "directions": DIRECTIONS}
    for name, values in known.items():
        unknown = [value for value in getattr(args, name, None) or () if value not in values]
        if unknown:
            raise UserError(f"--{name} {','.join(unknown)}: {args.command} has {', '.join(values)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
