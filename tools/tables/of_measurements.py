"""Tables of measurements, from the JSON of tools.bench and tools/numerics.py:

    steps FILE ...                 steps of ``tools.bench step`` over bf16's, with the quantizers' kernels
    backward FILE                  the backward pass of ``tools.bench overhead`` over bf16's
    linears FILE RECIPE ...        kernels of ``tools.bench linear`` over bf16's
    quantizers FILE COUNTS SIZE    ``tools.bench quantize`` beside the time that bytes and instructions predict
    experiment FILE TABLE COLUMN ...  a table of tools/numerics.py, by the JSON file's keys; all columns without names
    bench FILE COLUMN ...          rows of tools.bench; COLUMN is KEY for all, KEY=PATTERN for those rows only
    experts FILE ...               ``tools.bench experts``, the fastest round of each row
    peaks FILE ...                 peak GiB of tools/run_logs.py and their shares of bf16's in the same file, a column
                                   for NAME.json and NAME-others.json together
    by_gpus FILE                   losses of short runs by recipe on each number of GPUs

A FILE is beside the page.
"""

import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron_lowprec.report.amounts import DASH
from tools.tables.pages import Row, data_of

_INSTRUCTIONS_A_SECOND = 0.75 * 132 * 4 * 32 * 1.7e9  # of H200's threads: 75% of the issue slots at 1.7 GHz


def _experiment(page: Path, name: str, table: str, *keys: str) -> Iterator[Row]:
    found = data_of(page, name)["tables"][table]
    columns = {column["key"]: column for column in found["columns"]}
    chosen = [columns[key] for key in keys or columns]
    yield [column["heading"].replace("\n", " ") for column in chosen]
    for row in found["rows"]:
        values = [(row.get(column["key"]), column["form"]) for column in chosen]
        yield ["" if value is None else format(value, form) for value, form in values]


_BENCH: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "variant": ("", lambda row: str(row["variant"]).partition(",")[0]),
    "mode": ("", lambda row: str(row["variant"]).partition(", ")[2] or "eager"),
    "kind": ("", lambda row: str(row["kind"])),
    "recipe": ("recipe", lambda row: str(row["recipe"])),
    "ms": ("ms", lambda row: f"{row['ms']:.1f}{_apart(row)}"),
    "range": ("range", lambda row: f"{row['low']:.1f} to {row['high']:.1f}"),
    "over_bf16": ("over bf16", lambda row: f"{row['over_bf16']:.3f}"),
    "kernel_ms": ("kernels", lambda row: f"{row['kernel_ms']:.1f}"),
    "host_ms": ("host", lambda row: f"{row['host_ms']:.0f}"),
    "tokens_s": ("tokens/s per GPU", lambda row: f"{row['tokens_s']:,.0f}"),
    "tflops": ("TFLOP/s per GPU", lambda row: f"{row['tflops']:.0f}"),
    "peak_gib": ("peak GiB", lambda row: _if_known(row["peak_gib"], ".1f")),
    "planned_gib": ("planned", lambda row: _if_known(row["planned_gib"], ".1f")),
    "peak_over_bf16": ("peak over bf16's", lambda row: _if_known(row["peak_over_bf16"], ".3f")),
    "share": ("share", lambda row: f"{row['share']:.0%}"),
    "floor_ms": ("floor", lambda row: _if_known(row.get("floor_ms"), ".0f")),
}
_NEAR = 0.05  # rounds that are said to differ


