"""Finds the checkpoint to resume from and reads its config.yaml: its model and progress. No megatron."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import overridden, recipe_from_dict, recipe_to_dict, same_numerics
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.training.checkpoint import checksums, safe_load, storage
from megatron_lowprec.training.config.arguments import flag
from megatron_lowprec.training.config.options import DEFAULTS, OPTIONS, Config, options_in, options_with, unmet
from megatron_lowprec.training.config.paths import same_folder
from megatron_lowprec.training.config.run_config import read_run_config
from megatron_lowprec.training.data.tokenizer import Tokenizer
from megatron_lowprec.training.models.architectures import option_groups
from megatron_lowprec.training.models.sizes import has_experts
from megatron_lowprec.training.options.declaration import Part
from megatron_lowprec.training.options.output_options import CheckpointOptions
from megatron_lowprec.training.options.training_options import ParallelOptions, TrainingOptions
from megatron_lowprec.training.schedule import Schedule

CONFIG = "config.yaml"


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk and the content of its config.yaml."""

    folder: Path
    content: Mapping[str, Any]

    @property
    def progress(self) -> dict[str, int]:
        return dict(self.content["progress"])

    @property
    def layout(self) -> dict[str, int]:
        return dict(self.content["layout"])

    @property
    def schedule(self) -> Schedule:
        return Schedule.from_dict(self.content["schedule"])

    @property
    def recipe(self) -> Recipe | None:
        """None if the checkpoint holds none; UserError for one that this version refuses."""
        stored = self.content.get("recipe")
        if not stored:
            return None
        try:
            return recipe_from_dict(stored)
        except UserError as error:
            raise UserError(
                f"checkpoint {self.folder}: this version refuses its recipe {stored.get('name')}; use the version that "
                f"wrote it ({error})"
            ) from None

    @property
    def notes(self) -> list[str]:
        """A line about a checkpoint whose bytes cannot be checked."""
        if checksums.exist(self.folder):
            return []
        return [f"checkpoint {self.folder}: saved without checksums, by an older version: its bytes are not checked"]

    @property
    def tokenizer(self) -> dict[str, str] | None:
        """Its ``unique_identifiers``; None for an older checkpoint and for weights imported without a tokenizer."""
        known = self.content.get("tokenizer")
        return None if known is None else {name: str(known[name]) for name in ("type", "vocab_size", "fingerprint")}

    @property
    def started_from(self) -> dict[str, Any]:
        """``start_of`` the options that began its run, which may have been resumed since; an older version recorded
        those of the last start.
        """
        stored = self.content.get("started_from")
        return start_of(self.content["options"]) if stored is None else {"load": str(stored["load"]), **stored}


def source(config: Config) -> tuple[Config, list[str]]:
    """The config with --load resolved.

    A run goes on in --save's folder if that holds a checkpoint and --no-save is not given: without --load, and with it
    if that checkpoint is of a run which the same options began (``start_of``), as in a job that was requeued. Else
    --load stays, or is --pretrained-checkpoint, from which only the weights are loaded.
    """
    if config.save is not None and not config.no_save and storage.holds_checkpoint(config.save):
        start = start_of(asdict(config))
        if config.load is None or (start and _began_by(start, _newest(config.save))):
            note = f"--save {config.save} holds a checkpoint: continuing from it"
            began = f"; --load {config.load} is what its run began from" if start else ""
            # --finetune and similar options apply to a run's first start only.
            begun_with = {"finetune", "no_load_rng"} | (set() if config.no_save_optim else {"no_load_optim"})
            options: dict[str, Any] = dict.fromkeys(begun_with, False)
            if config.load is None and (unread := [name for name in sorted(begun_with) if getattr(config, name)]):
                note += f"; without --load {config.save} it ignores {' and '.join(map(flag, unread))}"
            return replace(config, load=config.save, ckpt_step=None, **options), [note + began]
    if config.load is None and config.pretrained_checkpoint is not None:
        return replace(config, load=config.pretrained_checkpoint, finetune=True), []
    return config, []


