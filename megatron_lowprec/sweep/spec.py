"""A sweep file: recipes x models x overrides x seeds, at one of its sizes.

::

    summary: one line
    options: {eval-iters: 16}                # of every job, named as in configs/models
    models: [gpt_tiny]                       # a name in configs/models, a file, or {label, model, options}
    recipes: [bf16, mxfp4]                   # a name, a recipe file, or {label, recipe, recipe_override, options}
    overrides: {base: {}, low: {lr: 1.0e-4}} # named variants; optional
    seeds: [1234, 1235]
    evaluate: --recipe bf16 --wikitext       # flags of megatron-lowprec eval, which scores each job's last checkpoint
    resources: {gpus_per_job: 1}
    slurm: {time: "04:00:00"}                # sbatch's long options
    sizes: {tiny: {...}, small: {...}}       # the same keys: lists replace those above, mappings are merged

This module reads and checks the file; ``jobs`` expands it.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron_lowprec.errors import UserError, type_of
from megatron_lowprec.recipe.yaml_text import read_yaml_file
from megatron_lowprec.shipped import find, names_in, shipped_like
from megatron_lowprec.training.config.arguments import (
    checked_options,
    current_names,
    nearest,
    without_rivals,
)
from megatron_lowprec.training.config.fp8_flags import FP8_FLAGS
from megatron_lowprec.training.config.options import OPTIONS

Options = dict[str, Any]
"""Names of ``Config``'s fields -> values."""

RENAMED = {
    "gpus_per_job": "gpus_per_cell",
    "jobs_per_gpu": "cells_per_gpu",
    "processes_per_job": "processes_per_cell",
    "jobs_at_once": "cells_at_once",
}
"""Present names of resources -> former names, which files may still use."""

LABEL = re.compile(r"[A-Za-z0-9_.+-]+")
_SBATCH_NAME = re.compile(r"[a-z][a-z0-9-]*")
_ENDS_A_DIRECTIVE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\"'\\`]")
# Options that the sweep sets for each job, and the key that sets them.
_OWN = {
    **{name: option.sweep for name, option in OPTIONS.items() if option.sweep},
    **dict.fromkeys(FP8_FLAGS, "recipes:"),
}


@dataclass(frozen=True)
class RecipeChoice:
    """A recipe (name or file) with overrides, its label in the sweep, and options for its jobs only."""

    label: str
    recipe: str
    recipe_override: tuple[str, ...] = ()
    options: Options = field(default_factory=dict)


@dataclass(frozen=True)
class ModelChoice:
    """A file of options with its label in the sweep, and options for its jobs only."""

    label: str
    file: str
    options: Options


@dataclass(frozen=True)
class Variant:
    """Named options; the name is None if the sweep has no overrides."""

    label: str | None
    options: Options


@dataclass(frozen=True)
class Resources:
    """Resources of a job."""

    gpus_per_job: int | None = None  # also a job's processes; None: one if there are GPUs, else the CPU
    jobs_per_gpu: int = 1
    processes_per_job: int = 1  # on a CPU
    jobs_at_once: int | None = None  # None: 1 on a CPU, all on GPUs and in a Slurm array

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None and each.default is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"resources: {each.name} is {value!r}; write a whole number of at least 1")
        if self.jobs_per_gpu > 1 and (self.gpus_per_job or 1) > 1:
            raise UserError(
                f"resources: {self.gpus_per_job} gpus_per_job and {self.jobs_per_gpu} jobs_per_gpu: jobs either "
                "share a GPU or have several; set one of the two to 1"
            )


@dataclass(frozen=True)
class Sweep:
    """One size of a sweep file. ``needs`` are options that must be given in addition to the file."""

    name: str
    size: str | None
    summary: str
    options: Options
    models: tuple[ModelChoice, ...]
    recipes: tuple[RecipeChoice, ...]
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    needs: tuple[str, ...]
    evaluate: tuple[str, ...]  # flags of megatron-lowprec eval; empty: jobs are not scored
    resources: Resources
    slurm: Mapping[str, str]


