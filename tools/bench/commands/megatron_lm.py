"""A training step in Megatron-LM: stock, under ``--spec``, and with TransformerEngine, beside this project's driver.

Each row is a process on one GPU that runs a pretrain_gpt.py; its times are those of the program's own log.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.text_tables import Column, Row, named
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model
from tools.bench.commands.step import LOSS, PEAK, RATE, median_ms, models_with_config
from tools.bench.machine import REPOSITORY
from tools.bench.measure import Bench, Timing, combined
from tools.bench.report import Report
from tools.bench.shapes import ModelShape
from tools.run_logs import MS, iteration_lines

WINDOW = 5  # iterations of a mean in the log
_LOCAL = (
    "--transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm "
    "--no-rope-fusion"
)
_STOCK = f"{_LOCAL} --recompute-activations"  # the attention weights of all layers do not fit a GPU
_TE_RECIPES = {
    "bf16": "",
    "fp8_delayed": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max",
    "fp8_blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
}
_GRAPHS = {"": "", "-graphs": "--cuda-graph-impl transformer_engine", "-local-graphs": "--cuda-graph-impl local"}
_CAPTURED = ("bf16", "fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp4_rht_sr")

ROWS: dict[str, str] = {
    "stock-bf16": _STOCK,
    "stock-bf16-graphs": f"{_STOCK} --cuda-graph-impl local",
    **{f"spec-{name}": f"{_LOCAL} --spec megatron_lowprec.specs {name}" for name in ("bf16", "fp8_delayed")},
    **{
        f"spec-{name}-graphs": f"{_LOCAL} --spec megatron_lowprec.specs {name} --cuda-graph-impl local"
        for name in _CAPTURED
    },
    **{
        f"te-{name}{parameters}{graphs}": " ".join(
            ("--transformer-impl transformer_engine", recipe, "--fp8-param-gather" if parameters else "", flags)
        )
        for name, recipe in _TE_RECIPES.items()
        for parameters in ("", "-params")
        for graphs, flags in _GRAPHS.items()
        if not (parameters and name == "bf16")
    },
    **{f"driver-{name}": f"--recipe {name}" for name in _CAPTURED},
}
"""Row -> flags of Megatron-LM, or of the driver; of all rows ``common_flags`` has the rest."""

COLUMNS = (
    *named("model", "batch", "client", "row"),
    Column("ms", "ms", ".1f"),
    Column("low", "least", ".1f"),
    Column("high", "most", ".1f"),
    Column("noise", "rounds", ".1%"),
    Column("over_stock", "/stock", ".3f"),
    Column("over_driver", "/driver", ".3f"),
    RATE,
    PEAK,
    Column("reserved_gib", "reserved", ".1f"),
    LOSS,
)


@dataclass(frozen=True)
class Client:
    """A checkout of Megatron-LM that runs.

    Attributes:
        name: of the folder or tarball it comes from.
        series: of its Megatron-core, such as ``0.19``.
        folder: the checkout, with compiled helpers.
        core: folder with a megatron-core of the same series, for the driver; None: the one that is installed.
    """

    name: str
    series: str
    folder: Path
    core: Path | None


def run(args: argparse.Namespace, bench: Bench, report: Report) -> None:
    """Each model in each client by the chosen rows, --rounds times in turn; --out is written after each."""
    models = models_with_config(args.shapes or ("345m", "1.3b"))
    chosen = chosen_rows(args.rows, args.te, report)
    if (args.warm_up % WINDOW, args.iterations % WINDOW) != (0, 0) or args.iterations < WINDOW:
        raise UserError(f"--warm-up {args.warm_up} --iterations {args.iterations}: must be multiples of {WINDOW}")
    with tempfile.TemporaryDirectory() as scratch:
        clients = [unpacked(path, args.megatron_core, Path(scratch, str(at))) for at, path in enumerate(args.clients)]
        report.note(*notes(args, clients))
        found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
        for model in models:
            for turn in range(args.rounds):
                for client in clients:
                    for row in chosen:
                        result = in_fresh_process(model, client, row, args, Path(scratch))
                        found.setdefault((model.name, client.name, row), []).append(result)
                        text = result.get("failed") or f"{result['ms']:.1f} ms"
                        report.progress(f"{model.name} {client.name} {row}, round {turn + 1}: {text}")
                        report.put(title(args), rows_of(models, found, args))
                        if args.out is not None:
                            report.write(args.out)
    report.table(title(args), rows_of(models, found, args), COLUMNS)


def title(args: argparse.Namespace) -> str:
    """Of the table."""
    return f"Megatron-LM, training step: {args.device}"


def chosen_rows(patterns: list[str], te: Path | None, report: Report) -> list[str]:
    """The rows of --rows.

    Raises:
        UserError: a pattern fits no row, or TransformerEngine is where every row would take its Adam.
    """
    for pattern in patterns:
        if not any(fnmatch(row, pattern) for row in ROWS):
            raise UserError(f"--rows {pattern}: fits none of {', '.join(ROWS)}")
    if importlib.util.find_spec("transformer_engine") is not None:
        raise UserError(
            "TransformerEngine can be imported, so that Megatron-core would take its Adam in every row; install it "
            "into a folder of its own (pip install --target FOLDER) and name that by --te"
        )
    chosen = [row for row in ROWS if any(fnmatch(row, pattern) for pattern in patterns)]
    if te is None and any(row.startswith("te-") for row in chosen):
        report.note("without --te there are no rows with TransformerEngine")
        chosen = [row for row in chosen if not row.startswith("te-")]
    return chosen


def unpacked(source: Path, cores: list[Path], target: Path) -> Client:
    """The client of a folder or tarball, copied to ``target`` with the compiled helpers of its release.

    Args:
        cores: folders with a megatron-core each; without one of the client's series the installed one is taken.

    Raises:
        UserError: ``source`` is no Megatron-LM, or no megatron-core of its series is there.
    """
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(".git"))
    elif tarfile.is_tarfile(source) if source.is_file() else False:
        parts = target.with_suffix(".parts")
        with tarfile.open(source) as tar:
            tar.extractall(parts, filter="data")
        (inside,) = parts.iterdir()
        inside.rename(target)
    if not (target / "pretrain_gpt.py").is_file():
        raise UserError(f"--clients {source}: must be a folder or tarball of Megatron-LM, with a pretrain_gpt.py")
    series = series_of(target)
    core = next((folder for folder in cores if series_of(folder) == series), None)
    helpers = list((core or _installed()).glob("megatron/core/datasets/helpers_cpp*.so"))
    if series_of(core or _installed()) != series or not helpers:
        raise UserError(
            f"--clients {source}: has Megatron-core {series}; name a folder with megatron-core {series} and its "
            f"compiled helpers by --megatron-core (pip install --target FOLDER --no-deps megatron-core=={series}.*)"
        )
    for helper in helpers:  # of each version of Python
        shutil.copy(helper, target / "megatron/core/datasets")
    return Client(source.name.removesuffix(".tar.xz"), series, target, core)


def series_of(folder: Path) -> str:
    """Series of the Megatron-core in a folder, such as ``0.19``; "none" without one."""
    try:
        text = (folder / "megatron/core/package_info.py").read_text(encoding="utf-8")
    except OSError:
        return "none"
    numbers = dict(re.findall(r"^(MAJOR|MINOR) = (\d+)$", text, re.M))
    return f"{numbers.get('MAJOR')}.{numbers.get('MINOR')}"


def _installed() -> Path:
    """The folder of the megatron-core that is installed."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[2]


