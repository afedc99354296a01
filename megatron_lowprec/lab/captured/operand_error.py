"""Error of captured operands and of their GEMMs under recipes: one draw, the mean of many draws, and the slope.

The mean of draws separates noise, which averages out over microbatches and steps, from a fixed error, which does not.
With B the energy of the error that all draws share and V that of the rest, one draw has B + V and the mean of n draws
B + V / n.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.lab.experiment import Lab, Result, Table
from megatron_lowprec.lab.lab_figures import grouped_bars
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.capture_file import Capture, read_capture
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import DIMS, SIDES
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.transform import padded
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, LinearRecipe
from megatron_lowprec.text_tables import Column, Row

TENSORS = {"T": {"I": "x", "O": "dy"}, "O": {"I": "w"}}  # rows -> columns -> name in the file
COLUMNS = (
    Column("linear", "linear"),
    Column("recipe", "recipe"),
    Column("gemm", "GEMM"),
    Column("what", "what"),
    Column("one", "SNR of one\ndraw, dB", ".2f"),
    Column("mean", "SNR of the\nmean, dB", ".2f"),
    Column("bias", "shared error\nSNR, dB", ".2f"),
    Column("slope", "slope - 1", "+.5f"),
)
LAYER_COLUMNS = (
    *COLUMNS[1:3],
    Column("count", "linears", "d"),
    *COLUMNS[4:7],
    Column("slope", "size of\nslope - 1", ".5f"),
)


def run(lab: Lab, arguments: Sequence[str], recipes: Sequence[str], draws: int) -> Result:
    """Tables of operands and of products, by layer, recipe and GEMM.

    Args:
        arguments: files of ``--capture-step``.
        recipes: names or YAML files; empty for the recipe in each file.
        draws: of rounding noise and signs.

    Raises:
        UserError: no file; one that is no capture; an unknown recipe.
    """
    if not arguments:
        raise UserError("operand-error was asked without a file; name files that --capture-step wrote")
    chosen: list[LinearRecipe] = [load_recipe(name) for name in recipes]
    return error_result(rows_of(arguments, chosen, lab.device, partial(error_rows, draws=draws)), draws)


def rows_of(
    files: Sequence[str],
    recipes: Sequence[LinearRecipe],
    device: torch.device,
    rows_under: Callable[[Capture, LinearRecipe], Iterable[Row]],
) -> list[Row]:
    """``rows_under`` each recipe, by default the file's own, of the capture in each file.

    If several files hold one linear, rows have ``captured`` as well: step and ranks, numbered where these are equal.
    """
    found: list[tuple[str, str, list[Row]]] = []
    times = Counter[tuple[str, str]]()
    for capture in captures(files, device):
        path, places = capture.linear_id.path, (("tp", capture.tensor_parallel), ("dp", capture.data_parallel))
        parts = [f"step {capture.iteration}", *(f"{kind} {at.rank} of {at.size}" for kind, at in places if at.size > 1)]
        name = ", ".join(parts)
        times[path, name] += 1
        number = times[path, name]
        rows = [row for recipe in recipes or [capture.recipe] for row in rows_under(capture, recipe)]
        found.append((path, name if number == 1 else f"{name} ({number})", rows))
    several = len(found) > len({path for path, *_ in found})
    return [{**row, "captured": name} if several else row for _, name, rows in found for row in rows]


def captures(files: Sequence[str], device: torch.device) -> Iterator[Capture]:
    """The capture in each file; UserError for a folder, before any file is read."""
    for file in files:
        if Path(file).is_dir():
            raise UserError(f"{file} is a folder: give the files in it, as {Path(file)}/*.safetensors")
    return (read_capture(Path(file), device) for file in files)


def error_result(
    rows: Sequence[Row], draws: int, tables: Sequence[Table] = (), title: str = "Error of captured operands"
) -> Result:
    """Result of ``rows_of``, behind other tables; UserError if no recipe quantizes any of the layers."""
    if not rows:
        raise UserError("no recipe that was asked quantizes a GEMM of these layers; name one that does by --recipes")
    notes = (
        f"{draws} draws of rounding and signs, the first as in the captured step; float64 products of the captured "
        "tensors are the reference, and products are not rounded to the compute dtype",
        f"mean: of the draws; unbiased noise gains {10 * math.log10(draws):.1f} dB, a fixed error nothing",
        "shared error: energy that all draws have in common, estimated without bias; - where it is lost in the noise",
        "delayed scales follow the captured amax, or the tensor's own where the run kept none; rules and phases of "
        "a recipe that is not the file's are ignored",
    )
    products = [row for row in rows if row["what"] == "product"]
    shown = products
    if len({linear_of(row) for row in products}) > 1:
        shown = layer_means(products)
        tables = [*tables, Table("layers", "products, mean over the linears", LAYER_COLUMNS, shown)]
    columns = with_captured(COLUMNS, rows)
    tables = [
        *tables,
        Table("products", "products", columns, products),
        Table("operands", "operands", columns, [row for row in rows if row["what"] != "product"]),
    ]
    bars = [
        (gemm, {_bar(row): row["one"] for row in shown if row["gemm"] == gemm})
        for gemm in dict.fromkeys(row["gemm"] for row in shown)
    ]
    names = dict.fromkeys(_bar(row) for row in shown)
    panels = [(gemm, {name: values.get(name) or 0.0 for name in names}) for gemm, values in bars]
    return Result(title, notes, tables, {"": grouped_bars(panels, "SNR of one draw, dB")})


def linear_of(row: Row) -> tuple[str, str | None]:
    """Linear layer of a row, and which of its captures if there are several."""
    return row["linear"], row.get("captured")


def with_captured(columns: Sequence[Column], rows: Sequence[Row]) -> tuple[Column, ...]:
    """The columns, with that of ``captured`` after the linears' if rows have it."""
    more = [Column("captured", "captured")] if any("captured" in row for row in rows) else []
    return (columns[0], *more, *columns[1:])


