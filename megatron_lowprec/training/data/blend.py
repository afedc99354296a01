"""Data paths with or without weights, checked before any work starts. No megatron."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.arguments import flag
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.data import indexed_dataset
from megatron_lowprec.training.data.jsonl import is_text_file
from megatron_lowprec.training.data.tokenizer import Tokenizer
from megatron_lowprec.training.options.dataset_options import DataOptions
from megatron_lowprec.training.rampup import nearest_end

SPLITS = ("train", "valid", "test")
_BY_DOCUMENTS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
_SHARE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*", re.ASCII)  # what Megatron-core reads as one number


def data_paths(config: DataOptions, split: str) -> list[str]:
    """The blend that the options give for one of SPLITS, including weights; empty if none."""
    if config.data_path is not None:
        return config.data_path
    separate = {"train": config.train_data_path, "valid": config.valid_data_path, "test": config.test_data_path}
    return separate[split] or []


def parse_blend(items: Sequence[str]) -> list[tuple[str, float | None]]:
    """``["0.3", "A", "0.7", "B"]`` or ``["A", "B"]`` as (path, weight); missing weights are None."""

    def number(item: str) -> float | None:
        try:
            return float(item)
        except ValueError:
            return None

    weights = [number(item) for item in items]
    paths = [item for item, weight in zip(items, weights) if weight is None]
    files = [same_file(path) for path in paths]
    for path, file in zip(paths, files):
        if files.count(file) > 1:
            raise UserError(
                f"data paths {' '.join(items)}: {path} is named twice, and its samples would be too; name it once, "
                "with the sum of its weights"
            )
    if all(w is None for w in weights):
        return [(item, None) for item in items]
    if len(items) % 2 or any(w is None for w in weights[::2]) or any(w is not None for w in weights[1::2]):
        raise UserError(f"data paths {' '.join(items)}: give either no weights or one before every path")
    given = [weight or 0.0 for weight in weights[::2]]
    if not all(weight > 0 for weight in given) or not sum(given) < math.inf:
        raise UserError(f"data paths {' '.join(items)}: every weight must be a number above 0")
    return list(zip(items[1::2], weights[::2], strict=True))


def same_file(path: str) -> str:
    """What all spellings of a data path have in common."""
    return os.path.realpath(path)


def check_split(split: str) -> None:
    """Reject a --split that is not a list of shares; Megatron-core reads any digits, and no exponents."""
    found = [_SHARE.fullmatch(share) for share in split.split(",")]
    shares = [float(share[1]) for share in found if share]
    if not 1 <= len(found) == len(shares) <= len(SPLITS) or not 0 < sum(shares) < math.inf:
        raise UserError(
            f"--split {split}: wants up to three shares, for train, validation and test, not all 0, such as 969,30,1"
        )


def all_paths(config: DataOptions) -> list[str]:
    """Every data path once, sorted, without weights."""
    blends = [*(data_paths(config, split) for split in SPLITS), config.data_phase_path or []]
    return sorted({path for blend in blends for path, _ in parse_blend(blend)})


def resolve_phase(config: Config, total_samples: int) -> Config:
    """Place the switch of blends at the end of an iteration, in samples.

    Raises:
        UserError: a share without a second blend or vice versa, or an invalid share.
    """
    asked = config.data_phase_switch is not None or config.data_phase_switch_samples is not None
    if asked != (config.data_phase_path is not None):
        raise UserError(
            "--data-phase-switch (or --data-phase-switch-samples) and --data-phase-path need each other: give when the "
            "run changes its training data and to what, or leave both out"
        )
    if config.data_phase_path is None:
        return config
    if config.mock_data:
        raise UserError("--data-phase-path has no meaning with --mock-data; leave one out")
    samples = config.data_phase_switch_samples
    if samples is None:
        share = config.data_phase_switch or 0.0
        if not 0 < share < 1:
            raise UserError(f"--data-phase-switch {share}: wants a share of the run between 0 and 1")
        samples = nearest_end(config.steps, share * total_samples)
    return replace(config, data_phase_switch_samples=samples)


def check_phase(config: DataOptions, total_samples: int) -> None:
    """Reject a switch of blends outside of the run, of which a resume may have consumed samples in other batches."""
    samples = config.data_phase_switch_samples
    if samples is not None and not 0 < samples < total_samples:
        raise UserError(
            f"the training data would change at sample {samples} of a run of {total_samples}: "
            "choose a --data-phase-switch inside of the run"
        )


def continued_phase(
    config: Config, saved: Mapping[str, Any], given: Collection[str], consumed: int
) -> tuple[Config, list[str]]:
    """The switch of blends of a run that resumes a checkpoint, with a note if options and checkpoint differ.

    In a longer run the same share is another sample. The checkpoint's sample is kept, since data before it may have
    been seen; --data-phase-switch-samples overrides it.

    Args:
        consumed: samples of the checkpoint's run.

    Raises:
        UserError: a new switch would lie before samples that were consumed, or move one that lies there: both blends
            would go on at other positions than they were left at.
    """
    before, now = saved.get("data_phase_switch_samples"), config.data_phase_switch_samples
    if now is None or before == now:
        return config, []
    if before is None or "data_phase_switch_samples" in given:
        if before is not None and before < consumed:
            raise UserError(
                f"--data-phase-switch-samples {now}: the run changed its data at sample {before} and consumed "
                f"{consumed}; give {before}"
            )
        if now < consumed:
            raise UserError(
                f"the training data would change at sample {now}, but {consumed} were consumed by the first blend; "
                f"give --data-phase-switch-samples {consumed} or more, and no --data-phase-switch"
            )
        return config, []
    note = f"data: the second blend begins at sample {before}, as the checkpoint's run had it, not at {now}"
    if consumed <= before:
        note += " (--data-phase-switch-samples moves it)"
    return replace(config, data_phase_switch_samples=before), [note]


def check_paths(config: DataOptions, tokenizer: Tokenizer) -> None:
    """Reject data that is missing, tokenized with another vocabulary, or without the ends that flags look for."""
    by_documents = [name for name in _BY_DOCUMENTS if getattr(config, name)]
    for path in [] if config.mock_data else all_paths(config):
        if not is_text_file(path):
            note = indexed_dataset.check_prefix(path, tokenizer)
            if by_documents and (note or {}).get("append_eod") is False:
                raise UserError(
                    f"{flag(by_documents[0])} looks for ends of documents, which {path} was written "
                    "without: prepare it with --append-eod, or leave the option out"
                )
        elif not Path(path).is_file():
            raise UserError(f"data path {path}: no such file; check the path")