def notes(args: argparse.Namespace, clients: list[Client]) -> list[str]:
    """Conditions of all rows."""
    te = [args.te] if args.te is None else sorted(path.stem for path in args.te.glob("transformer_engine-*.dist-info"))
    return [
        f"clients: {', '.join(f'{client.name} (Megatron-core {client.series})' for client in clients)}; one GPU",
        f"ms: median of means over {WINDOW} iterations, from each program's log; least and most of them; "
        f"{args.warm_up} iterations before them",
        f"Megatron-LM: {' '.join(_MEGATRON_LM)}, mock data, {args.iterations} iterations timed",
        f"stock: without TransformerEngine and apex: {_STOCK}",
        f"te: {', '.join(map(str, te)) or args.te}; cross entropy of TransformerEngine until 0.18, which 0.19 refuses; "
        "weight gradients added in its GEMMs, in the output layer by torch in place of apex",
        "graphs: --cuda-graph-impl local; of te: transformer_engine",
        "peak: allocated, without what graphs hold; reserved: with it",
    ]


_MEGATRON_LM = (
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--cross-entropy-loss-fusion",
    "--no-check-for-nan-in-loss-and-grad",  # reads two numbers for each bucket of gradients, in the backward pass
)


def flags_of(model: ModelShape, client: Client, row: str, args: argparse.Namespace, save: Path) -> list[str]:
    """Arguments of the row's pretrain_gpt.py: the driver's, or Megatron-LM's for the same model, data and batch."""
    batch = str(args.micro_batch or model.micro_batch)
    common = [
        *("--mock-data", "--micro-batch-size", batch, "--global-batch-size", batch),
        *("--train-iters", str(args.warm_up + args.iterations), "--log-interval", str(WINDOW)),
    ]
    if row.startswith("driver-"):
        more = ["--config", str(model.config), "--eval-iters", "0", "--no-save", "--save", str(save)]
        return [*common, *ROWS[row].split(), *more]
    config = resolve_model(parse(["--config", str(model.config)])[0])
    sizes = {
        "--num-layers": config.num_layers,
        "--hidden-size": config.hidden_size,
        "--ffn-hidden-size": config.ffn_hidden_size,
        "--num-attention-heads": config.num_attention_heads,
        "--seq-length": config.seq_length,
        "--max-position-embeddings": config.seq_length,
        "--hidden-dropout": config.hidden_dropout,
        "--attention-dropout": config.attention_dropout,
        "--vocab-size": 50256,  # and one token; padded as GPT-2's is
        "--lr": config.lr,
    }
    loss = ["--cross-entropy-fusion-impl", "te"] if row.startswith("te-") and client.series < "0.19" else []
    return [
        *(word for name, value in sizes.items() for word in (name, str(value))),
        *("--bf16", "--tokenizer-type", "NullTokenizer", "--eval-iters", "1", "--eval-interval", "100000"),
        *(*common, *_MEGATRON_LM, *loss, *ROWS[row].split()),
    ]


