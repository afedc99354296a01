"""Converts a GPT's options to the config.json of a Hugging Face model, and back. Pure data.

Each architecture of ``training/models/`` has such a model or none. Mixtures of them are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.arguments import checked_options
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.architectures import ARCHITECTURES, architecture_of
from megatron_lowprec.training.models.common.hugging_face import HuggingFace

WRITTEN: dict[str, HuggingFace] = {
    form.model_type: form
    for form in (architecture.hugging_face for architecture in reversed(ARCHITECTURES))
    if form is not None
}
READ: dict[str, HuggingFace] = WRITTEN | {
    form.model_type: form for architecture in ARCHITECTURES for form in architecture.also_read
}


def hf_form(config: Config) -> HuggingFace:
    """The Hugging Face form of the architecture that the options select.

    Raises:
        UserError: there is none; names the differences from the nearest.
    """
    differing = {kind: form.differing(config) for kind, form in WRITTEN.items()}
    selected = architecture_of(config).hugging_face
    kind = min(differing, key=lambda name: (len(differing[name]), WRITTEN[name] is not selected))
    if differing[kind]:
        titles = " nor ".join(f"a {form.title}" for form in WRITTEN.values())
        raise UserError(
            f"this model is neither {titles} to Hugging Face: {', '.join(differing[kind])} is not {kind}'s; only those "
            f"{len(WRITTEN)} can be read and written"
        )
    return WRITTEN[kind]


def to_hf_config(config: Config, vocab_size: int, eod: int | None, dtype: str) -> dict[str, Any]:
    """config.json; ``vocab_size`` without padding."""
    form = hf_form(config)
    return {
        "architectures": [form.class_name],
        "model_type": form.model_type,
        **{key: getattr(config, name) for name, key in form.keys.items()},
        **{key: allowed[0] for key, allowed in form.variants.items()},
        **form.to_config(config),
        "vocab_size": vocab_size,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def from_hf_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a Config; ``resolve_model`` fills derived sizes. Missing keys have transformers' defaults.

    Raises:
        UserError: an architecture without a Hugging Face form, a quantized model, or a variant that Megatron's layers
            do not support.
    """
    form = _form_of(hf)
    for name in ("quantization_config", "compression_config"):
        if hf.get(name):
            method = hf[name].get("quant_method") if isinstance(hf[name], Mapping) else hf[name]
            raise UserError(
                f"config.json has {name} ({method}): its tensors are codes of a quantization, which are not read; "
                "save the model dequantized, in bf16, without that entry"
            )
    given = {form.aliases.get(name, name): value for name, value in hf.items()}
    for name, allowed in form.variants.items():
        if given.get(name, allowed[0]) not in allowed:
            raise UserError(
                f"config.json has {name} {given[name]!r}, which these layers do not have: it must be {allowed[0]!r}"
            )
    found = form.completed(hf)
    options = {name: value for name, value in form.options.items() if value is not None}
    options |= {name: found[key] for name, key in form.keys.items()} | {
        "init_method_std": found["initializer_range"],
        "untie_embeddings_and_output_weights": not found["tie_word_embeddings"],
    }
    options["seq_length"] = options["max_position_embeddings"]
    return checked_options("config.json", options | form.from_config(found))


def vocabulary_of(hf: Mapping[str, Any]) -> int:
    """Rows of the embedding."""
    rows: int = _form_of(hf).completed(hf)["vocab_size"]
    return rows


def defaults_taken(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that config.json lacks, with transformers' defaults."""
    return _form_of(hf).absent(hf)


def _form_of(hf: Mapping[str, Any]) -> HuggingFace:
    kind = str(hf.get("model_type"))
    if kind not in READ:
        raise UserError(f"config.json is of a {kind!r} model; {' and '.join(READ)} can be read")
    return READ[kind]
