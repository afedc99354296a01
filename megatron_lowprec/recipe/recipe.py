"""Schema of recipes: a linear layer's GEMMs by its place and the progress of the run, and training state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.activation_spec import ActivationSpec
from megatron_lowprec.recipe.field_types import check_fields, named_place
from megatron_lowprec.recipe.layer_match import START, Layer, LayerMatch, Progress, rounded_up
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, GemmSpec, LinearRecipe, check_sources

StateFormat = Literal["fp32", "bf16", "fp16", "e4m3", "e5m2"]
StateRounding = Literal["stochastic", "nearest_even"]
GradientFormat = Literal["none", "e4m3", "e5m2"]
GradientSum = Literal["format", "fp32"]
GradientAccumulation = Literal["buffer", "fp32", "format"]
GradientFactorRule = Literal["fixed", "automatic"]


@dataclass(frozen=True, kw_only=True)
class GemmChange:
    """GEMMs in place of a recipe's. One that is None is the recipe's own; ``GemmSpec()`` is the compute dtype."""

    fprop: GemmSpec | None = None
    dgrad: GemmSpec | None = None
    wgrad: GemmSpec | None = None

    @property
    def gemms(self) -> dict[str, GemmSpec]:
        """The GEMMs that differ from the recipe's."""
        return {gemm: spec for gemm in GEMM_OPERANDS if (spec := getattr(self, gemm)) is not None}


@dataclass(frozen=True, kw_only=True)
class Rule(LayerMatch, GemmChange):
    """GEMMs of the layers that match."""

    @classmethod
    def of(cls, recipe: LinearRecipe, **match: Any) -> Rule:
        """The rule that gives the layers of a ``LayerMatch`` the GEMMs of a recipe: ``Rule.of(BF16, last=2)``."""
        return cls(**match, fprop=recipe.fprop, dgrad=recipe.dgrad, wgrad=recipe.wgrad)


@dataclass(frozen=True, kw_only=True)
class Phase(GemmChange):
    """What changes from a step on: GEMMs of the recipe, and rules in front of the recipe's.

    The phase that began last is in force, with all of the recipe that it does not change; it does not build on earlier
    phases.

    Attributes:
        from_step: completed steps at the beginning.
        from_fraction: the same as a fraction of the run's steps, rounded up.
    """

    from_step: int | None = None
    from_fraction: float | None = None
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.from_step is None) == (self.from_fraction is None):
            raise UserError("a phase begins at from_step or at from_fraction of the run: give one of the two")
        if self.from_step is not None and self.from_step < 1:
            raise UserError(f"from_step is {self.from_step}, but must be at least 1: what runs before is the recipe's")
        if self.from_fraction is not None and not 0.0 < self.from_fraction < 1.0:
            raise UserError(f"from_fraction is {self.from_fraction}, but must lie between 0 and 1")

    def begins(self, total: int | None) -> int:
        """Completed steps of a run at the beginning of the phase.

        Raises:
            UserError: a fraction of an unknown number of steps.
        """
        if self.from_step is not None:
            return self.from_step
        assert self.from_fraction is not None
        if total is None:
            raise UserError(
                f"a phase begins at from_fraction {self.from_fraction:g} of a run whose number of steps is unknown: "
                "give it (--train-iters; total_steps=... in Python), or give from_step"
            )
        return rounded_up(self.from_fraction, total)

    def begins_if_known(self, total: int | None) -> int | None:
        """``begins``; None at a fraction of an unknown number of steps."""
        return None if self.from_step is None and total is None else self.begins(total)


BF16 = LinearRecipe("bf16", "the model's compute dtype")
"""What a layer runs that is not quantized."""


@dataclass(frozen=True)
class KeepBf16:
    """Linear layers that stay in the compute dtype: a short form of rules, which ``Recipe.at`` reads.

    ``first_layers``, ``last_layers`` and ``names`` are ``first``, ``last`` and ``layers`` of such a ``Rule``.
    """

    first_layers: int = 0
    last_layers: int = 0
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("first_layers", "last_layers"):
            if (count := getattr(self, name)) < 0:
                raise UserError(f"{name} is {count}, but must be a number of layers, 0 or more")

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules."""
        ends = Rule.of(BF16, first=self.first_layers, last=self.last_layers)
        named = Rule.of(BF16, layers=self.names)
        return (*((ends,) if ends.first or ends.last else ()), *((named,) if named.layers else ()))


@dataclass(frozen=True)
class OptimizerSpec:
    """Formats of Adam's state between steps (FP8-LM, arXiv 2310.18313, "FP8 optimizer").

    They apply to weights of two or more dimensions. One-dimensional ones (norm gains, biases) keep an fp32 state.

    ``"fp16"``, ``"e4m3"`` and ``"e5m2"`` have one scale per tensor, 2^floor(log2(M / A)) with the format's maximum M
    and the largest magnitude A of all of the tensor's shards on all ranks. ``"bf16"`` has no scale; DeepSeek-V3 (arXiv
    2412.19437, section 3.3.3) has both moments in it, with an fp32 master. An update is computed in fp32 from decoded
    values.

    Attributes:
        exp_avg: first moment.
        exp_avg_sq: second moment.
        master: main weight, from which the model's weight is rounded.
        rounding: of new codes. ``"nearest_even"`` loses updates smaller than half a step of the format.
    """

    exp_avg: StateFormat = "fp32"
    exp_avg_sq: StateFormat = "fp32"
    master: StateFormat = "fp32"
    rounding: StateRounding = "stochastic"

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def formats(self) -> dict[str, str]:
        """Part of the state -> its format."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "master": self.master}

    @property
    def quantized(self) -> bool:
        """Whether any state is stored in another format than fp32."""
        return set(self.formats.values()) != {"fp32"}


