"""Expands a sweep to its jobs: one run of pretrain_gpt.py each, checked as far as possible without torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megatron_lowprec.errors import UserError
from megatron_lowprec.files import atomic_write, read_json
from megatron_lowprec.recipe.coverage import check_activations, check_sizes
from megatron_lowprec.recipe.parsing import load_recipe, recipe_to_dict
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.shipped import find
from megatron_lowprec.sweep.spec import (
    LABEL,
    ModelChoice,
    Options,
    RecipeChoice,
    Sweep,
    Variant,
    merge,
    options_of,
    words_of,
)
from megatron_lowprec.training.config.arguments import KINDS, flag, parse, rivals_of
from megatron_lowprec.training.config.options import Config, options_in
from megatron_lowprec.training.config.paths import create_folder, free_names
from megatron_lowprec.training.config.resolve import resolve_model, resolve_recipe, resolve_run
from megatron_lowprec.training.data.blend import all_paths
from megatron_lowprec.training.models.sizes import linear_sites, tensor_ranks
from megatron_lowprec.training.options.declaration import Part

MANIFEST = "sweep.json"
DRIVER = ("-m", "megatron_lowprec.training.driver")
EVALUATE = ("-m", "megatron_lowprec", "eval")
"""What Python or torchrun starts for a job: a module, or the path of a script."""
EVALUATION = "evaluation.json"
"""File in a job's folder: the scores of its last checkpoint, as megatron-lowprec eval writes them, and its flags."""
FLAGS = "flags"
"""Key of ``EVALUATION``: the flags of the scores. Older files lack it."""

# Changing them does not make it another run. The resolved recipe is compared in place of its options.
NOT_THE_RUN = frozenset(options_in(Part.OUTPUT, Part.RECIPE))


@dataclass(frozen=True)
class Job:
    """One run. Two jobs with equal ``resolved`` are the same run."""

    index: int  # position in the sweep, the task id of a Slurm array
    id: str  # folder name from labels: MODEL-RECIPE[-VARIANT]-sSEED
    label: str
    recipe: str
    model: str
    variant: str | None
    seed: int
    processes: int
    arguments: tuple[str, ...]  # of pretrain_gpt.py, except --save and --load
    resolved: Mapping[str, Any]  # non-default options (including the model file's), recipe, processes
    train_iters: int  # of the whole run
    seq_length: int  # tokens of a sample
    evaluate: tuple[str, ...] = ()  # flags of megatron-lowprec eval; empty: the job is not scored


def expand(sweep: Sweep, settings: Options, processes: int) -> list[Job]:
    """All jobs, grouped by seed, so that the first seed completes a whole table early.

    Args:
        settings: options that override the file's, for all jobs.
        processes: number of processes of each job.

    Raises:
        UserError: as the driver, for a missing required option, or for two jobs of one name.
    """
    for need in sweep.needs:
        if not any(settings.get(name) for name in rivals_of(need)):
            own = f"{flag(need)} or " if need == "data_path" else ""  # the one option that sweep.py has as a flag
            raise UserError(
                f"{sweep.name} at size {sweep.size} needs {flag(need)}: give {own}--set {flag(need)[2:]}=VALUE"
            )
    jobs = []
    every = product(sweep.seeds, sweep.models, sweep.variants, sweep.recipes)
    for index, (seed, model, variant, recipe) in enumerate(every):
        options = merge(merge(merge(sweep.options, model.options), variant.options), recipe.options)
        options = merge(options, settings)
        if sweep.evaluate and options.get("no_save"):
            raise UserError(
                f"{sweep.name}: its jobs are scored by their checkpoints, and no-save writes none; leave no-save out, "
                "or give --evaluate= for no scores"
            )
        jobs.append(replace(_job(index, recipe, model, variant, seed, options, processes), evaluate=sweep.evaluate))
    ids = [job.id for job in jobs]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise UserError(f"{sweep.name}: more than one job would be {', '.join(twice)}; give them labels of their own")
    return jobs