def read(path: str, size: str | None = None) -> Sweep:
    """The sweep in a file, at ``size`` or its first size.

    Raises:
        UserError: a file that cannot be read, an unknown key (with the nearest one), a value of the wrong kind, or an
            unknown size.
    """
    content = _yaml_file(path)
    _known(path, content, (*_KEYS, "sizes"))
    sizes = _mapping(f"{path}: sizes", content.get("sizes"))
    for name, part in sizes.items():
        _known(f"{path}: sizes: {name}", _mapping(f"{path}: sizes: {_label(f'{path}: sizes', name)}", part))
    if size is None and sizes:
        size = str(next(iter(sizes)))
    if size is not None and size not in sizes:
        has = f"it has {', '.join(map(str, sizes))}" if sizes else "it has no sizes: leave --size out"
        raise UserError(f"--size {size}: {path} has no such size; {has}")
    over = _mapping(path, sizes[size]) if size is not None else {}
    parts = [(path, content), (f"{path}: sizes: {size}", over)]

    def latest(key: str, default: Any = None) -> Any:
        return over.get(key, content.get(key, default))

    def merged(key: str) -> dict[str, Any]:
        return {k: v for where, part in parts for k, v in _mapping(f"{where}: {key}", part.get(key)).items()}

    options: Options = {}
    for where, part in parts:
        options = merge(options, options_of(f"{where}: options", _mapping(f"{where}: options", part.get("options"))))
    variants, needs = _mapping(f"{path}: overrides", latest("overrides")), latest("needs")
    return Sweep(
        name=Path(path).stem,
        size=size,
        summary=str(latest("summary", "")),
        options=options,
        models=tuple(_model(f"{path}: models", entry) for entry in _list(path, "models", latest("models"))),
        recipes=tuple(_recipe(f"{path}: recipes", entry) for entry in _list(path, "recipes", latest("recipes"))),
        variants=tuple(_variant(f"{path}: overrides", *item) for item in variants.items()) or (Variant(None, {}),),
        seeds=_distinct(
            f"{path}: seeds", [_seed(path, seed) for seed in _list(path, "seeds", latest("seeds", [1234]))]
        ),
        needs=tuple(checked_options(f"{path}: needs", dict.fromkeys(_list(path, "needs", needs)))) if needs else (),
        evaluate=evaluation_flags(f"{path}: evaluate", latest("evaluate", "")),
        resources=_resources(path, merged("resources")),
        slurm=sbatch_options(f"{path}: slurm", merged("slurm")),
    )


def size_names(path: str) -> list[str | None]:
    """Sizes of a sweep file in its order; None alone if it has none. Raises as ``read``."""
    sizes = _mapping(f"{path}: sizes", _yaml_file(path).get("sizes"))
    return [_label(f"{path}: sizes", name) for name in sizes] or [None]


def seeds_of(text: str) -> tuple[int, ...]:
    """Seeds of ``--seeds``: numbers and ranges with both ends, such as "1234-1241" or "1,5-8".

    Raises:
        UserError: another form, a falling range, or a seed that is named twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if found is None:
            raise UserError(f"--seeds {text}: {part!r} is no seed; write numbers or ranges, such as 1234-1241 or 1,5-8")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise UserError(f"--seeds {text}: the range {part} falls; write {last}-{first}")
        seeds += range(first, last + 1)
    return _distinct(f"--seeds {text}", seeds)


def _distinct(where: str, seeds: Sequence[int]) -> tuple[int, ...]:
    twice = [seed for seed, count in Counter(seeds).items() if count > 1]
    if twice:
        raise UserError(f"{where} names {', '.join(map(str, twice))} twice; name each seed once")
    return tuple(seeds)


def merge(lower: Options, upper: Options) -> Options:
    """``lower`` updated with ``upper``; None removes an option; options that exclude it are removed with it."""
    kept = without_rivals(lower, upper, ("one part of the sweep", "another part of the sweep"))
    return {name: value for name, value in {**kept, **upper}.items() if value is not None}


def options_of(where: str, content: Mapping[Any, Any]) -> Options:
    """Checked options by field name; rejects those that a sweep sets itself."""
    options = checked_options(where, content)
    for name in options.keys() & _OWN.keys():
        raise UserError(f"{where}: {name.replace('_', '-')} is not an option of a job; it belongs to {_OWN[name]}")
    return options


def evaluation_flags(where: str, text: Any) -> tuple[str, ...]:
    """Words of flags of megatron-lowprec eval; rejects those that a sweep sets itself."""
    if not isinstance(text, str):
        raise UserError(f"{where} is {text!r}; write flags of megatron-lowprec eval, such as --recipe bf16 --wikitext")
    words = tuple(words_of(where, text))
    names = {word.partition("=")[0] for word in words}
    for own in ("--load", "--out", "--iteration"):
        if any(own.startswith(name) and len(name) > 2 for name in names):  # argparse takes abbreviations
            raise UserError(f"{where}: {own} is set by the sweep; leave it out")
    return words


def words_of(where: str, text: str) -> list[str]:
    """Words of a text, as a shell splits it; UserError for a quotation or an escape without its end."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(
            f"{where}: {text} cannot be split into words: {error}; close its quotes, or escape each with a backslash"
        ) from None


