"""Fields in which two recipes differ, and the error of both on captured operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.lab.captured.operand_error import error_result, error_rows, linear_of, rows_of, with_captured
from megatron_lowprec.lab.experiment import Lab, Result, Table
from megatron_lowprec.recipe.explain import describe_operand
from megatron_lowprec.recipe.parsing import load_recipe, recipe_to_dict
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import QuantSpec
from megatron_lowprec.recipe.serialization import flattened
from megatron_lowprec.text_tables import Column, Row


def run(lab: Lab, arguments: Sequence[str], recipes: Sequence[str], draws: int) -> Result:
    """Table of the fields and, with files, the tables of ``operand_error`` and their difference.

    Args:
        arguments: two recipes, names or YAML files, then files of ``--capture-step``.
        recipes: must be empty.
        draws: of rounding noise and signs.

    Raises:
        UserError: fewer than two recipes; an unknown one; a file that is no capture.
    """
    if recipes:
        raise UserError("--recipes is for operand-error; recipe-diff takes its two recipes as arguments")
    if len(arguments) < 2:
        raise UserError(f"recipe-diff was asked with {len(arguments)} recipes; name two, then files of --capture-step")
    first, second = (load_recipe(name) for name in arguments[:2])
    if first.name == second.name:  # a YAML file may keep the name of its base
        first, second = (replace(each, name=name) for each, name in zip((first, second), arguments))
    fields = field_table(first, second)
    title = f"{first.name} and {second.name}"
    if len(arguments) == 2:
        return Result(title, (), [fields], {})
    rows = rows_of(arguments[2:], (first, second), lab.device, partial(error_rows, draws=draws))
    return error_result(rows, draws, [fields, comparison(rows, first, second)], title)


def field_table(first: Recipe, second: Recipe) -> Table:
    """A row for each field that decides numerics and differs."""
    pairs = [dict(flattened(recipe_to_dict(recipe))) for recipe in (first, second)]
    names = [name for name in dict.fromkeys([*pairs[0], *pairs[1]]) if pairs[0].get(name) != pairs[1].get(name)]
    # an operand or a transform that one side lacks is one difference
    lacking = {name for name in names if any(name in pair and pair[name] == "none" for pair in pairs)}
    rows = []
    for name in names:
        if not any(name.startswith(f"{whole}.") for whole in lacking):
            values = (pair.get(name) or _whole(recipe, name) for pair, recipe in zip(pairs, (first, second)))
            rows.append({"field": name, **dict(zip(("first", "second"), values))})
    columns = (Column("field", "field"), Column("first", first.name), Column("second", second.name))
    return Table("fields", "fields that differ", columns, rows)


def comparison(rows: Sequence[Row], first: Recipe, second: Recipe) -> Table:
    """SNR of one draw and of the mean under both recipes, for what both quantize."""
    of = [{_case(row): row for row in rows if row["recipe"] == recipe.name} for recipe in (first, second)]
    found = []
    for case, row in of[0].items():
        other = of[1].get(case)
        if other is not None:
            values = {f"{key}-{at}": each[key] for key in ("one", "mean") for at, each in enumerate((row, other))}
            found.append({key: row[key] for key in ("linear", "captured", "gemm", "what") if key in row} | values)
    columns = [*with_captured([Column(key, key) for key in ("linear", "gemm", "what")], rows)]
    for key, heading in (("one", "one draw"), ("mean", "mean")):
        columns += [
            Column(f"{key}-{at}", f"{heading}, dB\n{recipe.name}", ".2f") for at, recipe in enumerate((first, second))
        ]
    return Table("compared", "SNR of what both recipes quantize", tuple(columns), found)


def _case(row: Row) -> tuple[str, str | None, str, str]:
    return *linear_of(row), row["gemm"], row["what"]


def _whole(recipe: Recipe, name: str) -> str:
    """What a name stands for that the other recipe lacks, an operand or a transform; or no rules and no phases."""
    whole: Any = recipe
    found = reduce(getattr, name.split("."), whole)
    if found == ():
        return "none"
    if isinstance(found, QuantSpec):
        return describe_operand(found)
    return ", ".join(f"{key} {value}" for key, value in vars(found).items())
