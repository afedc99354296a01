"""Options of a run as typed fields, under the names of Megatron's flags, and what their declarations say.

A field ``num_layers`` is the flag ``--num-layers`` and the YAML key ``num-layers`` (or ``num_layers``). Defaults are
Megatron's unless the help says otherwise. Each group of options is a class, whose docstring is the group's title.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from megatron_lowprec.training.models.deepseek.options import LatentAttention, LatentAttentionOptions
from megatron_lowprec.training.options.dataset_options import DataOptions
from megatron_lowprec.training.options.declaration import NO_EFFECT_PARTS, Group, Option, Part, arg
from megatron_lowprec.training.options.model_options import ModelOptions, RopeOptions
from megatron_lowprec.training.options.moe_options import Experts, MoeOptions
from megatron_lowprec.training.options.optimizer_options import MuonOptions, OptimizerOptions
from megatron_lowprec.training.options.output_options import CheckpointOptions, EvaluationOptions, LoggingOptions
from megatron_lowprec.training.options.parts import ModelShape, ModelSizes, Steps, filled
from megatron_lowprec.training.options.recipe_options import RecipeOptions
from megatron_lowprec.training.options.training_options import MemoryOptions, ParallelOptions, TrainingOptions


@dataclass(frozen=True)
class Config(
    LoggingOptions,
    EvaluationOptions,
    CheckpointOptions,
    DataOptions,
    MemoryOptions,
    ParallelOptions,
    MuonOptions,
    OptimizerOptions,
    TrainingOptions,
    MoeOptions,
    LatentAttentionOptions,
    RopeOptions,
    ModelOptions,
    RecipeOptions,
):
    """Options of one run. ``arguments.parse`` creates it; ``resolve.resolve`` fills derived fields."""

    PART = Part.OUTPUT
    NEEDS = READ_WITH = ""

    config: str | None = arg(
        None, "YAML file with any of these options; the command line wins over it", sweep="models:"
    )

    @cached_property
    def sizes(self) -> ModelSizes:
        """The sizes that a model names."""
        return filled(ModelSizes, self)

    @cached_property
    def shape(self) -> ModelShape:
        """All sizes of the model, after ``resolve_model``."""
        return filled(ModelShape, self)

    @cached_property
    def experts(self) -> Experts:
        """The sizes of a model with experts, after ``resolve_model``."""
        return filled(Experts, self)

    @cached_property
    def latent(self) -> LatentAttention:
        """The sizes of latent attention."""
        return filled(LatentAttention, self)

    @cached_property
    def steps(self) -> Steps:
        """Iterations and their samples, after ``resolve_run``."""
        return filled(Steps, self)


GROUPS: tuple[type[Group], ...] = tuple(reversed(Config.__bases__))
_ALL: tuple[type[Group], ...] = (Config, *GROUPS)
_GROUP_OF = {option.name: group for group in _ALL for option in fields(group)}


def _declared(name: str) -> Option:
    """An option with what holds for its whole group."""
    group, option = _GROUP_OF[name], Config.__dataclass_fields__[name].metadata["option"]
    needs = f"{group.NEEDS if name != group.NEEDS else ''} {option.needs}".strip()
    return replace(option, part=option.part or group.PART, needs=needs, read_with=option.read_with or group.READ_WITH)


OPTIONS: dict[str, Option] = {name: _declared(name) for name in _GROUP_OF}


def options_in(*parts: Part, groups: Sequence[type[Group]] = _ALL) -> tuple[str, ...]:
    """Names of the options of these parts, in groups of options."""
    return tuple(name for name, option in OPTIONS.items() if option.part in parts and _GROUP_OF[name] in groups)


def options_with(**declared: object) -> tuple[str, ...]:
    """Names of the options whose declaration has these values, as in ``draws=True``."""
    return tuple(
        name
        for name, option in OPTIONS.items()
        if all(getattr(option, key) == value for key, value in declared.items())
    )


def unmet(config: Config, needs: str) -> str | None:
    """The first of an option's ``needs`` that these options lack; None if they have all."""
    for need in needs.split():
        names, _, values = need.lstrip("!").partition("=")
        found = [getattr(config, name) for name in names.split("|")]
        met = str(found[0]) in values.split("|") if values else any(found)
        if met == need.startswith("!"):
            return need
    return None


DEFAULTS = Config()

NO_EFFECT = frozenset(options_in(*NO_EFFECT_PARTS))
"""Options that change no update of a run: records of changes and comparisons of runs leave them out."""
