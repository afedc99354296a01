"""The place and the time for which a recipe answers: a linear layer of a model, and the progress of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.field_types import check_fields


class Progress(NamedTuple):
    """Progress of a run.

    Attributes:
        step: training steps completed.
        total: steps of the whole run; None if unknown.
    """

    step: int = 0
    total: int | None = None


START = Progress()


class Layer(NamedTuple):
    """A linear layer's place in a model. The experts of a layer have one place, since their GEMMs run together.

    Attributes:
        number: of its transformer layer, from 1, over all pipeline stages; 0 outside of a list of blocks.
        name: within the transformer layer, such as ``mlp.linear_fc1``.
        num_layers: transformer layers of the model; None if unknown.
        module: the module's own path; by default Megatron-core's, which counts layers from 0.
    """

    number: int
    name: str
    num_layers: int | None
    module: str = ""

    @property
    def path(self) -> str:
        """Path that the globs of ``layers`` match."""
        return site_path(self.number, self.name) if self.number else self.name

    @property
    def module_path(self) -> str:
        """Path that the globs of ``modules`` match."""
        return self.module or f"decoder.layers.{self.number - 1}.{self.name}"


def site_path(layer_number: int, name: str, expert: int = -1) -> str:
    """``layers.3.mlp.linear_fc1``, with the expert's number if any."""
    path = f"layers.{layer_number}.{name}"
    return path if expert < 0 else f"{path} of expert {expert}"


_GLOBS, _ENDS = ("layers", "modules"), ("first", "last", "last_fraction")


@dataclass(frozen=True, kw_only=True)
class LayerMatch:
    """A set of linear layers, or of single GEMMs of them.

    A layer must match a glob, if they are given, and lie at an end, if one is given. Without fields every layer
    matches. None is a field that is not given; an empty list and a count of 0 match nothing.

    Attributes:
        layers: globs over ``layers.<number>.<linear>``, numbers from 1, such as ``layers.3.*`` or ``*.linear_proj``; or
            over a single GEMM, as in ``layers.3.mlp.linear_fc1.dgrad``. A glob may begin as Megatron's module names,
            which count layers from 0: ``decoder.layers.1`` is ``layers.2``.
        modules: globs over the module's own path: ``decoder.layers.0.mlp.linear_fc1`` in Megatron-core.
        first, last: transformer layers at the beginning and at the end of the model, over all pipeline stages.
        last_fraction: the same as a fraction of all layers, rounded up.
    """

    layers: tuple[str, ...] | None = None
    modules: tuple[str, ...] | None = None
    first: int | None = None
    last: int | None = None
    last_fraction: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("first", "last"):
            if (count := getattr(self, name) or 0) < 0:
                raise UserError(f"{name} is {count}, but must be a number of layers, 0 or more")
        if self.last_fraction is not None and not 0.0 <= self.last_fraction <= 1.0:
            raise UserError(f"last_fraction is {self.last_fraction}, but must be a fraction of the layers, 0 to 1")
        for names in (_GLOBS, _ENDS):  # beside one that matches, an empty alternative says nothing: one form for both
            if any(getattr(self, name) for name in names):
                for name in names:
                    object.__setattr__(self, name, getattr(self, name) or None)

    def __str__(self) -> str:
        """As in a recipe file: ``{layers: ['layers.4.*'], first: 2}``."""
        given = {name: value for name in (*_GLOBS, *_ENDS) if (value := getattr(self, name)) is not None}
        values = (f"{name}: {[*value] if name in _GLOBS else value}" for name, value in given.items())
        return f"{{{', '.join(values)}}}"

    @property
    def empty(self) -> bool:
        """Whether nothing can match, in any model: all counts or lists of globs that are given are empty."""
        given = [[value for name in names if (value := getattr(self, name)) is not None] for names in (_GLOBS, _ENDS)]
        return any(values and not any(values) for values in given)

    @property
    def counts_from_end(self) -> bool:
        """Whether a layer matches or not by the number of the model's layers."""
        return bool(self.last or self.last_fraction)

    def matches(self, layer: Layer, gemm: str) -> bool:
        """Whether a GEMM of a layer belongs to the set.

        Raises:
            UserError: the number of the model's layers is needed, and unknown.
        """
        return self._at_an_end(layer) and self._named(layer, gemm)

    def _named(self, layer: Layer, gemm: str) -> bool:
        if self.layers is self.modules is None:
            return True
        paths, modules = (layer.path, f"{layer.path}.{gemm}"), (layer.module_path, f"{layer.module_path}.{gemm}")
        return any(matches(path, glob) for glob in self.layers or () for path in paths) or any(
            fnmatchcase(path, glob) for glob in self.modules or () for path in modules
        )

    def _at_an_end(self, layer: Layer) -> bool:
        if self.first is self.last is self.last_fraction is None:
            return True
        if not layer.number:
            return False
        if layer.number <= (self.first or 0) or not self.counts_from_end:
            return layer.number <= (self.first or 0)
        if layer.num_layers is None:
            raise UserError("a rule counts layers from the last one: pass num_layers=..., the number of the model's")
        return layer.number > layer.num_layers - max(
            self.last or 0, rounded_up(self.last_fraction or 0, layer.num_layers)
        )


def rounded_up(fraction: float, whole: int) -> int:
    """``ceil(fraction * whole)`` of the decimal number that was written: 0.07 of 100 is 7."""
    return math.ceil(Fraction(repr(fraction)) * whole)


def matches(path: str, glob: str) -> bool:
    """Whether a glob of ``LayerMatch.layers`` matches a path that begins as ``site_path``."""
    return fnmatchcase(path, _counted_from_1(glob))


@cache
def _counted_from_1(glob: str) -> str:
    found = re.match(r"decoder\.layers\.(\d+|\*)(?=\.|$)", glob)
    if found is None:
        return glob
    number = found[1] if found[1] == "*" else int(found[1]) + 1
    return f"layers.{number}{glob[found.end() :]}"


def numbering_notes(globs: Iterable[str], paths: Sequence[str]) -> list[str]:
    """A line for each glob that matches a path here, and another layer among Megatron's module names."""
    notes: dict[str, str] = {}
    for glob in globs:
        for path in paths:
            _, number, name = path.split(".", 2)
            same, following = (f"decoder.layers.{n}.{name}" for n in (int(number) - 1, number))
            if matches(path, glob) and fnmatchcase(following, glob) and not fnmatchcase(same, glob):
                hint = f"for decoder.layers.{number} write decoder.layers.{number} or layers.{int(number) + 1}"
                why = "layers count from 1 here and from 0 in Megatron's module names"
                notes.setdefault(glob, f"{glob} matches {path}: {why}; {hint}")
    return list(notes.values())
