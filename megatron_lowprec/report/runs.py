"""Reads runs from their folders: configuration, losses, and final status."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lowprec.errors import UserError, printable
from megatron_lowprec.files import read_json
from megatron_lowprec.recipe.parsing import in_current_form
from megatron_lowprec.report.archives.sources import Source, find_sources
from megatron_lowprec.report.curve import (
    COLUMNS,
    NORM,
    SAMPLES,
    SECONDS,
    SKIPPED,
    Curve,
    Floats,
    Series,
    Status,
    curve_of,
    how_it_ended,
    read_columns,
    typical_seconds,
)
from megatron_lowprec.sweep.job_record import RECORD
from megatron_lowprec.sweep.jobs import EVALUATION, MANIFEST
from megatron_lowprec.training.config.arguments import RENAMED
from megatron_lowprec.training.config.run_config import read_run_config
from megatron_lowprec.training.evaluation.evaluation_file import TextLoss, read_scores

_LONGEST_LABEL = 64
_TEXT_SUFFIX = re.compile(r"(_text_document|(\.raw)?(\.jsonl?|\.txt)?(\.xz|\.gz)?)$")
_NUMBERED = re.compile(r"^FOLDER\d+(?=/)")


@dataclass(frozen=True)
class Run:
    """One run, or a job of a sweep without a run."""

    folder: Path
    cell: str  # the job's id in the sweep, or the folder's name
    label: str  # the sweep's label, else the recipe's name; after the earlier recipes' names, joined by "then"; short
    full_label: str = ""  # with all overrides of the recipe
    recipe: Mapping[str, Any] = field(default_factory=dict)  # resolved, in present fields; empty without config.yaml
    options: Mapping[str, Any] = field(default_factory=dict)  # resolved, present names; empty without config.yaml
    schedule: Mapping[str, Any] = field(default_factory=dict)  # the one followed; empty if not recorded
    earlier_recipes: tuple[str, ...] = ()  # names, of a run that resumed under another recipe
    earlier_options: tuple[Mapping[str, Any], ...] = ()  # values before the run resumed with others, in order
    initial_weights: str | None = None  # checkpoint whose weights it began with, if any
    seed: int | None = None  # None if unknown
    status: Status = Status.FAILED  # final status
    why: str = ""
    curve: Curve | None = None  # losses in nats a token; None if there are none
    samples: Series | None = None  # consumed samples by iteration
    gradient_norms: Series | None = None  # before clipping, finite ones; None if not recorded
    seconds: float = math.nan  # per iteration: median over the run's second half; NaN if not recorded
    texts: Mapping[str, TextLoss] = field(default_factory=dict)  # of a finished run, by a text's name
    record: Mapping[str, Any] = field(default_factory=dict)  # run.json; empty without it
    sweep: str | None = None  # names in the sweep, down to ``variant``
    model: str = "model"
    variant: str | None = None
    source: Source | None = None  # the named folder: the run's own or its sweep's

    @property
    def place(self) -> str:
        """The folder as reports name it: its path, or the archive's with that of the member."""
        return self.named(str(self.folder))

    def named(self, text: str) -> str:
        """Printable ``text``, with the temporary folder of an unpacked archive replaced by the archive's path."""
        return printable(text if self.source is None else self.source.named(text))

    @property
    def block(self) -> Hashable:
        """The seed, which counts as one draw however often it ran; the folder of a run whose seed is unknown."""
        return str(self.folder) if self.seed is None else self.seed

    @property
    def train_iters(self) -> int:
        """Requested iterations."""
        return int(self.options.get("train_iters") or 0)

    @property
    def batch(self) -> float:
        """Samples of an iteration; NaN if not in config.yaml."""
        return float(self.options.get("global_batch_size") or math.nan)

    @property
    def planned_samples(self) -> float:
        """Requested samples: those consumed, whose batches may differ, and the iterations left; NaN if unknown."""
        done, consumed = self._last
        left = max(0, self.train_iters - done)
        return float(self.options.get("train_samples") or consumed + (left * self.batch if left else 0.0))

    @property
    def tokens(self) -> float:
        """Requested tokens; NaN if not in config.yaml."""
        return float(self._tokens_of(np.asarray([self.planned_samples]))[0])

    @property
    def parameters(self) -> float:
        """Parameters of the model in run.json; NaN without it."""
        return float(self.record.get("parameters") or math.nan)

    @property
    def tokens_a_second(self) -> float:
        """Throughput of all processes together over the second half, at its typical iteration; NaN if not recorded."""
        last, _ = self._last
        if not last:
            return math.nan
        half, whole = self.tokens_at(np.asarray([last / 2, last]))
        return float(whole - half) / (last / 2) / self.seconds

    @property
    def _last(self) -> tuple[int, float]:
        """The last logged iteration and the samples consumed by its end; 0 of a run that only validated."""
        if self.samples is None or not len(self.samples[0]):
            return 0, 0.0
        return int(self.samples[0][-1]), float(self.samples[1][-1])

    @property
    def norms_by_fifth(self) -> list[float]:
        """Median gradient norm in each fifth of the requested iterations; NaN where none is recorded."""
        iterations, norms = ([], []) if self.gradient_norms is None else self.gradient_norms
        fifths = np.minimum(5 * (np.asarray(iterations) - 1) // max(1, self.train_iters), 4)
        parts = [np.asarray(norms)[fifths == fifth] for fifth in range(5)]
        return [float(np.median(part)) if len(part) else math.nan for part in parts]

    @property
    def peak_memory_gib(self) -> float:
        """Peak allocated memory of a GPU; NaN if not recorded."""
        peak = self.record.get("peak_memory_bytes")
        return math.nan if peak is None else float(peak) / 2**30

    def tokens_at(self, iterations: np.ndarray) -> np.ndarray:
        """Tokens consumed by the end of each of these iterations."""
        return self._tokens_of(self._samples_at(iterations))

    def _samples_at(self, iterations: np.ndarray) -> np.ndarray:
        assert self.samples is not None
        return np.interp(iterations, [0, *self.samples[0]], [0.0, *self.samples[1]])

    def _tokens_of(self, samples: Floats) -> Floats:
        """Tokens of the first so many samples, which had another length before a resume that changed it."""
        begin, tokens = 0.0, np.zeros_like(samples)
        for each in self.earlier_options if self.samples is not None else ():
            if "seq_length" in each:
                end = float(self._samples_at(np.asarray(each["until_iteration"])))
                tokens += (np.clip(samples, begin, end) - begin) * float(each["seq_length"])
                begin = end
        return tokens + np.maximum(samples - begin, 0.0) * float(self.options.get("seq_length", math.nan))


def find_runs(paths: Sequence[str], diverged_rise: float, scratch: Path | None = None) -> tuple[list[Run], list[str]]:
    """Runs in run folders, sweep folders, archives and globs, each once, and notes on duplicates and damaged files.

    Args:
        paths: folders or archives, or globs of them.
        diverged_rise: rise of the training loss above its lowest, in nats, beyond which a run counts as diverged.
        scratch: empty folder for the content of archives, which the runs refer to; None refuses archives.

    Raises:
        UserError: a missing path, an unreadable archive or sweep.json, or no run found.
    """
    cells: list[Run] = []
    for path in paths:
        for source in find_sources(path, scratch):
            folder = source.folder
            is_sweep = (folder / MANIFEST).is_file()
            cells += _sweep(source) if is_sweep else [Run(folder, printable(folder.name), "", source=source)]
    runs: dict[Path, Run] = {}
    notes: list[str] = []
    for cell in cells:
        place = Path(str(cell.folder) if cell.source is None else cell.source.named(str(cell.folder))).resolve()
        if place not in runs:
            runs[place] = read_run(cell, diverged_rise, notes.append)
        elif cell.sweep and not runs[place].sweep:
            runs[place] = read_run(cell, diverged_rise, lambda _: None)
            notes.append(f"{cell.place} was named twice and counts once, as {cell.label} of sweep {cell.sweep}")
        elif cell.source is None or cell.source.archive is None:  # an archive's jobs are found in its sweep and alone
            notes.append(f"{cell.place} was named twice and counts once")
    if not runs:
        raise UserError(f"no run in {', '.join(paths)}; name folders that pretrain_gpt.py or a sweep has written")
    return _with_text_names(list(runs.values())), notes


def read_run(cell: Run, diverged_rise: float, say: Callable[[str], None]) -> Run:
    """``cell`` completed from its folder's files, texts by path; ``say`` is called with what was dropped of these."""
    folder = cell.folder

    def tell(message: str) -> None:
        say(cell.named(message))

    if not os.path.isdir(folder):  # False for a name that no folder can have
        why = "there is no folder"
        return replace(_labelled(cell, [cell.label]), status=Status.NOT_STARTED, why=why)
    record = _json(folder / "run.json", _IN_RECORD, tell)
    cell = replace(cell, why=_exit(folder, tell))
    config = _config(folder, tell)
    options = {RENAMED.get(name, name): value for name, value in config.get("options", {}).items()}
    recipe, earlier = in_current_form(config.get("recipe", {})), tuple(map(str, config.get("earlier_recipes", [])))
    cell = replace(
        _labelled(cell, [*earlier, cell.label or _own_label(recipe, record) or printable(folder.name)]),
        recipe=recipe,
        earlier_recipes=earlier,
        earlier_options=tuple(config.get("earlier_options", [])),
        initial_weights=config.get("initial_weights") or _pretrained(options),
        options=options,
        schedule=config.get("schedule", {}),
        seed=options.get("seed", cell.seed),
        model=cell.model if cell.sweep else Path(options.get("config") or "gpt").stem,
        record=record,
    )
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        return replace(cell, why=f"has no metrics.jsonl{cell.why}")
    try:
        columns = read_columns(metrics, COLUMNS, tell)
        curve = curve_of(columns, metrics)
    except UserError as error:
        return replace(cell, why=f"{cell.named(str(error))}{cell.why}")
    if not options.get("train_iters") or not options.get("seq_length"):
        return replace(cell, why=f"has no config.yaml that says what was trained{cell.why}")
    status, why = how_it_ended(curve, int(options["train_iters"]), diverged_rise)
    why += cell.why if status is not Status.FINISHED else ""
    skipped = int(max(columns[SKIPPED][1], default=0))
    if skipped:
        why = f"{why}; {skipped} iterations skipped, their gradients not finite"
    samples = columns[SAMPLES]
    if not len(samples[0]):
        at = np.arange(1, curve.last_iteration + 1, dtype=np.int64)
        samples = (at, at.astype(np.float64) * float(options.get("global_batch_size", math.nan)))
    texts: dict[str, TextLoss] = {}
    if status is Status.FINISHED:
        path = folder / EVALUATION
        texts = read_scores(_json(path, {}, tell), options["train_iters"], lambda words: tell(f"{path}: {words}"))
    return replace(
        cell,
        status=status,
        why=why,
        texts=texts,
        curve=curve,
        samples=samples,
        gradient_norms=_finite(columns[NORM]),
        seconds=typical_seconds(columns[SECONDS]),
    )


def _own_label(recipe: Mapping[str, Any], record: Mapping[str, Any]) -> str | None:
    """The recipe's name; that of a run on Blackwell's products is told from its emulation, which other GPUs have."""
    name = recipe.get("name")
    ways = str(record.get("gemms", {}).values())
    return f"{name}_native" if name and "'blackwell_mx " in ways else name


def _pretrained(options: Mapping[str, Any]) -> str | None:
    """Folder of the initial weights, for a run of a version that did not record the checkpoint."""
    return options.get("pretrained_checkpoint") or (options.get("load") if options.get("finetune") else None)


def _labelled(cell: Run, names: Sequence[str]) -> Run:
    return replace(cell, label=" then ".join(map(_short, names)), full_label=" then ".join(names))


def _short(name: str) -> str:
    """A name that fits a table: the overrides of a recipe with many of them are counted, and told by a digest."""
    recipe, *overrides = name.split("+")
    if len(name) <= _LONGEST_LABEL or not overrides:
        return name
    return f"{recipe}+{len(overrides)} overrides-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def _finite(series: Series) -> Series | None:
    kept = np.isfinite(series[1])
    return (series[0][kept], series[1][kept]) if kept.any() else None


def _sweep(source: Source) -> list[Run]:
    path = source.folder / MANIFEST
    try:
        sweep = read_json(path, "start the sweep again, which writes it")
        return [
            Run(
                source.job_folder(cell["run"]),
                str(cell["id"]),
                str(cell["label"]),
                seed=_whole(cell.get("seed")),
                sweep=str(sweep["name"]),
                model=str(cell.get("model") or "model").removesuffix(".yaml").rpartition("/")[2],
                variant=str(cell["variant"]) if cell.get("variant") else None,
                source=source,
            )
            for cell in sweep["cells"]
        ]
    except UserError as error:
        raise UserError(source.named(str(error))) from None
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{source.named(str(path))}: not a sweep ({type(error).__name__}: {error}); it needs name and cells with "
            "id, label and run"
        ) from None