def layer_means(products: Sequence[Row]) -> list[Row]:
    """A row for each recipe and GEMM: mean relative energy of the error over all captures, and mean size of the slope.

    A shared error that is not resolved counts as 0; ``bias`` is None where no linear's is resolved.
    """
    rows: list[Row] = []
    for recipe, gemm in dict.fromkeys((row["recipe"], row["gemm"]) for row in products):
        of_case = [row for row in products if (row["recipe"], row["gemm"]) == (recipe, gemm)]
        found: dict[str, Any] = {"recipe": recipe, "gemm": gemm, "count": len({row["linear"] for row in of_case})}
        for key in ("one", "mean", "bias"):
            energies = [0.0 if row[key] is None else 10.0 ** (-row[key] / 10.0) for row in of_case]
            found[key] = _decibels(len(energies), sum(energies))
        found["slope"] = sum(abs(row["slope"] or 0.0) for row in of_case) / len(of_case)
        rows.append(found)
    return rows


def _bar(row: Row) -> str:
    return ", ".join(str(row[key]) for key in ("linear", "recipe") if key in row)


def error_rows(capture: Capture, recipe: LinearRecipe, draws: int) -> Iterator[Row]:
    """A row for each quantized operand and each product of a quantized GEMM."""
    capture = prepared(capture, recipe)
    gemms = capture.linear_gemms()
    steps = [RngStep(capture.rng_step.step, draw) for draw in range(draws)]
    for name, gemm in capture.recipe.gemms.items():
        if not gemm.quantized:
            continue
        case = {"linear": capture.linear_id.path, "recipe": recipe.name, "gemm": name}
        matrices = {tensor: matrix_of(capture, name, tensor) for tensor in GEMM_OPERANDS[name]}
        for tensor, matrix in matrices.items():
            if getattr(gemm, tensor) is not None:
                values = (quantized_values(gemms, name, tensor, matrix, step) for step in steps)
                yield {**case, "what": tensor, **draw_row(matrix, values)}
        first, second = (matrix.double() for matrix in matrices.values())
        yield {
            **case,
            "what": "product",
            **draw_row(first @ second.t(), (product(gemms, capture, name, step) for step in steps)),
        }