def start_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Folder and flags by which options begin a run from a checkpoint; empty if they begin one from nothing, or go on
    with the one in --save.
    """
    load, save = options.get("load"), options.get("save")
    flags = {name: options.get(name) for name in options_with(begins=True)}
    flags = {name: value for name, value in flags.items() if value is not None and value is not False}
    if load is None or (not flags and same_folder(load, save)):
        return {}
    return {"load": load, **flags}


def _began_by(start: Mapping[str, Any], saved: Saved | None) -> bool:
    before = {} if saved is None else saved.started_from
    return bool(before) and before | {"load": start["load"]} == start and same_folder(before["load"], start["load"])


def _newest(folder: str) -> Saved | None:
    """The newest checkpoint with a config.yaml; its other files are not examined."""
    for path in _candidates(folder).values():
        with suppress(safe_load.Damaged):
            return _read_config(path)
    return None


def _candidates(folder: str) -> dict[int, Path]:
    """iteration -> folder of the tracked checkpoint, whether it exists or not, and of the complete ones before it."""
    present = storage.whole(folder)
    newest = storage.tracked(folder)
    if newest is None:
        return present
    older = {iteration: path for iteration, path in present.items() if iteration < newest}
    return {newest: present.get(newest, storage.iteration_folder(folder, newest)), **older}


def find_checkpoint(config: CheckpointOptions) -> tuple[Saved | None, list[str]]:
    """The newest checkpoint of --load, or that of --ckpt-step, or None, with notes about checkpoints that were skipped.

    A run that resumes from its own folder falls back to the newest intact checkpoint, with a note; one that starts from
    another folder's checkpoint requires the newest.

    Raises:
        UserError: no checkpoint in --load's folder, unless it is --save's (where the first run has none) without
            --finetune; no intact one; a disallowed pickle.
    """
    if config.load is None:
        return None, []
    if config.ckpt_step is not None:
        chosen = _at_step(config.load, config.ckpt_step)
        return chosen, chosen.notes
    own = same_folder(config.load, config.save)
    candidates, notes = _candidates(config.load), list[str]()
    if storage.tracked(config.load) is None:
        if not own or (config.finetune and not candidates):
            option = "--pretrained-checkpoint" if config.load == config.pretrained_checkpoint else "--load"
            raise UserError(f"{option} {_without_tracker(config.load)}")
        if not candidates:
            return None, []
        notes.append(f"{storage.TRACKER} is missing or damaged: looking at the checkpoints themselves")
    for path in candidates.values():
        try:
            found = read(path)
            return found, [*notes, *found.notes]
        except safe_load.Damaged as error:
            if not own:
                raise UserError(
                    f"--load {config.load}: {path.name} cannot be loaded: {error}; choose an older checkpoint with "
                    "--ckpt-step"
                ) from None
            notes.append(f"{path.name} cannot be loaded: {error}; going back to an older checkpoint")
    raise UserError(f"--load {config.load}: no checkpoint there is whole: {'; '.join(notes)}; name another folder")


def _at_step(load: str, iteration: int) -> Saved:
    folder = storage.at_iteration(load, iteration)
    try:
        return read(folder)
    except safe_load.Damaged as error:
        raise UserError(f"--ckpt-step {iteration}: {folder} cannot be loaded: {error}") from None


def _without_tracker(load: str) -> str:
    folder = Path(load)
    if folder in storage.whole(str(folder.parent)).values():
        return (
            f"{load}: this is one checkpoint; name {folder.parent}, with --ckpt-step {int(folder.name.split('_')[1])}"
        )
    if not (folder / storage.TRACKER).exists():
        inner = storage.checkpoints_of(folder)
        where = "the folder that --save had" if inner == folder else inner
        return f"{load}: no checkpoint there (no {storage.TRACKER}); name {where}"
    return f"{load}: {storage.TRACKER} holds no iteration; write the number of one of the iter_ folders into it"


def read(folder: Path, sizes_only: bool = False) -> Saved:
    """The checkpoint in an ``iter_…`` folder whose files are in order and have the bytes, or sizes, that were saved.

    Raises as ``safe_load.examine`` and ``safe_load.check_bytes``.
    """
    saved = _read_config(folder)
    safe_load.examine(folder)
    safe_load.check_bytes(folder, sizes_only)
    return saved


def _read_config(folder: Path) -> Saved:
    if not folder.is_dir():
        raise safe_load.Damaged("there is no such folder")
    try:
        content = read_run_config(folder / CONFIG)
        saved = Saved(folder, content)
        _ = (
            saved.progress,
            saved.layout,
            saved.schedule,
            saved.tokenizer,
            saved.started_from,
            content["options"],
            content["padded_vocab_size"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise safe_load.Damaged(f"{CONFIG} is missing or not this driver's ({error})") from None
    return saved


def check_model(saved: Saved, config: Config, padded_vocab_size: int) -> None:
    """Reject another model's checkpoint, naming the differing options; reject a weights-only one without --finetune."""
    if (origin := saved.content.get("weights_only")) and not config.finetune:
        raise UserError(
            f"checkpoint {saved.folder} holds only weights, from {origin}: add --load {saved.folder.parent} --finetune"
        )
    options = saved.content["options"]
    names = options_in(Part.FUNCTION, groups=option_groups(config))
    # Older checkpoints may lack one: it is not compared.
    read = [name for name in names if name in options and not unmet(config, OPTIONS[name].read_with)]
    shape = [name for name in options_in(Part.SHAPE) if not unmet(config, OPTIONS[name].read_with)]
    others = differing(options, config, [*shape, *read])
    rows, tensor = saved.content["padded_vocab_size"], config.tensor_model_parallel_size
    if rows != padded_vocab_size and not others and rows % tensor:
        raise UserError(
            f"checkpoint {saved.folder} has a vocabulary of {rows} rows, not divisible by --tensor-model-parallel-size "
            f"{tensor}: write it again with --make-vocab-size-divisible-by {tensor} (megatron-lowprec import), or give "
            "another size"
        )
    if rows != padded_vocab_size:
        others.append(f"padded vocabulary {padded_vocab_size} (checkpoint: {rows})")
    if others:
        raise UserError(
            f"checkpoint {saved.folder} holds another model: {', '.join(others)}; "
            "give the checkpoint's options or another folder"
        )


