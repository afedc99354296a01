"""Output files of runs and tools; unwritable paths are rejected before any work starts."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.checkpoint import save_lock, storage
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.options.output_options import CheckpointOptions


@dataclass(frozen=True)
class RunPaths:
    """One folder per run: metrics.jsonl, config.yaml, run.json, tensorboard/ and, without --save, checkpoints/.

    Also quantization.jsonl and captures/, if requested.
    """

    run: Path
    tensorboard: Path
    checkpoints: Path | None
    default: bool  # runs/CONFIG-RECIPE, which a new run moves away as a whole

    @property
    def metrics(self) -> Path:
        return self.run / "metrics.jsonl"

    @property
    def quantization(self) -> Path:
        return self.run / "quantization.jsonl"

    @property
    def captures(self) -> Path:
        return self.run / "captures"

    @property
    def config(self) -> Path:
        return self.run / "config.yaml"

    @property
    def record(self) -> Path:
        return self.run / "run.json"

    def lines(self) -> list[str]:
        """Lines for the end of a run."""
        rows = [("metrics", self.metrics), ("TensorBoard", self.tensorboard), ("configuration", self.config)]
        if self.quantization.exists():
            rows.insert(1, ("quantization", self.quantization))
        if self.captures.exists():
            rows.insert(1, ("captures", self.captures))
        if self.checkpoints is not None:
            rows.insert(0, ("checkpoints", self.checkpoints))
        return [f"{what + ':':<15}{path}" for what, path in rows]


def run_paths(config: Config, recipe_name: str) -> tuple[Config, RunPaths]:
    """The run's folder: --save's, else the parent of --tensorboard-dir, else runs/CONFIG-RECIPE in this folder.

    A run that began in RUN and is resumed by --save RUN/checkpoints keeps RUN.

    Raises:
        UserError: the folder cannot be written, or --no-save would put metrics beside another run's checkpoints.
    """
    name = f"{Path(config.config).stem if config.config else 'gpt'}-{recipe_name}"
    if config.save is not None:
        run = _began_in(Path(config.save))
    elif config.tensorboard_dir is not None:
        run = Path(config.tensorboard_dir).resolve().parent
    else:
        run = Path("runs") / _short(name.replace("/", "_").replace(" ", "_"))
    check_folder(run, "--save")
    checkpoints = config.save or str(run / "checkpoints")
    default = config.save is None and config.tensorboard_dir is None
    will_be_moved = default and not same_folder(config.load, checkpoints)
    if config.no_save and storage.whole(checkpoints) and not will_be_moved:
        raise UserError(
            f"--no-save in {run}, whose metrics belong to the checkpoints in {checkpoints}: this run's would replace "
            "them; name another folder with --save"
        )
    save = None if config.no_save else checkpoints
    tensorboard = Path(config.tensorboard_dir) if config.tensorboard_dir is not None else run / "tensorboard"
    return replace(config, save=save), RunPaths(run, tensorboard, Path(save) if save is not None else None, default)


def _began_in(save: Path) -> Path:
    """The parent of ``save`` if that is ``checkpoints`` of a run with its metrics there; else ``save``."""
    parent = save.parent
    of_a_run = save.name == "checkpoints" and all((parent / name).exists() for name in ("metrics.jsonl", "config.yaml"))
    return parent if of_a_run and not (save / "metrics.jsonl").exists() else save


def keep_older_run(paths: RunPaths, config: CheckpointOptions) -> list[str]:
    """Move the files of an older run aside where a new one would overwrite them; returns a note.

    A resumed run (--load from its own checkpoints) appends to the same files. Checkpoints in a --save folder stay: the
    first save sets them aside (``writer.publish_own``).
    """
    continues = not config.finetune and same_folder(config.load, paths.checkpoints)
    own = [paths.metrics, paths.quantization]
    if same_folder(paths.tensorboard.parent, paths.run):  # elsewhere runs may share it
        own.append(paths.tensorboard)
    old = [path for path in own if path.exists()]
    if paths.default and (old or storage.whole(str(paths.run / "checkpoints"))):
        old = [paths.run]
    if continues or not old:
        return []
    aside = [path.rename(new) for path, new in zip(old, free_names(old), strict=True)]
    if paths.default:
        (aside[0] / "checkpoints" / save_lock.FILE).unlink(missing_ok=True)  # this run's own lock
    return [f"an older run's {'folder' if paths.default else 'metrics'} moved to {aside[0]}"]


def free_names(old: Sequence[Path]) -> list[Path]:
    """Names for files and folders that go aside, as metrics.1.jsonl: with the first number that all have free."""
    choices = ([_aside(path, number) for path in old] for number in count(1))
    return next(names for names in choices if not any(name.exists() for name in names))


def _aside(old: Path, number: int) -> Path:
    return old.with_name(f"{old.stem}.{number}{old.suffix}" if old.is_file() else f"{old.name}.{number}")


def check_folder(folder: Path, option: str) -> None:
    """Check that a folder can be created and written to.

    Raises:
        UserError: naming ``option`` and the obstacle.
    """
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise UserError(f"{option} {folder}: {there} is a file; name a folder, or move the file away")
    if not os.access(there, os.W_OK):
        raise UserError(f"{option} {folder}: {there} cannot be written to; name another folder, or change its rights")


def create_folder(folder: Path, option: str) -> None:
    """Create a folder for output.

    Raises:
        UserError: as ``check_folder``, or the system refuses.
    """
    check_folder(folder, option)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {folder} cannot be created: {error}") from None


def output_file(text: str) -> Path:
    """argparse ``type`` for a tool's output file; creates its folder immediately.

    Raises:
        argparse.ArgumentTypeError: the file cannot be written.
    """
    path = Path(text)
    _create(path.parent, text, "its folder")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file in it")
    return path


def output_folder(text: str) -> Path:
    """argparse ``type`` for a tool's output folder; creates it immediately.

    Raises:
        argparse.ArgumentTypeError: it cannot be created or written to.
    """
    return _create(Path(text), text, "the folder")


def _create(folder: Path, text: str, what: str) -> Path:
    try:
        create_folder(folder, what)
    except UserError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    return folder


def _short(name: str, longest: int = 120) -> str:
    """A name that every file system accepts: a recipe with many overrides ends in a digest of all of them."""
    return (
        name
        if len(name) <= longest
        else f"{name[: longest - 9]}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
    )


def same_folder(one: str | Path | None, other: str | Path | None) -> bool:
    """Whether two paths name one folder; False if one is None."""
    return one is not None and other is not None and Path(one).resolve() == Path(other).resolve()
