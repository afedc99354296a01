"""Which layers have experts: Megatron-LM's --moe-layer-freq, without evaluating it as Python."""

from __future__ import annotations

import re
from functools import lru_cache

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config

_TERM = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,9}))?")
_NUMBER = re.compile(r"0*[1-9]\d{0,8}", re.ASCII)


def layers_with_experts(config: Config) -> tuple[bool, ...]:
    """For each layer, whether it has experts.

    Raises:
        UserError: the option is neither a number nor a pattern, or the pattern has another number of layers.
    """
    return _pattern(config.moe_layer_freq, config.sizes.num_layers)


@lru_cache(maxsize=8)  # each layer asks
def _pattern(freq: str, layers: int) -> tuple[bool, ...]:
    asked = freq.replace(" ", "")
    if _NUMBER.fullmatch(asked):
        return tuple(layer % int(asked) == 0 for layer in range(layers))
    terms = [_TERM.fullmatch(term) for term in asked.removeprefix("(").removesuffix(")").split("+")]
    parts = [(term[1].split(","), int(term[2] or 1)) for term in terms if term]
    length = sum(len(digits) * times for digits, times in parts)  # before a list that memory may not hold
    if None in terms or length != layers:
        found = "no such pattern" if None in terms else f"a pattern of {length} layers"
        raise UserError(
            f"--moe-layer-freq {freq} is {found}; give a number, or a pattern of --num-layers {layers} zeros (dense) "
            f"and ones (experts), such as {f'([0]*1+[1]*{layers - 1})' if layers > 1 else '[1]'}"
        )
    return tuple(digit == "1" for digits, times in parts for digit in digits * times)


def canonical_pattern(config: Config) -> str:
    """The option's one spelling of these layers, so that checkpoints compare."""
    pattern = layers_with_experts(config)
    return "1" if all(pattern) else f"[{','.join(str(int(experts)) for experts in pattern)}]"


def has_experts(config: Config, layer: int) -> bool:
    """Whether a layer, numbered from 1, has experts."""
    return layers_with_experts(config)[layer - 1]
