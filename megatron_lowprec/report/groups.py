"""Groups of comparable runs: equal in model, data, budget and schedule; recipe and seed may differ."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import load_recipe, recipe_to_dict
from megatron_lowprec.report.amounts import amount
from megatron_lowprec.report.curve import Series, Status, shared
from megatron_lowprec.report.runs import Run
from megatron_lowprec.training.config.arguments import KINDS, checked_options
from megatron_lowprec.training.config.options import DEFAULTS, NO_EFFECT, Config, options_with
from megatron_lowprec.training.config.resolve import resolve_model
from megatron_lowprec.training.models.sizes import num_non_embedding_parameters
from megatron_lowprec.training.schedule import Schedule, plan

# Options that a report compares or shows otherwise. Runs that differ in any other option are in different groups.
_IGNORED = NO_EFFECT.union(options_with(grouped=False))
_DEFAULTS: Mapping[str, Any] = vars(DEFAULTS)
_SCHEDULE = "schedule."  # prefix of the schedule's fields among options
_EARLIER = "earlier options"  # of a run that resumed with others
_WEIGHTS = "initial weights"  # of a run that began with a checkpoint's
_ARCHIVE = "archive"  # of a run whose paths are known within its archive alone
_NUMBERED = re.compile(r'(?<=")FOLDER\d+(?=/)')

# Ignored options that nevertheless determine initial weights and dropout, because Megatron offsets its seed by rank.
_INITIALIZATION = options_with(draws=True)


@dataclass(frozen=True)
class Group:
    """Comparable runs of one model, data, budget and schedule."""

    name: str  # for headings: the model, with the sweep's variant if any
    runs: tuple[Run, ...]  # all of them, whatever their status
    reference: str  # label of the baseline, if present
    apart: Mapping[str, Any]  # option -> value, for options that differ between groups of a report
    of_model: frozenset[str]  # those of them that are equal in all groups of any one model

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The reference first, then the others in order of appearance."""
        found = dict.fromkeys(run.label for run in self.runs)
        return tuple(sorted(found, key=lambda label: label != self.reference))

    def of(self, label: str, status: Status | None = None) -> tuple[Run, ...]:
        """Runs of a label, with any status or a given one."""
        return tuple(run for run in self.runs if run.label == label and status in (None, run.status))

    @cached_property
    def finished(self) -> tuple[str, ...]:
        """Labels that have finished runs."""
        return tuple(label for label in self.labels if self.of(label, Status.FINISHED))

    @property
    def compared(self) -> tuple[str, ...]:
        """Labels besides the reference that have finished runs; none if the reference has none."""
        others = tuple(label for label in self.finished if label != self.reference)
        return others if self.reference in self.finished else ()

    @property
    def tokens(self) -> float:
        """Token budget of each run."""
        return self.runs[0].tokens

    @property
    def parameters(self) -> float:
        """Parameters of the model; NaN if no run has recorded them."""
        return next((run.parameters for run in self.runs if not math.isnan(run.parameters)), math.nan)

    @property
    def non_embedding_parameters(self) -> float:
        """Parameters without embeddings; NaN if not known."""
        return non_embedding_parameters(self.runs[0].options)

    @property
    def tokens_per_parameter(self) -> float:
        """Training tokens over parameters without embeddings; repeated tokens count each time. NaN if not known."""
        return self.tokens / self.non_embedding_parameters

    def final_losses(self) -> dict[tuple[str, Hashable], float]:
        """(label, seed) -> last validation loss in nats a token, of the finished runs."""
        finished = (run for run in self.runs if run.status is Status.FINISHED)
        return _by_seed((run, run.curve.final_validation) for run in finished if run.curve)

    def training_losses(self, start: float, end: float) -> dict[tuple[str, Hashable], float]:
        """(label, seed) -> mean training loss over a share of the run, of runs that reached its end.

        All are means over the same iterations, those with a finite loss in each: where the loss falls steeply, a run
        that lacks some would differ by that alone. A run with under half as many as the fullest is left out.
        """
        found: list[tuple[Run, Series]] = []
        for run in self.runs:
            if run.curve is None or run.curve.last_iteration < end * run.train_iters:
                continue
            iterations, losses = run.curve.train
            inside = (iterations > start * run.train_iters) & (iterations <= end * run.train_iters)
            found.append((run, (iterations[inside], losses[inside])))
        counts = [np.isfinite(losses).sum() for _, (_, losses) in found]
        found = [each for each, count in zip(found, counts) if 2 * count >= max(counts)]
        _, common = shared([series for _, series in found])
        return _by_seed((run, float(losses.mean())) for (run, _), losses in zip(found, common) if len(losses))

    def repeated(self) -> list[str]:
        """Labels with a repeated seed, and its runs: these are averaged, since they are one draw."""
        runs: dict[tuple[str, int], list[str]] = {}
        for run in self.runs:
            if run.status is Status.FINISHED and run.seed is not None:
                runs.setdefault((run.label, run.seed), []).append(run.cell)
        return [
            f"{label}, seed {seed} ({' and '.join(cells)})" for (label, seed), cells in runs.items() if len(cells) > 1
        ]

    def shared_seeds(self, left: str, right: str) -> set[int]:
        """Seeds of which both labels have a run with losses, finished, diverged or stopped."""
        found = [{run.seed for run in self.of(label) if run.curve is not None} for label in (left, right)]
        return {seed for seed in found[0] & found[1] if seed is not None}

    def unpaired(self, left: str, right: str) -> str | None:
        """Reason why two labels cannot be compared for a claim, naming what differs; None if they are paired.

        Model, data, tokens and schedule are equal within a group. Pairs also need shared seeds, equal initial weights
        (layout and implementation), and a learning rate that decays fully within the run.
        """
        seeds = self.shared_seeds(left, right)
        if not seeds:
            each = ", ".join(f"{label} has {_seeds(self.of(label))}" for label in (left, right))
            return f"no shared seed: {each}; train both with the same seeds"
        for seed in sorted(seeds):
            options = [
                [run.options for run in self.of(label) if run.seed == seed and run.curve is not None]
                for label in (left, right)
            ]
            for name in _INITIALIZATION:
                values = [
                    list(dict.fromkeys(str(each.get(name, _DEFAULTS[name])) for each in runs)) for runs in options
                ]
                if values[0] != values[1]:
                    theirs = " and ".join(f"{' or '.join(v)} ({side})" for v, side in zip(values, (left, right)))
                    return (
                        f"{name} differs at seed {seed}: {theirs}; initial weights and dropout depend on it, so train "
                        "both with the same"
                    )
        return _not_decayed(next(run for run in self.of(left) if run.curve is not None))

    def find(self, asked: str) -> str | None:
        """The label that a claim refers to, as ``find_label``; none of runs that were under two recipes."""
        return find_label(asked, [(run.label, run.recipe) for run in self.runs if not run.earlier_recipes])


