"""What a checkpoint's config.yaml alone tells: which one, of what model, how far. No megatron, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.load import recipe_to_dict
from megatron_lowprec.recipe.schema import Recipe
from megatron_lowprec.training.config import Config
from megatron_lowprec.training.schedule import Schedule

TRACKER = "latest_checkpointed_iteration.txt"
CONFIG = "config.yaml"

# Options that the tensors of a checkpoint depend on.
_SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "position_embedding_type",
    "max_position_embeddings",
    "normalization",
    "swiglu",
    "disable_bias_linear",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
    "num_experts",
    "moe_ffn_hidden_size",
)


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk and what its config.yaml says."""

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


def iteration_folder(folder: str, iteration: int) -> Path:
    """Megatron's name for a checkpoint."""
    return Path(folder) / f"iter_{iteration:07d}"


def find_checkpoint(config: Config) -> Saved | None:
    """The newest checkpoint of --load, or None where there is none to load.

    Raises:
        UserError: no checkpoint in --load's folder, and it is not --save's (where the first run starts with none).
    """
    if config.load is None:
        return None
    tracker = Path(config.load) / TRACKER
    if not tracker.exists():
        if config.save is not None and Path(config.load).resolve() == Path(config.save).resolve():
            return None
        raise UserError(
            f"--load {config.load}: no checkpoint there (no {TRACKER}); check the path, or leave --load out"
        )
    text = tracker.read_text().strip()
    if not text.isdecimal():
        raise UserError(
            f"--load {config.load}: {TRACKER} holds {text!r}, not an iteration; "
            "write the number of one of the iter_ folders into it"
        )
    folder = iteration_folder(config.load, int(text))
    try:
        content = yaml.safe_load((folder / CONFIG).read_text())
        saved = Saved(folder, content)
        _ = saved.progress, saved.layout, saved.schedule, content["options"], content["padded_vocab_size"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        raise UserError(
            f"--load {config.load}: {folder.name}/{CONFIG} is missing or not this driver's; name another checkpoint"
        ) from None
    return saved


def check_shape(saved: Saved, config: Config, padded_vocab_size: int) -> None:
    """Refuse a checkpoint of another model, naming every size that differs; or of weights alone, to train on from."""
    if saved.content.get("weights_only") and not config.finetune:
        raise UserError(
            f"--load {saved.folder} holds weights alone, from {saved.content['weights_only']}: add --finetune"
        )
    options = saved.content["options"]
    differing = [
        f"--{name.replace('_', '-')} {getattr(config, name)} (checkpoint: {options.get(name)})"
        for name in _SHAPE
        if options.get(name) != getattr(config, name)
    ]
    if saved.content["padded_vocab_size"] != padded_vocab_size:
        differing.append(f"padded vocabulary {padded_vocab_size} (checkpoint: {saved.content['padded_vocab_size']})")
    if differing:
        raise UserError(
            f"--load {saved.folder} holds another model: {', '.join(differing)}; "
            "give the checkpoint's sizes or another --load"
        )


def recipe_note(saved: Saved, recipe: Recipe) -> list[str]:
    """A line where a run continues under another recipe than it was saved with."""
    before = saved.content.get("recipe", {})
    if before == recipe_to_dict(recipe):
        return []
    same = before.get("name") == recipe.name
    return [
        f"recipe: {recipe.name}{' with other fields' if same else ''}, "
        f"where the checkpoint was trained with {before.get('name')}"
    ]


def implementation_note(saved: Saved, config: Config) -> list[str]:
    """A line where a run continues with other layers (--transformer-impl) than it was saved with.

    Megatron-core stores a dense model's weights, and so their optimizer state, under the same names for both.

    Raises:
        UserError: a model with experts, for which it does not.
    """
    before = saved.content["options"].get("transformer_impl", "local")
    if before == config.transformer_impl:
        return []
    if config.num_experts:
        raise UserError(
            f"--load {saved.folder} was written with --transformer-impl {before}, under which a layer with experts has "
            f"other names than under {config.transformer_impl}; continue with {before}"
        )
    return [f"layers: {config.transformer_impl}, where the checkpoint was written with {before}"]


def content(
    config: Config, recipe: Recipe, schedule: Schedule, padded_vocab_size: int, layout: Mapping[str, int]
) -> dict[str, Any]:
    """What a run's config.yaml says, beside its progress; plain YAML."""
    return {
        "options": {name: value for name, value in asdict(config).items() if value is not None},
        "recipe": recipe_to_dict(recipe),
        "schedule": schedule.to_dict(),
        "padded_vocab_size": padded_vocab_size,
        "layout": dict(layout),
    }
