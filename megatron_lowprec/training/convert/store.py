"""Reads and writes whole models as this driver's checkpoints, from any layout."""

from __future__ import annotations

import logging
import shlex
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_lowprec.errors import UserError, disk_is_full
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.training.checkpoint import resume, safe_load, storage
from megatron_lowprec.training.checkpoint.loader import plain
from megatron_lowprec.training.checkpoint.save_lock import SaveLock
from megatron_lowprec.training.config.options import Config, options_in
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.convert.names import Weights, canonical, is_weight
from megatron_lowprec.training.data.tokenizer import Tokenizer
from megatron_lowprec.training.distributed import startup
from megatron_lowprec.training.models.architectures import model_options
from megatron_lowprec.training.options.declaration import Part
from megatron_lowprec.training.schedule import plan


def read_weights(folder: Path, trust: bool = False) -> Weights:
    """All weights of a distributed checkpoint (torch_dist), this driver's or stock Megatron-LM's, on the CPU.

    ``trust`` allows any class in ``.metadata``.

    Raises:
        UserError: no checkpoint or a damaged one; a disallowed pickle.
    """
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        reader = safe_load.RestrictedReader(folder, trust, is_weight)
        entries = reader.read_metadata().state_dict_metadata
        found = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata) and is_weight(name)
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended here
            load(found, storage_reader=reader, no_dist=True)
    except (OSError, EOFError, RuntimeError, KeyError, CheckpointException, safe_load.Damaged) as error:
        what = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{folder}: not a distributed checkpoint that can be read: {what}") from None
    if not found:
        raise UserError(f"{folder}: holds no weights of a GPT by Megatron-core's names")
    return canonical(found)


def check_vocabulary(tokenizer: Tokenizer, rows: int, what: str) -> None:
    """Reject a tokenizer with ids beyond the ``rows`` of a model's vocabulary; ``what`` names them.

    Raises:
        UserError: with both sizes.
    """
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"the {tokenizer.type_name} has {tokenizer.vocab_size:,} ids, and {what} {rows:,}: give the tokenizer that "
            "the model was trained with"
        )


def write_checkpoint(folder: Path, config: Config, weights: Weights, source: str, tokenizer: Tokenizer | None) -> Path:
    """Write a weights-only checkpoint at iteration 0, for --load with --finetune, from a single process.

    Args:
        folder: as --save; ``model.yaml`` beside the checkpoint has the options for --config.
        config: the model's options; ``bf16`` selects the stored dtype.
        weights: by GPTModel's names.
        source: origin of the weights, for the record.
        tokenizer: tokenizer of their training, if known.

    Raises:
        UserError: weights that do not match the model, a folder that has checkpoints already, or a full disk.
    """
    if (folder / storage.TRACKER).exists():
        raise UserError(f"--save {folder}: has checkpoints already; name another folder")
    config = resolve_run(resolve_model(plain(config)), 1, gpus=torch.cuda.is_available())
    rows = len(weights["embedding.word_embeddings.weight"])
    schedule, _ = plan(replace(config, lr_warmup_samples=0, lr_warmup_iters=0, lr_warmup_fraction=None), 1, 1)
    layout = dict.fromkeys(("tensor", "pipeline", "context", "expert", "data"), 1)
    content = resume.content(config, get_recipe("bf16"), schedule, rows, layout, tokenizer)
    startup.initialize(config, startup.prepare_environment())

    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu
    from megatron.core.utils import unwrap_model

    from megatron_lowprec.training.checkpoint.checkpoint import RunProgress
    from megatron_lowprec.training.model import build_model

    (chunk,) = build_model(config, get_recipe("bf16"), rows).chunks
    gpt = unwrap_model(chunk)
    _fill(gpt, weights)
    metadata = {"singleton_local_shards": False, "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    with SaveLock(folder) as lock:
        lock.acquire()
        partial = storage.stage(str(folder), 0)
        with whole_or_nothing(partial, f"--save {folder}"), _silenced("megatron.core.dist_checkpointing"):
            dist_checkpointing.save({"model": gpt.sharded_state_dict(metadata=metadata)}, str(partial))
            content |= {"weights_only": source, "progress": asdict(RunProgress())}
            (partial / resume.CONFIG).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
            (folder / "model.yaml").write_text(_model_yaml(config, source), encoding="utf-8")
            final = storage.publish(partial, str(folder), 0)
    startup.finalize()
    return final


@contextmanager
def whole_or_nothing(folder: Path, option: str) -> Iterator[None]:
    """Removes a folder of the caller's own on an error while it is written.

    Args:
        option: what a full disk is reported with.

    Raises:
        UserError: the disk is full.
    """
    try:
        yield
    except BaseException as error:  # torch's CheckpointException is no Exception
        shutil.rmtree(folder, ignore_errors=True)
        if (full := disk_is_full(error)) is not None:
            raise UserError(f"{option}: {full}") from None
        raise


@contextmanager
def _silenced(logger: str) -> Iterator[None]:
    """Mutes a logger, which repeats the exception of a failed write."""
    found = logging.getLogger(logger)
    level = found.level
    found.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        found.setLevel(level)


def training_hint(save: str) -> str:
    """How to train from the checkpoint of ``write_checkpoint``, for a shell."""
    config, load = shlex.quote(f"{save}/model.yaml"), shlex.quote(save)
    return f"train with: --config {config} --load {load} --finetune, with your --lr and data"


def _fill(gpt: torch.nn.Module, weights: Weights) -> None:
    """Load every parameter, and no extra state of layers."""
    missing = {name for name, _ in gpt.named_parameters()} - weights.keys()
    if missing:
        raise UserError(f"no weights for {', '.join(sorted(missing)[:5])}: these are of another model")
    try:
        found = gpt.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise UserError(f"weights of another size: {' '.join(str(error).split())[:300]}") from None
    if found.unexpected_keys:
        raise UserError(f"weights without a place in this model: {', '.join(sorted(found.unexpected_keys)[:5])}")


def _model_yaml(config: Config, source: str) -> str:
    names = [*model_options(config), "bf16", *options_in(Part.TOKENIZER)]
    values: dict[str, Any] = {name.replace("_", "-"): getattr(config, name) for name in names}
    if not config.group_query_attention:
        del values["num-query-groups"]
    given = {name: value for name, value in values.items() if value is not None}
    return f"# The model of {source}; data, batch, schedule and layout are yours to add.\n" + yaml.safe_dump(
        given, sort_keys=False
    )
