"""Models that differ from Llama in few entries of config.json: Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.hf_options import completed, differing_options
from megatron_lowprec.training.models.llama import hf_config as llama


@dataclass(eq=False)
class Relative:
    """An ``HFConfig`` by its differences from Llama.

    Args:
        CLASS: of transformers.
        WRITES: entries of config.json in place of Llama's ``attention_bias`` and ``mlp_bias``.
    """

    MODEL_TYPE: str
    TITLE: str
    CLASS: str
    OPTIONS: Mapping[str, Any]
    VARIANTS: Mapping[str, tuple[Any, ...]]
    DEFAULTS: Mapping[str, Any]
    WRITES: Mapping[str, Any]
    ALIASES: Mapping[str, str] = field(default_factory=dict)

    def differing(self, config: Config) -> list[str]:
        """Options that the model does not support."""
        return differing_options(config, self.OPTIONS)

    def to_config(self, config: Config) -> dict[str, Any]:
        """Entries of config.json besides those of every architecture."""
        shared = {name: value for name, value in llama.to_config(config).items() if name not in _LLAMA_S}
        return shared | {"architectures": [self.CLASS], "model_type": self.MODEL_TYPE, **self.WRITES}

    def from_config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Options of a Config; ``resolve_model`` fills derived sizes."""
        hf = completed(hf, self.DEFAULTS, self.ALIASES)
        options = llama.from_config(hf)
        window = hf.get("sliding_window") if "use_sliding_window" not in self.VARIANTS else None
        if window is not None:  # a sequence of at most that length does not see it
            longest = min(options["max_position_embeddings"], window)
            options |= {"seq_length": longest, "max_position_embeddings": longest}
        return options


_LLAMA_S = ("attention_bias", "mlp_bias")
_ACTIVATION = {"hidden_act": ("silu", "swish")}
_QWEN = {
    **llama.DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}

MISTRAL = Relative(
    MODEL_TYPE="mistral",
    TITLE="Mistral",
    CLASS="MistralForCausalLM",
    OPTIONS=llama.OPTIONS,
    VARIANTS=_ACTIVATION,
    DEFAULTS={
        **llama.DEFAULTS,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    WRITES={"sliding_window": None},
)
QWEN2 = Relative(
    MODEL_TYPE="qwen2",
    TITLE="Qwen2",
    CLASS="Qwen2ForCausalLM",
    OPTIONS={**llama.OPTIONS, "add_qkv_bias": True},
    VARIANTS={**_ACTIVATION, "use_sliding_window": (False,)},
    DEFAULTS=_QWEN,
    WRITES={"use_sliding_window": False},
)
QWEN3 = Relative(
    MODEL_TYPE="qwen3",
    TITLE="Qwen3",
    CLASS="Qwen3ForCausalLM",
    OPTIONS={**llama.OPTIONS, "qk_layernorm": True},
    VARIANTS={**_ACTIVATION, "use_sliding_window": (False,), "attention_bias": (False,)},
    DEFAULTS={**_QWEN, "head_dim": 128},
    WRITES={"use_sliding_window": False, "attention_bias": False},
)