def differing(options: Mapping[str, Any], config: Config, names: Collection[str]) -> list[str]:
    """Those options, with both values, that differ from the checkpoint's."""
    return [
        f"{flag(name)} {getattr(config, name)} (checkpoint: {value})"
        for name, value in earlier_values(options, config, names).items()
    ]


def earlier_values(options: Mapping[str, Any], config: Config, names: Collection[str]) -> dict[str, Any]:
    """The checkpoint's values of those options that differ now; ``names`` has the ones to compare."""

    def known(name: str, value: Any) -> Any:
        return OPTIONS[name].formerly if value is None else value

    # older ones lack newer options
    before = {name: known(name, options.get(name, getattr(DEFAULTS, name))) for name in names}
    return {name: value for name, value in before.items() if value != known(name, getattr(config, name))}


def check_length(saved: Saved, config: TrainingOptions) -> None:
    """Reject a run that would end before the checkpoint it continues from: it would rewrite that run's records."""
    iteration, consumed = saved.progress["iteration"], saved.progress["consumed_samples"]
    if config.train_samples is not None and consumed > config.train_samples:
        raise UserError(
            f"--train-samples {config.train_samples}: checkpoint {saved.folder} has consumed {consumed} samples; give "
            "at least as many, or evaluate it with megatron-lowprec eval"
        )
    if config.train_iters is not None and iteration > config.train_iters:
        raise UserError(
            f"--train-iters {config.train_iters}: checkpoint {saved.folder} is at iteration {iteration}; give at least "
            "as many iterations, or evaluate it with megatron-lowprec eval"
        )


def check_tokenizer(saved: Saved, tokenizer: Tokenizer) -> None:
    """Reject a checkpoint of another tokenizer, if known: the embedding's rows represent other tokens."""
    before, now = saved.tokenizer, tokenizer.unique_identifiers
    if before is not None and before != now:
        raise UserError(
            f"checkpoint {saved.folder} was trained with {_tokenizer_words(before)}, and the tokenizer here is "
            f"{_tokenizer_words(now)}: the same ids mean other text; give the checkpoint's tokenizer"
        )


def _tokenizer_words(identifiers: Mapping[str, str]) -> str:
    return f"{identifiers['type']} of {identifiers['vocab_size']} ids, fingerprint {identifiers['fingerprint']}"