def prepared(capture: Capture, recipe: LinearRecipe) -> Capture:
    """The capture in fp32 under a recipe, with an amax for each tensor that the recipe scales by a history.

    fp32 holds the captured values and gives the same codes; products are then not rounded to bf16.
    """
    amax = dict(capture.amax_in_effect)
    for tensor in recipe.delayed_operands():
        amax.setdefault(tensor, float(matrix_of(capture, SIDES[tensor][0], tensor).abs().max()))
    tensors = {name: getattr(capture, name).float() for name in ("x", "w", "dy")}
    return replace(capture, **tensors, recipe=recipe, amax_in_effect=amax)


def matrix_of(capture: Capture, gemm: str, tensor: str) -> torch.Tensor:
    """Operand of a GEMM, contracted dimension last."""
    dims = DIMS[gemm, tensor]
    rows, columns = dims[0], dims[1]
    transposed = columns not in TENSORS.get(rows, {})
    found: torch.Tensor = getattr(capture, TENSORS[columns][rows] if transposed else TENSORS[rows][columns])
    return found.t() if transposed else found


def quantized_values(gemms: LinearGemms, gemm: str, tensor: str, matrix: torch.Tensor, step: RngStep) -> torch.Tensor:
    """fp32 [R, K] of the values that a GEMM multiplies, headroom divided out and the transform undone.

    Args:
        matrix: [R, K], contracted dimension last.
    """
    rowwise = SIDES[tensor][0] == gemm
    source = matrix if rowwise else matrix.t()
    request = CastRequest(rowwise, not rowwise, update_amax=False)
    quantized, _ = gemms.backends.resolved.gemms[gemm].quantize(tensor, source, step, request)
    data, scale = quantized.rowwise() if rowwise else quantized.columnwise()
    of_tensor = quantized.rowwise_tensor_scale if rowwise else quantized.columnwise_tensor_scale
    values = QuantizedTensor(
        data.shape, data.dtype, quantized.spec, data, scale, folded=quantized.folded, rowwise_tensor_scale=of_tensor
    ).dequantize()
    transform = gemms.transforms.at(gemm, step)
    if transform is not None:  # H is symmetric, and orthogonal with its factor
        signs = transform.signs(data.device)
        values = hadamard_transform(padded(values, transform.block), torch.ones_like(signs))
        values = (values.reshape(len(values), -1, transform.block) * signs).flatten(1)
    return values[:, : matrix.shape[1]]


def product(gemms: LinearGemms, capture: Capture, gemm: str, step: RngStep) -> torch.Tensor:
    """fp32 product of one draw."""
    if gemm == "fprop":
        return gemms.fprop(capture.x, capture.w, step, update_amax=False)
    return gemms.dgrad(capture.dy, capture.w, step) if gemm == "dgrad" else gemms.wgrad(capture.dy, capture.x, step)


def draw_row(signal: torch.Tensor, draws: Iterable[torch.Tensor]) -> dict[str, float | None]:
    """SNR of one draw, of the mean and of the shared error in dB, and the slope less 1, over at least two draws."""
    signal = signal.double()
    total, energy, count = torch.zeros_like(signal), 0.0, 0
    for draw in draws:
        total += draw
        energy += float((draw - signal).square().sum())
        count += 1
    one, mean = energy / count, float((total / count - signal).square().sum())
    shared = (count * mean - one) / (count - 1)
    power = float(signal.square().sum())
    return {
        "one": _decibels(power, one),
        "mean": _decibels(power, mean),
        # below the spread of the estimate, which is near one / count for many entries, it is not resolved
        "bias": _decibels(power, shared) if shared > 0.1 * one / count else None,
        "slope": float((total * signal).sum()) / (count * power) - 1.0 if power else None,
    }


def _decibels(power: float, error: float) -> float | None:
    return 10.0 * math.log10(power / error) if error > 0 and power > 0 else None