def sbatch_options(where: str, content: Mapping[Any, Any]) -> dict[str, str]:
    """sbatch's long options as text; rejects those that the array sets itself."""
    options = {}
    for key, value in content.items():
        name = str(key).replace("_", "-").lstrip("-")
        if name in ("array", "requeue", "no-requeue", "output", "error", "open-mode", "signal", "ntasks", "nodes"):
            raise UserError(f"{where}: {name} is set by the sweep; leave it out")
        if name == "time" and not isinstance(value, str):
            raise UserError(f"{where}: time is {value!r}: YAML reads 12:00:00 as a number; put it into quotes")
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise UserError(f"{where}: {name} is {value!r}; write text or a number")
        if not _SBATCH_NAME.fullmatch(name):
            raise UserError(f"{where}: {name!r} is no long option of sbatch; write a name such as cpus-per-task")
        options[name] = checked_directive(f"{where}: {name}", str(value))
    return options


def checked_directive(where: str, value: str) -> str:
    """``value`` if it is one word of a batch script's #SBATCH line; in double quotes it may have spaces.

    Raises:
        UserError: a line break, which would make the rest a command of the script, or a quote or backslash.
    """
    wrong = _ENDS_A_DIRECTIVE.search(value)
    if wrong is not None:
        raise UserError(f"{where}: {value!r} has {wrong[0]!r}, which would end the #SBATCH line; leave it out")
    return value


def _yaml_file(path: str) -> dict[Any, Any]:
    content = read_yaml_file(find(path, "configs/sweeps"), path, shipped_like(path, "configs/sweeps"))
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected keys and values at the top, found {type_of(content)}")
    return content


_KEYS = ("summary", "options", "models", "recipes", "overrides", "seeds", "needs", "evaluate", "resources", "slurm")


def _known(where: str, content: Mapping[Any, Any], known: Sequence[str] = _KEYS) -> None:
    for key in content:
        if key not in known:
            raise UserError(f"{where}: unknown key '{key}'{nearest(str(key), known)}; it may have {', '.join(known)}")


def _mapping(where: str, value: Any) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected keys and values, found {value!r}")
    return value


def _list(path: str, key: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UserError(f"{path}: {key} is {value!r}; write a list with at least one entry")
    return value


def _text(where: str, content: Mapping[Any, Any], key: str) -> str:
    value = content.get(key)
    if not isinstance(value, str):
        raise UserError(f"{where}: {key} is {value!r}; write a name")
    return value


def _label(where: str, label: Any) -> str:
    if not isinstance(label, str) or not LABEL.fullmatch(label):
        raise UserError(f"{where}: the label {label!r} names a folder: write letters, digits and any of _.+-")
    return label


def _recipe(where: str, entry: Any) -> RecipeChoice:
    content = current_names(where, {"recipe": entry} if isinstance(entry, str) else _mapping(where, entry))
    _known(where, content, ("label", "recipe", "recipe_override", "options"))
    recipe = _text(where, content, "recipe")
    overrides = content.get("recipe_override", [])
    if not isinstance(overrides, list) or not all(isinstance(item, str) for item in overrides):
        raise UserError(f"{where}: recipe_override is {overrides!r}; write a list such as [dgrad.hadamard.block=128]")
    name = Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe
    for key in ("recipe_override", "options"):
        if content.get(key) and "label" not in content:
            raise UserError(f"{where}: {recipe} with {key} has no label; add one, such as label: my_{name}")
    options = options_of(f"{where}: {recipe}: options", _mapping(f"{where}: {recipe}", content.get("options")))
    return RecipeChoice(_label(where, content.get("label", name)), recipe, tuple(overrides), options)


def _model(where: str, entry: Any) -> ModelChoice:
    content = {"model": entry} if isinstance(entry, str) else _mapping(where, entry)
    _known(where, content, ("label", "model", "options"))
    model = _text(where, content, "model")
    is_file = model.endswith((".yaml", ".yml"))
    file = model if is_file else f"configs/models/{model}.yaml"
    if not find(file).exists():
        hint = nearest(model, names_in("configs/models"))
        raise UserError(f"{where}: {model}: no such model{hint}; give a name in configs/models or a file")
    label = content.get("label", Path(model).stem if is_file else model)
    options = options_of(f"{where}: {model}: options", _mapping(f"{where}: {model}", content.get("options")))
    return ModelChoice(_label(where, label), file, options)


def _variant(where: str, label: Any, content: Any) -> Variant:
    return Variant(_label(where, label), options_of(f"{where}: {label}", _mapping(f"{where}: {label}", content)))


def _seed(path: str, seed: Any) -> int:
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise UserError(f"{path}: seeds: {seed!r} is not a whole number of at least 0")
    return seed


def _resources(path: str, content: Mapping[Any, Any]) -> Resources:
    today = {old: new for new, old in RENAMED.items()}
    content = {today.get(key, key): value for key, value in content.items()}
    _known(f"{path}: resources", content, list(RENAMED))
    return Resources(**content)