def _if_known(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _apart(row: dict[str, Any]) -> str:
    return f" (rounds {row['noise']:.0%} apart)" if row.get("noise", 0.0) > _NEAR else ""


def _bench(page: Path, name: str, *columns: str) -> Iterator[Row]:
    """Milliseconds; a range is from the 20th to the 80th percentile."""
    content = data_of(page, name)
    rows = [row for table in content["tables"] for row in table["rows"] if not row.get("failed")]
    shown = [column for column in columns if "=" not in column]
    for key, pattern in (column.split("=") for column in columns if "=" in column):
        rows = [row for row in rows if fnmatchcase(str(row[key]), pattern)]
    yield [_BENCH[key][0] for key in shown]
    yield from ([_BENCH[key][1](row) for key in shown] for row in rows)


def _experts(page: Path, *names: str) -> Iterator[Row]:
    """Milliseconds of each row's fastest round: a loaded host slows down rounds that wait for it."""
    rows, ms = dict[str, Any](), dict[str, float]()
    for row in (row for name in names for row in data_of(page, name)["tables"][0]["rows"]):
        if min(row["rounds"]) < ms.get(row["experts"], math.inf):
            rows[row["experts"]], ms[row["experts"]] = row, min(row["rounds"])
    tokens = f"{next(iter(rows.values()))['tokens']} tokens"
    heads = "sequential", "grouped", "until the grouped call returns (host)", "TransformerEngine"
    yield tokens, *heads, "TransformerEngine's time over grouped"
    for recipe in (key for key in ms if f"{key}, grouped" in ms):
        grouped, peer = f"{recipe}, grouped", ms.get(f"TE GroupedLinear, {recipe}")
        beside = ("", "") if peer is None else (f"{peer:.1f}", f"{peer / ms[grouped]:.2f}")
        yield recipe, f"{ms[recipe]:.1f}", f"{ms[grouped]:.1f}", f"{rows[grouped]['host_us'] / 1e3:.1f}", *beside
    yield "Megatron-core's sequential experts, bf16", f"{ms['Megatron-core, bf16']:.1f}", "", "", "", ""
    product = "torch grouped product, bf16"
    yield "torch's grouped product, bf16", "", f"{ms[product]:.1f}", f"{rows[product]['host_us'] / 1e3:.1f}", "", ""


def _peaks(page: Path, *names: str) -> Iterator[Row]:
    peaks = dict[str, dict[str, tuple[str, str]]]()
    columns = list(dict.fromkeys(Path(name).stem.removesuffix("-others") for name in names))
    for name in names:
        for row in data_of(page, name)["tables"][0]["rows"]:
            cells = peaks.setdefault(row["variant"], {})
            cell = f"{row['peak_gib']:.1f}", f"{row['peak_over_bf16']:.3f}"
            assert cells.setdefault(Path(name).stem.removesuffix("-others"), cell) == cell, f"{name}: {row['variant']}"
    yield "", *(head for column in columns for head in (f"{column.upper()}, GiB".replace("-", ", "), "over bf16"))
    for variant, cells in sorted(peaks.items()):
        yield variant, *(value for column in columns for value in cells.get(column, (DASH, DASH)))


def _by_gpus(page: Path, name: str) -> Iterator[Row]:
    runs = {(run["recipe"], run["gpus"]): run for run in data_of(page, name)}
    counts = sorted({gpus for _, gpus in runs})
    heads = ("step 1", "last ten steps", "validation")
    yield "recipe", *(f"{head}, nats, {gpus} GPU{'s' * (gpus > 1)}" for gpus in counts for head in heads)
    for recipe in dict.fromkeys(recipe for recipe, _ in runs):
        of_recipe = [runs[recipe, gpus] for gpus in counts]
        yield recipe, *(f"{run[key]:.4f}" for run in of_recipe for key in ("first", "mean_last10", "valid"))


def _steps(page: Path, *names: str) -> Iterator[Row]:
    yield "model, batch", "recipe", "step, ms", "over bf16", "kernels, ms", "quantizers of these", "amaxes", "peak GiB"
    for name in names:
        for row in data_of(page, name)["tables"][0]["rows"]:
            spent = {kernel["name"]: kernel["ms"] for kernel in row["runs"][0]["kernels"]}
            quantizers = [spent.get(kernel) for kernel in ("_mx_kernel", "_operand_amaxes_kernel")]
            yield (
                *(f"{row['model'].upper()}, {row['batch']}", row["recipe"], f"{row['ms']:.1f}"),
                *(f"{row['over_bf16']:.3f}", f"{row['kernel_ms']:.1f}"),
                *("" if found is None else f"{found:.1f}" for found in quantizers),
                f"{row['peak_gib']:.1f}",
            )


def _backward(page: Path, name: str) -> Iterator[Row]:
    yield "shapes", "recipe", "backward, ms", "over bf16", "share of RHT", "share of SR"
    for row in data_of(page, name)["tables"][1]["rows"]:
        shares = ("" if row[part] is None else f"{row[part]:.1%}" for part in ("rht", "sr"))
        yield row["model"], row["recipe"], f"{row['ms']:.2f}", f"{row['over_bf16']:.3f}", *shares


def _linears(page: Path, name: str, *names: str) -> Iterator[Row]:
    rows = data_of(page, name)["tables"][0]["rows"]
    found = {(row["linear"], row["recipe"]): row for row in rows}
    yield "linear", "bf16, ms", *(f"{each}, over bf16" for each in names)
    for linear in dict.fromkeys(row["linear"] for row in rows):
        over = (found[linear, each]["graph_over_bf16"] for each in names)
        yield linear, f"{found[linear, 'bf16']['graph_ms']:.3f}", *(f"{each:.2f}" for each in over)


def _quantizers(page: Path, name: str, counts: str, size: str) -> Iterator[Row]:
    content = data_of(page, name)
    fewest: dict[tuple[str, ...], float] = {}
    for row in data_of(page, counts)["rows"]:
        variant = row["format"], row["kind"], row["direction"]
        fewest[variant] = min(row["total"], fewest.get(variant, math.inf))
    yield (
        *("format", "rounding, transform", "direction", "bytes an entry", "instructions an entry", "time, us"),
        *("of the large copy", "of a copy of the size", "predicted", "limited by"),
    )
    for row in content["tables"][0]["rows"]:
        if row["size"] == size:
            variant = row["format"], row["kind"], row["direction"]
            entries = math.prod(map(int, size.split("x")))
            moved = row["moved_bytes"] / entries
            read = 2 if row["format"] == "nvfp4" else 0  # by the pass for the amax
            rate = row["tb_s"] * 1e12 / row["of_same_copy"]
            ways = [(*variant[:2], way) for way in ("rows", "columns")]  # two kernels, or one for a shared output
            counted = fewest[variant] if variant in fewest else sum(fewest[way] for way in ways if way in fewest)
            assert counted > 0, f"{counts} has no instructions of {variant}"
            bytes_take, instructions_take = (moved - read) / rate, counted / _INSTRUCTIONS_A_SECOND
            predicted = moved / rate / (read / rate + max(bytes_take, instructions_take))
            yield (
                *(*variant, f"{moved:.0f}", f"{counted:.1f}", f"{1e3 * row['ms']:.0f}"),
                *(f"{share:.0%}" for share in (row["of_large_copy"], row["of_same_copy"], predicted)),
                "bytes" if bytes_take >= instructions_take else "instructions",
            )


TABLES: dict[str, Callable[..., Iterator[Row]]] = {
    "steps": _steps,
    "backward": _backward,
    "linears": _linears,
    "quantizers": _quantizers,
    "experiment": _experiment,
    "bench": _bench,
    "experts": _experts,
    "peaks": _peaks,
    "by_gpus": _by_gpus,
}
