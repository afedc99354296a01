"""Plot a run's loss curve beside those of the shipped bf16 runs, and print its final losses.

    python tools/plot_loss.py runs/gpt_tiny-mxfp4_rht_sr

reads metrics.jsonl and config.yaml in that folder and writes loss.png. The bf16 runs differ in their seeds: the range
of their losses is chance. The unigram entropy of the validation tokens, the lowest loss of a model that ignores the
context, is computed from the data that config.yaml names, or from --valid-prefix.
"""

import math
import sys
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.report.curve import LAST, Curve, Series, read_curve, smooth
from megatron_lowprec.report.plot_style import literal
from megatron_lowprec.shipped import find
from megatron_lowprec.training.config.data_options import DATA_CACHE
from megatron_lowprec.training.config.paths import output_file
from megatron_lowprec.training.config.run_config import read_run_config
from megatron_lowprec.training.data import corpus_writer, indexed_dataset
from megatron_lowprec.training.data.jsonl import is_text_file
from megatron_lowprec.training.data.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "docs" / "results"

_TOKENIZER_FILES = ("vocab_file", "merge_file", "tokenizer_model")
_RUN, _REFERENCE, _ENTROPY, _TEXT = "#1f5fa8", "#8a8a8a", "#b3541e", "#333333"


def validation_entropy(config: dict[str, Any]) -> float:
    """Unigram entropy, in nats, of the validation data that a run's configuration names.

    Raises:
        UserError: the configuration does not name exactly one readable file.
    """
    paths = config.get("valid_data_path") or []
    if len(paths) != 1:
        raise UserError(f"config.yaml names {len(paths)} validation files; give one with --valid-prefix")
    tokenizer = build_tokenizer(
        config["tokenizer_type"],
        **{name: config.get(name) for name in _TOKENIZER_FILES},
        vocab_size=config.get("vocab_size"),
    )
    path, cache = str(find(paths[0])), config.get("data_cache_path") or DATA_CACHE
    prefix = corpus_writer.prepare(path, tokenizer, cache, workers=1) if is_text_file(path) else path
    return indexed_dataset.unigram_entropy(prefix)


def draw(path: Path, title: str, curve: Curve, references: Sequence[Curve], entropy: float | None) -> None:
    """Write the PNG; several references are drawn as the range of their losses."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8.0, 4.8), dpi=160, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    axes = figure.subplots()
    if entropy is not None:
        label = f"unigram entropy of the validation tokens ({entropy:.3f})"
        axes.axhline(entropy, color=_ENTROPY, linewidth=1.2, linestyle=(0, (1, 2)), label=label)
    if len(references) == 1:
        _draw_curve(axes, references[0], _REFERENCE, "bf16 run", raw=False)
    elif references:
        _draw_range(axes, references)
    _draw_curve(axes, curve, _RUN, "this run", raw=True)
    axes.set_title(literal(title), loc="left", fontsize=12, color=_TEXT, pad=10)
    axes.set_xlabel("iteration", color=_TEXT)
    axes.set_ylabel("loss, nats a token", color=_TEXT)
    axes.margins(x=0.015)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b0b0b0")
    axes.tick_params(colors=_TEXT, labelsize=9, color="#b0b0b0")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=9, labelcolor=_TEXT, loc="upper right", edgecolor="none")
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for a UserError."""
    parser = Parser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder with metrics.jsonl and config.yaml")
    parser.add_argument(
        "--reference", type=Path, nargs="+", metavar="FILE", help="metrics.jsonl of bf16 runs (default: shipped)"
    )
    parser.add_argument("--valid-prefix", metavar="PREFIX", help="prepared validation data, if config.yaml names none")
    parser.add_argument("--output", type=output_file, metavar="PNG", help="default: loss.png in the run's folder")
    args = parser.parse_args(arguments)
    output = args.output or args.run / "loss.png"

    def plot() -> None:
        if args.run.is_file():
            raise UserError(f"{args.run} is a file; name the folder of a run that has trained")
        curve = read_curve(args.run / "metrics.jsonl", print)
        config = _config(args.run)
        iterations = config.get("train_iters") or curve.last_iteration
        references = _references(args.reference, args.run, iterations)
        entropy = _entropy(config, args.valid_prefix)
        try:
            draw(output, _title(args.run, config), curve, references, entropy)
        except OSError as error:
            raise UserError(f"--output {output}: {error}") from None
        beside = references if args.reference or curve.last_iteration == iterations else []
        print(*_summary(args.run, config, curve, beside, entropy, output), sep="\n")

    return run_tool("plot_loss.py", plot)


def _draw_curve(axes: "Axes", curve: Curve, color: str, label: str, *, raw: bool) -> None:
    iterations, losses = curve.train
    if raw:
        axes.plot(iterations, losses, color=color, linewidth=0.8, alpha=0.25)
    if len(losses):
        style = "-" if raw else "--"
        axes.plot(*_smoothed(curve.train), style, color=color, linewidth=1.6, label=f"{label}, training (smoothed)")
    iterations, losses = curve.validation
    if len(losses):
        face = color if raw else "white"
        label = f"{label}, validation (last: {curve.final_validation:.3f})"
        (points,) = axes.plot(iterations, losses, "o", color=color, label=label, zorder=3)
        points.set(markersize=5.5, markerfacecolor=face)