def check_data(jobs: Sequence[Job]) -> None:
    """Reject missing data once, before every job fails on it."""
    for job in jobs:
        config = resolve_run(resolve_model(parse(job.arguments)[0]), job.processes, gpus=True)
        for path in all_paths(config):
            if not any(Path(name).is_file() for name in (path, f"{path}.idx")):
                raise UserError(f"{job.id}: data path {path}: no such file, nor {path}.idx; check the path")


def settings_of(texts: Sequence[str]) -> Options:
    """Options from ``--set key=value``, with values as on pretrain_gpt.py's command line; null removes an option."""
    given: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set {text} has no value: write KEY=VALUE, such as lr=1e-3")
        given[key.strip().lstrip("-")] = _value(text, key.strip().lstrip("-").replace("-", "_"), value.strip())
    return options_of("--set", given)


def _value(text: str, name: str, value: str) -> Any:
    if name not in KINDS or value == "null":
        return None
    kind = KINDS[name]
    if kind.element is bool:
        if value not in ("true", "false"):
            raise UserError(f"--set {text}: wants true or false")
        return value == "true"
    items = words_of(f"--set {name.replace('_', '-')}", value) if kind.is_list else [value]
    try:
        found = [kind.element(item) for item in items]
    except ValueError:
        raise UserError(f"--set {text}: wants {'a whole number' if kind.element is int else 'a number'}") from None
    return found if kind.is_list else found[0]


class HasId(Protocol):
    """A job, or the row of one in a table."""

    @property
    def id(self) -> str:
        """Name of the job."""


J = TypeVar("J", bound=HasId)


def selected(jobs: Sequence[J], patterns: Sequence[str]) -> list[J]:
    """Jobs whose id matches one of the patterns, globs or parts of a name; all jobs without patterns.

    Raises:
        UserError: a pattern without a match.
    """
    globs = [pattern if set(pattern) & set("*?[") else f"*{pattern}*" for pattern in patterns]
    for pattern, glob in zip(patterns, globs, strict=True):
        if not any(fnmatchcase(job.id, glob) for job in jobs):
            raise UserError(f"--only {pattern} matches no job; --dry-run prints them all")
    return [job for job in jobs if not globs or any(fnmatchcase(job.id, glob) for glob in globs)]


def command(job: Job, run: Path) -> list[str]:
    """The driver's arguments with its folder: it resumes from a checkpoint in it, and saves at SIGTERM.

    Without --load, which would make each start another beginning of a job with options that say how a run begins.
    """
    return [*DRIVER, *job.arguments, "--save", str(run), "--exit-signal-handler"]


def evaluation(job: Job, run: Path) -> list[str] | None:
    """Arguments that score the job's last checkpoint; None if it is scored under its flags, or need not be."""
    if not job.evaluate or is_scored(run, job.evaluate):
        return None
    return [*EVALUATE, "--load", str(run), "--out", str(run / EVALUATION), *job.evaluate]


def is_scored(run: Path, evaluate: Sequence[str]) -> bool:
    """Whether a job has scores under these flags; scores without flags count, whichever they had."""
    try:
        scores = _scores(run)
    except (FileNotFoundError, UserError):  # a killed evaluation may leave half a file
        return False
    return FLAGS not in scores or scores[FLAGS] == list(evaluate)


def keep_older_scores(run: Path) -> None:
    """Copy scores under other flags aside, as ``evaluation.1.json`` and so on, before new ones replace them."""
    scores = run / EVALUATION
    if scores.exists():
        shutil.copyfile(scores, *free_names([scores]))


def keep_flags(job: Job, run: Path) -> bool:
    """Add the job's flags to its new scores; False if there are none that can be read."""
    try:
        content = {**_scores(run), FLAGS: list(job.evaluate)}
    except (FileNotFoundError, UserError):
        return False
    atomic_write(run / EVALUATION, json.dumps(content, indent=1) + "\n")
    return True


