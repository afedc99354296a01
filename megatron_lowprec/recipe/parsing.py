"""Loads recipes from names, YAML files and ``key=value`` overrides.

A recipe file has a base and the fields that differ::

    base: mxfp4_rht_sr
    name: mxfp4_rht128_sr
    dgrad: {hadamard: {block: 128}}
    wgrad: {hadamard: {block: 128}}
"""

import dataclasses
import os
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from megatron_lowprec.errors import UserError, type_of
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.registry import get_recipe, is_path, recipes
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from megatron_lowprec.recipe.serialization import (
    build as build,
)
from megatron_lowprec.recipe.serialization import check_key, copied, merge, recipe_from_dict, recipe_to_dict
from megatron_lowprec.recipe.serialization import in_current_form as in_current_form
from megatron_lowprec.recipe.yaml_text import read_yaml_file, read_yaml_text
from megatron_lowprec.shipped import find

RecipeLike: TypeAlias = Recipe | str | os.PathLike[str]
"""A Recipe, the name of one, or the path of a YAML file."""


def load_recipe(name_or_file: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of that name or YAML file, ``overridden``.

    ``GEMMS+STATE`` names two recipes: the GEMMs of one, with optimizer state, gradients and weights of the other.

    Raises:
        UserError: unknown recipe or file, with the nearest names; as ``overridden``.
    """
    path = find(name_or_file, "" if name_or_file in recipes() else "configs/recipes")
    if not is_path(str(path)):
        return overridden(_named_recipe(name_or_file), overrides)
    recipe, written = _from_file(path)
    return overridden(recipe, overrides, written)


def as_recipe(recipe: RecipeLike) -> Recipe:
    """A recipe as it is, or the one of a name or a YAML file; UserError for anything else."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str | os.PathLike):
        return load_recipe(os.fspath(recipe))
    raise UserError(f"got {type_of(recipe)} as recipe: give a Recipe, the name of one, or a YAML file")


def same_numerics(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes differ at most in name, summary and source."""
    return dataclasses.replace(one, name=other.name, summary=other.summary, source=other.source) == other


def overridden(recipe: Recipe, overrides: Sequence[str], written: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe with overrides such as ``dgrad.hadamard.block=128`` applied in order.

    A value is parsed as YAML (``null`` removes an operand, a transform or all of a GEMM). Overrides are appended to the
    recipe's name, so that no log shows a published name for a changed recipe; summary and source are marked likewise.

    Args:
        written: the recipe as a file writes it, where single fields of a rule's or phase's GEMM change the recipe's,
            overridden or not. Without it their GEMMs are whole and stay.

    Raises:
        UserError: unknown field, with the nearest names; a value of the wrong type or not among its choices; one
            override that is in no list.
    """
    if not overrides:
        return recipe
    if isinstance(overrides, str):
        raise UserError(f"overrides are {overrides!r}, but must be a list such as [{overrides!r}]")
    data = recipe_to_dict(recipe)
    if written is not None:
        # without the one object that several places of a file with YAML's anchors are
        data = {**copied(written), "summary": recipe.summary, "source": recipe.source}
    given = set()
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals:
            raise UserError(
                f"--recipe-override {override!r} has no value: write FIELD=VALUE, such as dgrad.hadamard.block=128"
            )
        value = read_yaml_text(text, f"--recipe-override {override}")
        given.add(path.strip())
        for key in reversed(path.strip().split(".")):
            value = {key: value}
        merge(Recipe, data, value, "")
    if "name" not in given:
        data["name"] = "+".join([data["name"], *overrides])
    _check_new_operands(recipe, data)
    return _marked_as_changed(_built(data, given), recipe, given)


def _built(data: Mapping[str, Any], given: Iterable[str]) -> Recipe:
    """The recipe; an error of rules or phases that were right before the ``given`` overrides says so."""
    try:
        return recipe_from_dict(data)
    except UserError as error:
        changed = {path.split(".")[0] for path in given}
        named = [name for name in ("rules", "phases") if data.get(name) and name not in changed]
        if not named:
            raise
        recipe_from_dict({**data, **dict.fromkeys(named)})
        raise UserError(
            f"{error}; the overrides change what {' and '.join(named)} of the recipe build on: override these as well"
        ) from None


class UnknownAttributeError(UserError, AttributeError):
    """No recipe has a name that a module was asked for; an AttributeError as well, since pickle asks every module."""


def recipe_of_attribute(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """``load_recipe`` for a module's ``__getattr__``.

    Raises:
        UserError: as ``load_recipe``; for an import statement and for Megatron-core no AttributeError, which they
            would replace by an error of their own, without the reason.
    """
    try:
        return load_recipe(name, overrides)
    except UserError as error:
        asks = sys._getframe(2).f_globals.get("__name__", "")
        if asks.startswith(("importlib.", "megatron.core.")):
            raise
        raise UnknownAttributeError(str(error)) from None


def _check_new_operands(recipe: Recipe, data: Mapping[str, Any]) -> None:
    """Reject overrides of single fields of an operand that the recipe does not quantize."""
    for gemm, operands in GEMM_OPERANDS.items():
        for operand in operands:
            given = data.get(gemm)
            fields = given.get(operand) if isinstance(given, Mapping) else None
            lacking = _lacking(fields) if isinstance(fields, Mapping) else set()
            if lacking and getattr(recipe.gemms[gemm], operand) is None:
                path = f"{gemm}.{operand}"
                raise UserError(
                    f"recipe {recipe.name} does not quantize {path}: give --recipe a recipe that does, or override "
                    f"{' and '.join(f'{path}.{name}' for name in sorted(lacking))} as well"
                )


def _lacking(fields: Mapping[str, Any]) -> set[str]:
    """Names, in shorthand, of the required fields that are not among an operand's."""
    scale = fields.get("scale")
    return {"format", "granularity"} - fields.keys() - (scale.keys() if isinstance(scale, Mapping) else set())


def _marked_as_changed(recipe: Recipe, base: Recipe, given: Container[str]) -> Recipe:
    """The recipe, with ``base`` named as the origin of the summary and the source that are not ``given``.

    Without a mark a log would show a paper's reference for numerics that are not the paper's.
    """
    if same_numerics(recipe, base):
        return recipe
    origin = f"changed from {base.name}"
    marks = {
        "summary": f"{origin}: {base.summary}",
        "source": f"{origin} ({base.source})" if base.source else origin,
    }
    new: dict[str, Any] = {
        name: mark
        for name, mark in marks.items()
        if name not in given and not getattr(base, name).startswith("changed from ")  # a change of a change
    }
    return dataclasses.replace(recipe, **new)


def _named_recipe(text: str) -> Recipe:
    """The recipe of a name, or of ``GEMMS+STATE``: GEMMs of one recipe with the training state of another.

    Raises:
        UserError: an unknown name, or a second recipe without optimizer state, gradients or weights of its own.
    """
    name, plus, of_state = text.partition("+")
    recipe = get_recipe(name)
    if not plus:
        return recipe
    state = get_recipe(of_state)
    if not state.changes_training:
        raise UserError(
            f"--recipe {text} takes optimizer state, gradients and weights from {of_state}, which has Megatron-core's; "
            "give a recipe such as fp8_lm_o2 after the +"
        )
    return dataclasses.replace(
        recipe,
        name=text,
        summary=f"GEMMs of {name}; optimizer state, gradients and storage of weights of {of_state}",
        source="; ".join(source for source in (recipe.source, state.source) if source),
        optimizer=state.optimizer,
        gradients=state.gradients,
        fp8_weights=state.fp8_weights,
    )


def _from_file(path: Path) -> tuple[Recipe, Mapping[str, Any]]:
    """The recipe of a file, and its fields as they are written, over the base's."""
    if path.is_dir():
        raise UserError(
            f"--recipe {path} is a folder: give a YAML file in it, or the name of a recipe; --list-recipes prints them"
        )
    if not path.is_file():
        raise UserError(f"recipe file {path} does not exist; give a file that does, or a name from --list-recipes")
    data = read_yaml_file(path, str(path), "a recipe file is YAML such as 'base: mxfp4_rht_sr'")
    if not isinstance(data, dict):
        raise UserError(f"{path} holds {type_of(data)}, but a recipe file is a mapping such as 'base: mxfp4_rht_sr'")
    if "num-layers" in data or "num_layers" in data:
        raise UserError(f"{path} is the configuration of a model: give it as --config, and as --recipe a recipe")
    base = data.pop("base", None)
    if base is not None and (not isinstance(base, str) or is_path(base)):
        raise UserError(
            f"{path}: base is {base!r}, but must be the name of a registered recipe, not a file; --list-recipes prints "
            "them"
        )
    try:
        for key in data:
            check_key(Recipe, key, "", more=("base",))
        if base is None:
            written = {"name": path.stem, "summary": f"from {path.name}", **data}
            return recipe_from_dict(written), written
        origin = _named_recipe(base)
        written = recipe_to_dict(origin)
        merge(Recipe, written, {"name": path.stem, **data}, "")
        return _marked_as_changed(recipe_from_dict(written), origin, data), written
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