def _draw_range(axes: "Axes", curves: Sequence[Curve]) -> None:
    """Lowest to highest loss at the iterations that all curves have."""
    for name in ("training", "validation"):
        series = [_smoothed(curve.train) if name == "training" else curve.validation for curve in curves]
        iterations = reduce(np.intersect1d, [each[0] for each in series])
        if not len(iterations):
            continue
        losses = np.array([each[1][np.isin(each[0], iterations)] for each in series])
        low, high = losses.min(0), losses.max(0)
        if name == "training":
            label = f"bf16, {len(curves)} seeds, training (smoothed)"
            axes.fill_between(iterations, low, high, color=_REFERENCE, alpha=0.45, linewidth=0.8, label=label)
        else:
            label = f"bf16, {len(curves)} seeds, validation (last: {low[-1]:.3f} to {high[-1]:.3f})"
            # caps wider than the points in front of them, since the range is often narrower than a point
            middle, half = (low + high) / 2, (high - low) / 2
            look: dict[str, Any] = {"ecolor": _REFERENCE, "elinewidth": 1.5, "capsize": 7, "capthick": 1.5}
            axes.errorbar(iterations, middle, half, fmt="none", label=label, **look)


def _smoothed(series: Series) -> Series:
    return smooth(series, len(series[1]) // 50)


def _summary(
    run: Path, config: dict[str, Any], curve: Curve, references: Sequence[Curve], entropy: float | None, output: Path
) -> list[str]:
    lines = [f"{run.name}: {curve.last_iteration} iterations"]

    def row(name: str, value: str) -> None:
        lines.append(f"  {name:<18} {value}")

    def beside() -> str:
        losses = sorted(each.final_validation for each in references if not math.isnan(each.final_validation))
        if len(losses) < 2:
            return f" (bf16 run: {losses[0]:.4f})" if losses else ""
        return f" (bf16, {len(losses)} seeds: {losses[0]:.4f} to {losses[-1]:.4f})"

    if not math.isnan(curve.final_train):
        count = min(LAST, len(curve.train[1]))
        row("training loss", f"{curve.final_train:.4f}, mean of the last {count} iterations")
    final = curve.final_validation
    if not math.isnan(final):
        row("validation loss", f"{final:.4f}{beside()}")
        row("perplexity", f"{math.exp(final):.2f}")
    if entropy is not None:
        side = "below" if final <= entropy else "above"
        margin = "" if math.isnan(final) else f"; validation loss is {abs(entropy - final):.4f} nats {side}"
        row("unigram entropy", f"{entropy:.4f}{margin}")
    folders = {"checkpoint": ("save", "checkpoints"), "TensorBoard files": ("tensorboard_dir", "tensorboard")}
    for name, (key, default) in folders.items():
        folder = Path(config.get(key) or run / default)
        row(name, str(folder) if folder.is_dir() else "none")
    row("loss curve", str(output))
    return lines


def _title(run: Path, config: dict[str, Any]) -> str:
    recipe = config.get("recipe")
    return f"{run.name.removesuffix(f'-{recipe}')}, recipe {recipe}" if recipe else run.name


def _references(paths: Sequence[Path] | None, run: Path, iterations: int) -> list[Curve]:
    """The bf16 runs that were named; else the shipped ones of the model, if their length is that of this run."""
    if paths is not None:
        return [read_curve(path, print) for path in paths]
    model = run.name.partition("-")[0]
    shipped = [read_curve(path, print) for path in sorted(RESULTS.glob(f"{model}_bf16*.metrics.jsonl"))]
    if not shipped:
        missing = RESULTS.relative_to(REPOSITORY) / f"{model}_bf16.metrics.jsonl"
        print(f"no bf16 curve for comparison: {missing} does not exist")
    same = [each for each in shipped if each.last_iteration == iterations]
    if shipped and not same:
        print(f"not compared: the shipped bf16 runs have {shipped[0].last_iteration} iterations, this one {iterations}")
    return same


def _config(run: Path) -> dict[str, Any]:
    """Options of the run's config.yaml and the name of its recipe; empty without that file."""
    if not (run / "config.yaml").exists():
        return {}
    config = read_run_config(run / "config.yaml")
    try:
        return {**config["options"], "recipe": config["recipe"]["name"]}
    except KeyError:
        raise UserError(f"{run / 'config.yaml'} has no options and recipe; name the folder of a run") from None


def _entropy(config: dict[str, Any], prefix: str | None) -> float | None:
    if prefix is not None:
        return indexed_dataset.unigram_entropy(prefix)
    if not config:
        return None
    try:
        return validation_entropy(config)
    except UserError as error:
        print(f"no unigram entropy: {error}")
        return None


if __name__ == "__main__":
    sys.exit(main())