@dataclass(frozen=True)
class GradientSpec:
    """Storage and reduction of gradients (FP8-LM, arXiv 2310.18313, "FP8 gradient and all-reduce").

    Each rank casts each tensor with one power-of-two scale, from the largest magnitude on any rank, and sends the codes
    of each shard to the rank that updates it.

    Attributes:
        format: format on the wire; ``"none"`` uses Megatron-core's reduction in the gradients' own dtype.
        sum: ``"fp32"`` adds codes in fp32. ``"format"`` rounds each partial sum to the format, in the order of the
            ranks, saturating, as a reduction in the network does: from 8 ranks on it loses small addends. Both send
            the same number of bytes.
        mu: factor of gradients before the cast. ``"fixed"`` is 1. ``"automatic"`` falls to 1/2 if more than 0.001% of
            the codes saturate, and rises to 2 otherwise.
        accumulation: where the gradients of a step's microbatches are added. ``"buffer"``: in Megatron-core's gradient
            buffer, fp32 or bf16 for all weights, until the update. The others store FP8 codes with a scale a tensor,
            one byte a weight, from the end of the backward pass to the update. ``"fp32"``: in fp32 until the step's
            last microbatch. ``"format"``: a tensor is fp32 within one microbatch and is cast again after each.
    """

    format: GradientFormat = "none"
    sum: GradientSum = "fp32"
    mu: GradientFactorRule = "fixed"
    accumulation: GradientAccumulation = "buffer"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.stored and not self.quantized:
            raise UserError(
                f"accumulation {self.accumulation} was asked with format none; it stores gradients in the "
                "format: set gradients.format=e4m3, or gradients.accumulation=buffer"
            )

    @property
    def quantized(self) -> bool:
        """Whether gradients are sent in another format than their own."""
        return self.format != "none"

    @property
    def stored(self) -> bool:
        """Whether gradients are stored in the format, instead of Megatron-core's gradient buffer."""
        return self.accumulation != "buffer"


Change = TypeVar("Change", Rule, Phase)


def _numbered(field_name: str, changes: Sequence[Change]) -> list[tuple[str, Change]]:
    return [(f"{field_name}[{i}]", change) for i, change in enumerate(changes)]