def check_optimizer(saved: Saved, config: Config) -> None:
    """Reject a checkpoint without optimizer state, or with one of another kind than this run's."""
    weights_only = f"--load {saved.folder.parent} --no-load-optim to go on with the weights only"
    if saved.content["options"].get("no_save_optim"):
        raise UserError(
            f"checkpoint {saved.folder} was saved with --no-save-optim: add {weights_only}, or --finetune instead to "
            "begin a run with them"
        )
    others = differing(saved.content["options"], config, options_with(optimizer_state=True))
    if others:
        raise UserError(
            f"checkpoint {saved.folder} holds another optimizer's state: {', '.join(others)}; "
            f"give the checkpoint's options, or {weights_only}"
        )
    before, now = saved.layout.get("expert", 1), config.expert_model_parallel_size
    if has_experts(config) and (before > 1) != (now > 1):
        sizes = "1" if before == 1 else f"{before}, or any from 2"
        raise UserError(
            f"checkpoint {saved.folder} was written with --expert-model-parallel-size {before}, and this run has {now}"
            ": from 2 on Megatron-core gives experts an optimizer of their own, and loads no state of one optimizer "
            f"into two, or of two into one; give --expert-model-parallel-size {sizes}, or {weights_only}"
        )


def same_padding(saved: Saved, config: ParallelOptions, vocab_size: int, padded_vocab_size: int) -> int:
    """The checkpoint's padded vocabulary size if usable: it was padded for its own tensor-parallel size."""
    found = saved.content["padded_vocab_size"]
    serves = isinstance(found, int) and found >= vocab_size and found % config.tensor_model_parallel_size == 0
    return found if serves else padded_vocab_size


def continued(saved: Saved, config: Config, given: Collection[str]) -> tuple[Config, list[str]]:
    """This run's options with the checkpoint's seed, unless one is given; a note if so, or if it differs."""
    seed = saved.content["options"].get("seed")
    if not isinstance(seed, int) or seed == config.seed:
        return config, []
    if "seed" in given:
        return config, [f"seed: {config.seed}, checkpoint {seed}: data order and every random draw change from here"]
    return replace(config, seed=seed), [f"seed: the checkpoint's {seed}"]


def stored_weights(saved: Saved, config: Config, recipe: Recipe, given: Collection[str]) -> tuple[Config, list[str]]:
    """--fp8-param-gather as in the checkpoint's run, unless the option is given or the recipe needs it.

    Codes of bf16 weights can differ in a bit.
    """
    before = saved.content["options"].get("fp8_param_gather", False)
    if "fp8_param_gather" in given or recipe.fp8_weights or before == bool(config.fp8_param_gather):
        return config, []
    if before:
        return config, [
            "--fp8-param-gather: off, where the checkpoint's run had FP8 weights; codes can differ in a bit"
        ]
    return replace(config, fp8_param_gather=False), ["--fp8-param-gather: off, as in the checkpoint's run"]


def recipe_to_continue(config: Config) -> tuple[Recipe, str] | None:
    """The recipe of the checkpoint that a run continues from, with --recipe-override applied, and its stored name.

    None if the run starts anew, or only takes weights from the checkpoint. An override that the stored recipe already
    has keeps its name: the same command may resume.

    Raises:
        UserError: as ``find_checkpoint`` and ``overridden``.
    """
    config, _ = source(config)
    found = None if config.finetune else find_checkpoint(config)[0]
    stored = None if found is None else found.recipe
    if stored is None:
        return None
    changed = overridden(stored, config.recipe_override)
    return stored if same_numerics(changed, stored) else changed, stored.name


def content(
    config: Config,
    recipe: Recipe,
    schedule: Schedule,
    padded_vocab_size: int,
    layout: Mapping[str, int],
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Content of a run's config.yaml, without its progress; plain YAML."""
    known = {} if tokenizer is None else {"tokenizer": dict(tokenizer.unique_identifiers)}
    return {
        "options": {name: value for name, value in asdict(config).items() if value is not None},
        "recipe": recipe_to_dict(recipe),
        "schedule": schedule.to_dict(),
        "padded_vocab_size": padded_vocab_size,
        "layout": dict(layout),
        **known,
    }