def find_label(asked: str, recipes: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
    """The first label that a claim refers to: a label, a recipe's name, or a recipe with overrides, by its numerics.

    Args:
        asked: of the form "mxfp4_rht_sr" or "mxfp4_rht_sr dgrad.hadamard.block=32 wgrad.hadamard.block=32".
        recipes: labels, each with its recipe's fields.
    """
    if asked in (label for label, _ in recipes):
        return asked
    numerics = _numerics(asked)
    for label, recipe in recipes:
        if recipe.get("name") == asked or (numerics is not None and _without_name(recipe) == numerics):
            return label
    return None


def group_runs(runs: Sequence[Run], reference: str) -> tuple[list[Group], list[Run]]:
    """Groups in the order of their first runs, and the runs that belong to none.

    A sweep's job without config.yaml joins the only group with jobs of its sweep, model and variant.
    """
    keyed: dict[str, list[Run]] = {}
    placed = [run for run in runs if run.tokens > 0]
    for run, key in zip(placed, _keys(placed)):
        keyed.setdefault(key, []).append(run)
    lost: list[Run] = []
    for run in (run for run in runs if not run.tokens > 0):
        homes = [members for members in keyed.values() if run.sweep and _place(run) in map(_place, members)]
        (homes[0] if len(homes) == 1 else lost).append(run)
    settings = [json.loads(key) for key in keyed]
    differ = _different(settings)
    models: dict[str, list[dict[str, Any]]] = {}
    for setting, members in zip(settings, keyed.values()):
        models.setdefault(members[0].model, []).append(setting)
    of_model = frozenset(differ).difference(*map(_different, models.values()))
    return [
        Group(name, tuple(_told_apart(members)), reference, {key: _value(members[0], key) for key in differ}, of_model)
        for name, members in zip(_names(list(keyed.values())), keyed.values())
    ], lost


def differing_options(left: Group, right: Group) -> list[str]:
    """The options in which two groups of one report differ, each with both values."""
    names = [name for name in left.apart if left.apart[name] != right.apart.get(name)]
    return [f"{name} {left.apart[name]} and {right.apart.get(name)}" for name in names]


def _told_apart(runs: Sequence[Run]) -> Iterator[Run]:
    """Runs of one label whose recipes differ in numerics, as after an edit of a recipe file, get other labels."""
    known: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        recipe, recipes = _without_name(run.recipe), known.setdefault(run.label, [])
        if recipe and recipe not in recipes:
            recipes.append(recipe)
        number = recipes.index(recipe) if recipe else 0
        if number:
            names = ", ".join(name for name in recipe if recipe[name] != recipes[0].get(name))
            label, full = f"{run.label} ({number + 1})", f"{run.full_label}, which differs from the first in {names}"
            run = replace(run, label=label, full_label=full)
        yield run


def _different(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    names = sorted({name for setting in settings for name in setting})
    return [name for name in names if len({json.dumps(setting.get(name)) for setting in settings}) > 1]


def config_of(options: Mapping[str, Any]) -> Config:
    """A run's options, typed. Raises UserError for an unknown name or a value of the wrong type."""
    return Config(**checked_options("config.yaml", {key: value for key, value in options.items() if key != "config"}))


def non_embedding_parameters(options: Mapping[str, Any]) -> float:
    """Parameters without embeddings from a run's resolved options; NaN if these describe no model known here."""
    try:
        return float(num_non_embedding_parameters(resolve_model(config_of(options))))
    except UserError:
        return math.nan


def _followed(run: Run) -> Schedule | None:
    """The schedule that a run recorded, else that of its options; None if neither can be read."""
    try:
        return Schedule.from_dict(dict(run.schedule))
    except KeyError:  # recorded before config.yaml had the block
        return _planned(run)


def _planned(run: Run) -> Schedule | None:
    try:
        config = config_of({name: value for name, value in run.options.items() if name in KINDS})
        if config.lr is None or config.global_batch_size is None:
            return None
        return plan(config, config.global_batch_size, int(run.planned_samples))[0]
    except UserError:
        return None


def _seeds(runs: Sequence[Run]) -> str:
    seeds = sorted({run.seed for run in runs if run.seed is not None and run.curve is not None})
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}" if seeds else "no recorded seed"


def _not_decayed(run: Run) -> str | None:
    """Reason why a run's learning rate does not reach its minimum; None if it does, or if no schedule is recorded."""
    schedule = _followed(run)
    if schedule is None:
        return None
    style, horizon, planned = schedule.decay_style, schedule.decay_samples, run.planned_samples
    if style in ("constant", "inverse-square-root"):
        return f"no full decay: lr_decay_style is {style}; train with linear, cosine or WSD over the whole run"
    if horizon > planned:
        return (
            f"no full decay: the learning rate decays over {horizon:,.0f} samples, the run has {planned:,.0f}; let "
            "lr_decay_iters be at most train_iters"
        )
    return None


def _place(run: Run) -> tuple[str | None, str, str | None]:
    return run.sweep, run.model, run.variant


def _names(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Short unique names: the model, with the variant or the tokens if these distinguish groups, else numbered."""
    model = [members[0].model for members in groups]
    variant = [f"{members[0].model}, {members[0].variant or 'as it is'}" for members in groups]
    tokens = [f"{members[0].model}, {amount(members[0].tokens)} tokens" for members in groups]
    numbered = [f"{name}, group {at}" for at, name in enumerate(model, 1)]
    return next(names for names in (model, variant, tokens, numbered) if len(set(names)) == len(names))


def _keys(runs: Sequence[Run]) -> list[str]:
    """``_key`` of each run as JSON. The numbers that an archive gives to folders mean nothing in another one.

    So paths of data compare by what follows the number. Where it tells runs of one archive apart, or paths of initial
    weights have one, the archive is part of the key.
    """
    exact = [json.dumps(_key(run), sort_keys=True, default=str) for run in runs]
    places = [(_archive(run), _NUMBERED.sub("FOLDER", key)) for run, key in zip(runs, exact)]
    alike: dict[tuple[Path | None, str], set[str]] = {}
    for place, key in zip(places, exact):
        alike.setdefault(place, set()).add(key)

    def chosen(run: Run, place: tuple[Path | None, str], key: str) -> str:
        archive, named = place
        if archive is None:
            return key
        if len(alike[place]) == 1 and not _NUMBERED.search(json.dumps(run.initial_weights)):
            return named
        return json.dumps(json.loads(key) | {_ARCHIVE: str(archive)}, sort_keys=True)

    return list(map(chosen, runs, places, exact))


def _archive(run: Run) -> Path | None:
    return None if run.source is None else run.source.archive


def _key(run: Run) -> dict[str, Any]:
    """What separates a run from those of other groups: options with a value of their own, and its schedule.

    An option of another version is missing, null or at its default. Of the schedule only the fields count that do not
    follow from the options, as after a resume that kept the checkpoint's horizon, so runs without a record of it match.
    """
    kept = {
        name: value
        for name, value in run.options.items()
        if name not in _IGNORED and value not in (None, _DEFAULTS.get(name))
    }
    followed, planned = _followed(run), _planned(run)
    if followed is not None and followed != planned:
        expected = {} if planned is None else asdict(planned)
        kept |= {_SCHEDULE + name: value for name, value in asdict(followed).items() if value != expected.get(name)}
    if run.earlier_options:
        kept[_EARLIER] = run.earlier_options
    if run.initial_weights:
        kept[_WEIGHTS] = run.initial_weights
    return kept


def _value(run: Run, name: str) -> Any:
    """A run's value of an option, or of a field of its schedule as ``_key`` names them."""
    if name.startswith(_SCHEDULE):
        return getattr(_followed(run), name.removeprefix(_SCHEDULE), None)
    if name == _EARLIER:
        return "; ".join(" ".join(f"{key} {value}" for key, value in each.items()) for each in run.earlier_options)
    if name == _WEIGHTS:
        return run.initial_weights
    if name == _ARCHIVE:
        return str(_archive(run))
    value = run.options.get(name)
    return _DEFAULTS.get(name) if value is None else value


def _by_seed(found: Any) -> dict[tuple[str, Hashable], float]:
    """Mean over the runs of a label that share a seed; a run with unknown seed counts as its own seed."""
    values: dict[tuple[str, Hashable], list[float]] = {}
    for run, value in found:
        values.setdefault((run.label, run.block), []).append(value)
    return {key: sum(each) / len(each) for key, each in values.items()}


def _numerics(asked: str) -> dict[str, Any] | None:
    name, *overrides = asked.split()
    try:
        return _without_name(recipe_to_dict(load_recipe(name, overrides)))
    except UserError:
        return None


def _without_name(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in recipe.items() if key not in ("name", "summary", "source")}