@dataclass(frozen=True)
class Recipe(LinearRecipe):
    """Named numerics for every linear layer of a transformer, for the optimizer and for data parallelism.

    Embeddings, output layer, router, norms, softmax and attention's GEMMs are never quantized. The GEMMs are those of
    layers without a rule, before the first phase; ``at`` has what a layer runs.

    Attributes:
        keep_bf16: rules in a short form, in front of ``rules``.
        rules: ordered; the first that matches a layer gives its GEMMs.
        phases: changes during a run.
        fp8_weights: stores the weights of quantized linear layers only as the FP8 codes that fprop and dgrad multiply,
            without a copy in the compute dtype; the option ``--fp8-param-gather`` sets the same for one run.
    """

    keep_bf16: KeepBf16 = field(default_factory=KeepBf16)
    rules: tuple[Rule, ...] = ()
    phases: tuple[Phase, ...] = ()
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    gradients: GradientSpec = field(default_factory=GradientSpec)
    activations: ActivationSpec = field(default_factory=ActivationSpec)
    fp8_weights: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for rule_place, rule in _numbered("rules", self.rules):
            check_sources({**self.gemms, **rule.gemms}, rule_place)
        for place, phase in _numbered("phases", self.phases):
            check_sources({**self.gemms, **phase.gemms}, place)
            for rule_place, rule in _numbered(f"{place}.rules", phase.rules):
                check_sources({**self.gemms, **phase.gemms, **rule.gemms}, rule_place)
            for rule_place, rule in _numbered("rules", self.rules):
                check_sources({**self.gemms, **phase.gemms, **rule.gemms}, f"{rule_place} under {place}")

    def at(self, layer: Layer, progress: Progress = START) -> LinearRecipe:
        """What a linear layer runs at a time. Pure; equal results are one object.

        Raises:
            UserError: a rule or a phase depends on a number of layers or of steps that is unknown.
        """
        now = self.during(progress)
        found = now._resolved.get(layer)
        if found is None:
            with named_place(layer.path):
                found = now._linear(now._gemms_at(layer))
            found = now._resolved[layer] = now._distinct.setdefault(found, found)
        return found

    @cached_property
    def linear_recipes(self) -> tuple[LinearRecipe, ...]:
        """What layers may run in any phase, the recipe's own GEMMs first; ``BF16`` only if nothing is quantized."""
        found = [
            now._linear({**now.gemms, **change})
            for now in self.stages
            for change in [dict[str, GemmSpec](), *(rule.gemms for rule in now.all_rules)]
        ]
        return tuple(dict.fromkeys(linear for linear in found if linear is not BF16)) or (BF16,)

    def _linear(self, gemms: dict[str, GemmSpec]) -> LinearRecipe:
        quantized = any(gemm.quantized for gemm in gemms.values())
        return LinearRecipe(self.name, self.summary, self.source, **gemms) if quantized else BF16

    def _gemms_at(self, layer: Layer) -> dict[str, GemmSpec]:
        found = self.gemms
        for gemm in found:
            rule = next((rule for rule in self.all_rules if rule.matches(layer, gemm)), None)
            found[gemm] = found[gemm] if rule is None else rule.gemms.get(gemm, found[gemm])
        return found

    def during(self, progress: Progress) -> Recipe:
        """The recipe of the phase in force, without phases; the same object for the whole phase."""
        started = [] if not progress.step else [(p.begins(progress.total), i) for i, p in enumerate(self.phases)]
        in_force = max((each for each in started if each[0] <= progress.step), default=(0, -1))[1]
        return self.stages[1 + in_force]

    def start(self, total: int | None) -> Progress:
        """The start of a run.

        Raises:
            UserError: a phase begins at a fraction of an unknown number of steps; as ``check_phases``.
        """
        for phase in self.phases:
            phase.begins(total)
        self.check_phases(total)
        return Progress(0, total)

    def check_phases(self, total: int | None) -> None:
        """Reject two phases that begin at one step, of which one would never run; UserError names both."""
        numbers: dict[int, int] = {}
        for number, phase in enumerate(self.phases, 1):
            begins = phase.begins_if_known(total)
            if begins is not None and (other := numbers.setdefault(begins, number)) != number:
                length = "" if total is None else f" of {total:,}"
                raise UserError(
                    f"phases {other} and {number} of recipe {self.name} both begin at iteration {begins + 1:,}{length}"
                    f", so phase {other} would never run: leave it out, or let one begin elsewhere"
                )

    @cached_property
    def stages(self) -> tuple[Recipe, ...]:
        """The recipe before its first phase, and in each phase; none has phases."""
        if not self.phases:
            return (self,)
        changes: list[dict[str, Any]] = [{}]
        changes += [
            {**phase.gemms, "rules": (*phase.rules, *self.all_rules), "keep_bf16": KeepBf16()} for phase in self.phases
        ]
        return tuple(replace(self, phases=(), **change) for change in changes)

    @property
    def all_rules(self) -> tuple[Rule, ...]:
        """``keep_bf16`` and ``rules``."""
        return (*self.keep_bf16.rules, *self.rules)

    @property
    def rules_of_all_phases(self) -> tuple[Rule, ...]:
        """``all_rules`` and those of the phases."""
        return (*self.all_rules, *(rule for phase in self.phases for rule in phase.rules))

    @property
    def globs(self) -> tuple[str, ...]:
        """The globs over ``layers.<number>.<linear>`` of all rules."""
        return tuple(dict.fromkeys(glob for rule in self.rules_of_all_phases for glob in rule.layers or ()))

    def in_bf16(self, layers: Sequence[str] = (), modules: Sequence[str] = ()) -> Recipe:
        """The recipe with these layers or GEMMs in the compute dtype in every phase; globs as in ``LayerMatch``."""
        if not (layers or modules):
            return self
        rule = Rule.of(BF16, layers=tuple(layers), modules=tuple(modules))
        phases = tuple(replace(phase, rules=(rule, *phase.rules)) for phase in self.phases)
        return replace(self, keep_bf16=KeepBf16(), rules=(rule, *self.all_rules), phases=phases)

    def placed_specs(self) -> Iterator[tuple[str, str, GemmSpec]]:
        """As ``LinearRecipe``."""
        yield from super().placed_specs()
        for place, change in self._placed_changes():
            yield from ((place, gemm, spec) for gemm, spec in change.gemms.items())

    def _placed_changes(self) -> Iterator[tuple[str, GemmChange]]:
        """All rules and phases, with their places such as ``phases[0].rules[1]``."""
        yield from (("keep_bf16", rule) for rule in self.keep_bf16.rules)
        yield from _numbered("rules", self.rules)
        for place, phase in _numbered("phases", self.phases):
            yield place, phase
            yield from _numbered(f"{place}.rules", phase.rules)

    @property
    def changes_training(self) -> bool:
        """Whether optimizer state, gradients or the storage of weights differ from Megatron-core's."""
        return self.optimizer.quantized or self.gradients.quantized or self.fp8_weights

    @cached_property
    def _resolved(self) -> dict[Layer, LinearRecipe]:
        return {}

    @cached_property
    def _distinct(self) -> dict[LinearRecipe, LinearRecipe]:
        return {}
