"""Hugging Face's form of an architecture as data: entries of config.json, and tensors of model.safetensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.rope import rope_of

if TYPE_CHECKING:
    import torch

_NULLABLE = (
    "n_inner",
    "head_dim",
    "num_key_value_heads",
    "q_lora_rank",
    "sliding_window",
)  # null is a value of its own
_LARGEST = 1e300  # less than any infinity, and not greater than NaN
_KINDS: Mapping[type, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number, 0 or more", (int,)),
    float: ("a finite number", (int, float)),
}


@dataclass(frozen=True)
class TensorMap:
    """One weight by GPTModel's name, and the tensors of a Hugging Face file that store it.

    ``keeps_dtype``: the file has it in its own dtype, whatever the others have.
    """

    ours: str
    theirs: tuple[str, ...]
    to_hf: Callable[[torch.Tensor], Sequence[torch.Tensor]] = lambda tensor: [tensor]
    from_hf: Callable[[Sequence[torch.Tensor]], torch.Tensor] = lambda tensors: tensors[0]
    keeps_dtype: bool = False


@dataclass(frozen=True, eq=False)
class HuggingFace:
    """config.json and model.safetensors of an architecture. A relative is a ``replace`` of its differences.

    Args:
        class_name: of transformers.
        options: values that select a model of this form; the others are sizes.
        keys: option -> key of config.json with its value.
        variants: key of config.json -> values that these layers support; the first is the default, and written.
        defaults: keys that are read besides those of ``variants``, with transformers' defaults.
        tensor_maps: every weight once, except an output layer that is not tied to the embedding.
        known_name: name in ``tensor_maps`` of a file's tensor, None for a constant in older files.
        aliases: second names that transformers takes -> keys of config.json.
        unsupported: flags with values that the model does not have, besides those of ``options``.
        to_config: entries of config.json besides those of ``keys`` and ``variants``.
        from_config: options besides those of ``options`` and ``keys``, from a completed config.json; may raise
            UserError.
    """

    model_type: str
    title: str
    class_name: str
    options: dict[str, Any]
    keys: dict[str, str]
    variants: dict[str, tuple[Any, ...]]
    defaults: dict[str, Any]
    tensor_maps: Callable[[Config], Iterator[TensorMap]]
    known_name: Callable[[str], str | None]
    aliases: dict[str, str] = field(default_factory=dict)
    unsupported: Callable[[Config], list[str]] = lambda config: []
    to_config: Callable[[Config], dict[str, Any]] = lambda config: {}
    from_config: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda hf: {}

    def differing(self, config: Config) -> list[str]:
        """Options that differ from this form's, as flags with the configuration's values."""
        found = {name: getattr(config, name) for name in self.options}
        flags = [f"--{name.replace('_', '-')} {value}" for name, value in found.items() if value != self.options[name]]
        return flags + self.unsupported(config)

    def completed(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """config.json under one name for each key, with ``defaults`` for the keys that it lacks.

        Raises:
            UserError: a value of another type than its default's.
        """
        found = {**self.defaults, **self._flat(hf)}
        for name, default in self.defaults.items():
            value = found[name]
            if value is None and name in _NULLABLE:
                continue
            words, types = _KINDS[int if default is None else type(default)]
            fits = isinstance(value, types) and isinstance(value, bool) == (types == (bool,))
            if not fits or not abs(value) < _LARGEST or (types == (int,) and value < 0):
                raise UserError(f"config.json has {name} {value!r}; it must be {words}")
        return found

    def absent(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The defaults that ``completed`` adds, without those of None."""
        given = self._flat(hf)
        return {name: value for name, value in self.defaults.items() if value is not None and name not in given}

    def _flat(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """config.json under one name for each key; aliases and the base of rope have precedence."""
        found = {name: value for name, value in hf.items() if name not in self.aliases}
        found |= {self.aliases[name]: value for name, value in hf.items() if name in self.aliases}
        rope = rope_of(hf)
        return found | ({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})