def _scores(run: Path) -> dict[str, Any]:
    # names of texts may be any
    return read_json(run / EVALUATION, "move it away to score the job anew", check=lambda scores: None)


def write_manifest(out: Path, sweep: Sweep, jobs: Sequence[Job]) -> None:
    """Write ``sweep.json``, which describes the job folders to other tools; ``run`` is relative to it."""
    names = ("id", "label", "recipe", "model", "variant", "seed")
    rows = [{**{name: getattr(job, name) for name in names}, "run": job.id} for job in jobs]
    create_folder(out, "--out")
    content = {"name": sweep.name, "size": sweep.size, "cells": rows}
    atomic_write(out / MANIFEST, json.dumps(content, indent=1) + "\n")


def read_manifest(out: Path) -> dict[str, Any]:
    """Read the file of ``write_manifest``, whose ids name folders; UserError if there is none, or another file."""
    try:
        content = read_json(out / MANIFEST, remedy := "start the sweep again, which writes it")
    except FileNotFoundError:
        raise UserError(f"{out} holds no {MANIFEST}: no sweep was started there; check --size and --out") from None
    try:
        whole = all(LABEL.fullmatch(cell["id"]) for cell in content["cells"])
    except (KeyError, TypeError):
        whole = False
    if not whole:
        raise UserError(f"{out / MANIFEST}: its cells are not jobs with the name of a folder each; {remedy}")
    return content


def _job(
    index: int, recipe: RecipeChoice, model: ModelChoice, variant: Variant, seed: int, options: Options, processes: int
) -> Job:
    name = "-".join(part for part in (model.label, recipe.label, variant.label, f"s{seed}") if part)
    by_file = recipe.recipe.endswith((".yaml", ".yml"))
    chosen = ["--config", str(find(model.file)), "--recipe", str(find(recipe.recipe)) if by_file else recipe.recipe]
    chosen += [word for override in recipe.recipe_override for word in ("--recipe-override", override)]
    arguments = [*chosen, "--seed", str(seed), *flags(options)]
    try:
        config, given, _ = parse(arguments)
        loaded = load_recipe(config.recipe, config.recipe_override)
        sizes = resolve_model(config)
        check_sizes(loaded, linear_sites(sizes), sizes.shape.num_layers, tensor_ranks(sizes))
        check_activations(loaded, linear_sites(sizes), tensor_ranks(sizes))
        run = resolve_run(resolve_recipe(sizes, loaded, given)[0], processes, gpus=True)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    return Job(
        index=index,
        id=name,
        label=recipe.label,
        recipe=recipe.recipe,
        model=model.label,
        variant=variant.label,
        seed=seed,
        processes=processes,
        arguments=tuple(arguments),
        resolved=_resolved(config, loaded, processes),
        train_iters=run.steps.iterations,
        seq_length=run.shape.seq_length,
    )


def flags(options: Options) -> list[str]:
    """Command-line flags for these options, which override the model's file."""
    words: list[str] = []
    for name, value in options.items():
        if value is False and name.startswith(("no_", "disable_")):
            raise UserError(f"{name.replace('_', '-')}: false cannot be said on a command line; leave it out")
        if isinstance(value, bool):
            words.append(flag(name) if value else flag(f"no_{name}"))
        else:
            words += [flag(name), *map(str, value if isinstance(value, list) else [value])]
    return words


def _resolved(config: Config, recipe: Recipe, processes: int) -> dict[str, Any]:
    defaults = asdict(Config())
    options = {
        name: value for name, value in asdict(config).items() if name not in NOT_THE_RUN and value != defaults[name]
    }
    content = {name: value for name, value in recipe_to_dict(recipe).items() if name not in ("summary", "source")}
    return {"options": options, "recipe": content, "processes": processes}