def in_fresh_process(
    model: ModelShape, client: Client, row: str, args: argparse.Namespace, scratch: Path
) -> dict[str, Any]:
    """Times, losses and peaks of one run, or the reason of its failure and its last lines."""
    ours, te = row.startswith("driver-"), row.startswith("te-")
    result, log = scratch / "result.json", scratch / "log"
    result.unlink(missing_ok=True)
    flags = flags_of(model, client, row, args, Path(tempfile.mkdtemp(dir=scratch)))
    job = {"folder": str(REPOSITORY if ours else client.folder), "client": not ours, "te": te, "flags": flags}
    paths = [
        *([] if ours else [client.folder]),
        *(REPOSITORY, client.core, args.te if te else None, os.environ.get("PYTHONPATH")),
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "tools.bench.commands.megatron_lm_worker",
        json.dumps(job | {"result": str(result)}),
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            reason = f"exit code {process.wait(args.limit)}"
        except subprocess.TimeoutExpired:
            reason = f"it ran for more than {args.limit} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and workers of its data
            process.wait()
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    asked = {"flags": flags}
    if process.returncode or not result.exists():
        last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
        return asked | {"failed": f"{reason}: {last.strip()[:160]}", "last_lines": lines[-30:]}
    peaks: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return asked | read_log("\n".join(lines), args.warm_up // WINDOW, args.iterations // WINDOW) | peaks


def read_log(text: str, warm_up: int, timed: int) -> dict[str, Any]:
    """Milliseconds and losses of a log's windows, or why there is no number.

    Args:
        warm_up: windows before the timed ones.
        timed: windows.
    """
    # 0.19 logs the first one as well
    windows = [line for line in iteration_lines(text) if int(line["iteration"]) % WINDOW == 0]
    ms = [float(line[MS]) for line in windows]
    losses = [float(line["lm loss"]) for line in windows if "lm loss" in line]
    counts = [f"number of {what} iterations" for what in ("skipped", "nan")]
    spoiled = [line["line"] for line in windows if any(int(line.get(count, 0)) for count in counts)]
    found = {"windows": ms, "losses": losses}
    if len(ms) != warm_up + timed:
        last = [line["line"] for line in windows[-3:]]
        return found | {"failed": f"the log has {len(ms)} windows of {warm_up + timed}", "last_lines": last}
    if spoiled or len(losses) != len(ms) or not all(map(isfinite, losses)):
        return found | {"failed": "a loss is not finite, or an update was skipped", "last_lines": spoiled[-3:]}
    kept = ms[warm_up:]
    return found | {"ms": median(kept), "low": min(kept), "high": max(kept)}


def rows_of(
    models: list[ModelShape], found: dict[tuple[str, str, str], list[dict[str, Any]]], args: argparse.Namespace
) -> list[Row]:
    """The table so far."""
    return [_row(model, key, found, args) for model in models for key in found if key[0] == model.name]


def _row(
    model: ModelShape,
    key: tuple[str, str, str],
    found: dict[tuple[str, str, str], list[dict[str, Any]]],
    args: argparse.Namespace,
) -> Row:
    runs, (_, client, row) = found[key], key
    batch = args.micro_batch or model.micro_batch
    sequence = resolve_model(parse(["--config", str(model.config)])[0]).seq_length
    assert batch is not None
    assert sequence is not None
    named = {"model": model.name, "batch": f"{batch}x{sequence}", "client": client, "row": row, "runs": runs}
    failures = [run["failed"] for run in runs if "failed" in run]
    if failures:
        return named | {"failed": failures[0]}
    timing = combined([Timing(run["ms"], run["low"], run["high"]) for run in runs])
    recipe = row.split("-")[1]
    stock = median_ms(found.get((model.name, client, "stock-bf16"), []))
    driver = median_ms(found.get((model.name, client, f"driver-{recipe}"), []))
    return (
        timing.row()
        | named
        | {
            "over_stock": timing.ms / stock if stock else None,
            "over_driver": timing.ms / driver if driver else None,
            "tokens_per_second": batch * sequence / timing.ms * 1e3,
            "peak_gib": max(run["peak_gib"] for run in runs),
            "reserved_gib": max(run["reserved_gib"] for run in runs),
            "last_loss": runs[0]["losses"][-1],
        }
    )