def _whole(seed: object) -> int | None:
    if seed is not None and type(seed) is not int:
        raise TypeError(f"seed {seed!r} is no whole number")
    return seed


def _config(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Content of config.yaml; empty if missing or unreadable."""
    path = folder / "config.yaml"
    try:
        return read_run_config(path) if path.exists() else {}
    except UserError as error:
        say(f"dropped: {error}")
        return {}


_NUMBER = (int, float, type(None))
# Facts that reports read, and their types.
_IN_RECORD: Mapping[str, tuple[type, ...]] = {
    "parameters": _NUMBER,
    "peak_memory_bytes": _NUMBER,
    "processes": _NUMBER,
    "versions": (dict,),
    "gemms": (dict,),
    "gemms_of_phases": (dict,),
}


def _exit(folder: Path, say: Callable[[str], None]) -> str:
    """The exit code of a failed job, as the end of a sentence; empty if not recorded."""
    cell = _json(folder / RECORD, {"exit_code": _NUMBER}, say)
    return f"; its process ended with exit code {cell['exit_code']}" if cell.get("exit_code") else ""


def _with_text_names(runs: Sequence[Run]) -> list[Run]:
    """The runs with losses by names that tell, over all runs, which text was scored and how.

    An archive's numbers of folders mean nothing in another one. So its paths compare by what follows the number, and
    where it has two of these by the archive as well.
    """
    scored = [
        (number, run.source.archive if run.source else None, path, loss)
        for number, run in enumerate(runs)
        for path, loss in run.texts.items()
    ]
    bare = {(each, path): _NUMBERED.sub("FOLDER", path) if each else path for _, each, path, _ in scored}
    times = Counter((archive, path) for (archive, _), path in bare.items())
    places = {key: path if times[key[0], path] == 1 else f"{key[0]}/{key[1]}" for key, path in bare.items()}
    paths = list(dict.fromkeys(places.values()))
    names = dict(zip(paths, text_names(paths), strict=True))
    shared: dict[str, set[str]] = {}
    for _, archive, path, loss in scored:
        place = places[archive, path]
        shared[place] = shared.get(place, {*loss.how}).intersection(loss.how)
    texts: list[dict[str, TextLoss]] = [{} for _ in runs]
    for number, archive, path, loss in scored:
        place = places[archive, path]
        texts[number][", ".join([names[place], *(way for way in loss.how if way not in shared[place])])] = loss
    return [replace(run, texts=losses) for run, losses in zip(runs, texts, strict=True)]


def text_names(paths: Sequence[str]) -> list[str]:
    """Names of texts by the ends of their paths, each as long as it takes to tell it from the others."""
    parts = [Path(_TEXT_SUFFIX.sub("", path)).parts for path in paths]
    ends = [["/".join(each[-length:]) for length in range(1, len(each) + 1)] for each in parts]
    times = Counter(end for each in ends for end in each)
    return [next((end for end in each if times[end] == 1), path) for each, path in zip(ends, paths, strict=True)]


def _json(path: Path, kinds: Mapping[str, tuple[type, ...]], say: Callable[[str], None]) -> dict[str, Any]:
    """A JSON object without values of other types than ``kinds``; empty if missing or unreadable."""
    try:
        found = read_json(path, "the report is without it")
    except FileNotFoundError:
        return {}
    except UserError as error:
        say(f"dropped: {error}")
        return {}
    wrong = [key for key, kind in kinds.items() if key in found and type(found[key]) not in kind]
    if wrong:
        say(f"{path}: dropped, as values of another type: {', '.join(wrong)}")
    return {key: value for key, value in found.items() if key not in wrong}
